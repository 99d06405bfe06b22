//! The metrics of local volumes.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};

use super::clean::CleaningProgress;
use crate::metrics::Reading;
use crate::metrics::families::{LOCAL_VOLUME_ERASED, LOCAL_VOLUME_SIZE, LOCAL_VOLUMES};

/// Numbers of local volumes. Cheap to clone; all clones share the numbers.
#[derive(Clone, Debug, Default)]
pub struct LocalVolumeMetrics(Arc<Mutex<Numbers>>);

#[derive(Debug, Default)]
struct Numbers {
    counts: LocalVolumeCounts,
    cleanings: BTreeMap<String, Arc<CleaningProgress>>,
}

/// How many there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LocalVolumeCounts {
    /// Offered, and no claim has them.
    pub(super) free: usize,
    /// A claim has them.
    pub(super) bound: usize,
    /// Their claim is gone.
    pub(super) released: usize,
    /// Entries that are not offered.
    pub(super) unfit: usize,
    /// Steps that failed and are done again.
    pub(super) failing: usize,
}

impl LocalVolumeMetrics {
    pub(super) fn set(&self, counts: LocalVolumeCounts) {
        self.numbers().counts = counts;
    }

    /// A device or file system is being cleaned.
    pub(super) fn begin(&self, volume: &str, progress: &Arc<CleaningProgress>) {
        self.numbers().cleanings.insert(volume.to_owned(), Arc::clone(progress));
    }

    pub(super) fn end(&self, volume: &str) {
        self.numbers().cleanings.remove(volume);
    }

    /// Adds the present values to a reading.
    pub fn tell(&self, reading: &mut Reading) {
        let numbers = self.numbers();
        let LocalVolumeCounts { free, bound, released, unfit, failing } = numbers.counts;
        let states = [("free", free), ("bound", bound), ("released", released), ("unfit", unfit), ("failing", failing)];
        for (state, count) in states {
            reading.tell(&LOCAL_VOLUMES, &[state], count as f64);
        }
        for (volume, progress) in &numbers.cleanings {
            let size = progress.total.load(Ordering::Relaxed);
            if size > 0 {
                reading.tell(&LOCAL_VOLUME_SIZE, &[volume], size as f64);
                reading.tell(&LOCAL_VOLUME_ERASED, &[volume], progress.erased.load(Ordering::Relaxed) as f64);
            }
        }
    }

    fn numbers(&self) -> MutexGuard<'_, Numbers> {
        self.0.lock().expect("no code panics while it is locked")
    }
}
