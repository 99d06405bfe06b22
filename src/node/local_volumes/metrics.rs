//! The metrics of local volumes.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};

use super::clean::ErasureProgress;
use crate::metrics::PodReading;
use crate::metrics::families::{LOCAL_VOLUME_ERASED, LOCAL_VOLUME_SIZE, LOCAL_VOLUMES};

/// Numbers of local volumes. Cheap to clone; all clones share the numbers.
#[derive(Clone, Debug, Default)]
pub struct LocalVolumeMetrics(Arc<Mutex<Numbers>>);

#[derive(Debug, Default)]
struct Numbers {
    counts: LocalVolumeCounts,
    cleanings: BTreeMap<String, Arc<ErasureProgress>>,
}

/// The numbers of volumes by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LocalVolumeCounts {
    /// Offered, without a claim.
    pub(super) free: usize,
    /// With a claim.
    pub(super) bound: usize,
    /// Their claim was deleted.
    pub(super) released: usize,
    /// Entries that podfs does not offer.
    pub(super) unfit: usize,
    /// Failed steps that podfs tries again.
    pub(super) failing: usize,
}

impl LocalVolumeMetrics {
    pub(super) fn set(&self, counts: LocalVolumeCounts) {
        self.numbers().counts = counts;
    }

    /// Reports the erasure of a device or file system from now on.
    pub(super) fn begin(&self, volume: &str, progress: &Arc<ErasureProgress>) {
        self.numbers().cleanings.insert(volume.to_owned(), Arc::clone(progress));
    }

    pub(super) fn end(&self, volume: &str) {
        self.numbers().cleanings.remove(volume);
    }

    /// Adds the present values to a reading.
    pub fn add_to(&self, reading: &mut PodReading) {
        let numbers = self.numbers();
        let LocalVolumeCounts { free, bound, released, unfit, failing } = numbers.counts;
        let states = [("free", free), ("bound", bound), ("released", released), ("unfit", unfit), ("failing", failing)];
        for (state, count) in states {
            reading.add(&LOCAL_VOLUMES, &[state], count as f64);
        }
        for (volume, progress) in &numbers.cleanings {
            let size = progress.total.load(Ordering::Relaxed);
            if size > 0 {
                reading.add(&LOCAL_VOLUME_SIZE, &[volume], size as f64);
                reading.add(&LOCAL_VOLUME_ERASED, &[volume], progress.erased.load(Ordering::Relaxed) as f64);
            }
        }
    }

    fn numbers(&self) -> MutexGuard<'_, Numbers> {
        self.0.lock().expect("no code panics while it is locked")
    }
}
