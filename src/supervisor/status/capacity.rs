//! The capacity of volumes that show something of the host. statfs(2) on a source that does not answer blocks, and so
//! does a call of a driver that hangs. So a few threads look. A thread that hangs is left behind; until it returns,
//! podfs does not look at its volume again. A scrape starts at most [`MOST_THREADS`], whatever earlier ones have left
//! behind.
//!
//! They are not blocking threads of the runtime: a hanging one would be missing for mounts and refreshes.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use std::vec::IntoIter;

use podfs_fuse::client::VolumeObserver;
use podfs_fuse::passthrough::SpaceUsage;
use rustix::fs::{CWD, Mode, OFlags, openat};
use tracing::{debug, info, warn};

use crate::driver::DriverHome;
use crate::driver::csi::{self, Amounts, DriverUsage};

/// How long all looks together may take. A client that asks for metrics waits two seconds.
const TIMEOUT: Duration = Duration::from_secs(1);
/// How many volumes podfs looks at simultaneously.
const MOST_THREADS: usize = 16;

/// A volume to look at.
pub(in crate::supervisor) struct CapacityCheck {
    /// Its place in the manifest.
    pub(in crate::supervisor) place: usize,
    /// Its name.
    pub(in crate::supervisor) name: String,
    /// Its home, if a CSI driver has mounted it. podfs asks a driver with volume statistics, rather than the file
    /// system.
    pub(in crate::supervisor) home: Option<DriverHome>,
    /// What to look at.
    pub(in crate::supervisor) at: CapacityTarget,
    /// The state from earlier looks.
    pub(in crate::supervisor) earlier: CapacityHistory,
}

/// What to look at.
pub(in crate::supervisor) enum CapacityTarget {
    /// Its source.
    Source(VolumeObserver),
    /// Its mount point: it is a bind mount.
    Mount(PathBuf),
    /// A block device.
    Device(PathBuf),
}

/// The state from earlier looks at a volume. Cheap to clone.
#[derive(Clone, Default)]
pub(in crate::supervisor) struct CapacityHistory {
    /// Whether a look has not returned yet.
    is_hanging: Arc<AtomicBool>,
    /// The last condition that its driver has reported. Locked for single comparisons.
    condition: Arc<Mutex<String>>,
}

/// Looks at all of these, and returns the usage by place. Leaves out volumes that do not answer in time.
pub(in crate::supervisor) fn look(mut looks: Vec<CapacityCheck>) -> HashMap<usize, DriverUsage> {
    let until = Instant::now() + TIMEOUT;
    looks.retain(|look| !look.earlier.is_hanging.load(Ordering::Acquire));
    let threads = looks.len().min(MOST_THREADS);
    let (looks, (found, findings)) = (Arc::new(Mutex::new(looks.into_iter())), channel());
    for _ in 0..threads {
        let (looks, found) = (Arc::clone(&looks), found.clone());
        let work = move || {
            while let Some(look) = next(&looks, until) {
                let place = look.place;
                // The reader may have given up by then.
                let _ = found.send((place, look.usage()));
            }
        };
        // Without a single thread, all volumes count as ones that do not answer.
        let _none = thread::Builder::new().name("capacity".to_owned()).spawn(work);
    }
    drop(found);
    let mut usages = HashMap::new();
    while let Ok((place, usage)) = findings.recv_timeout(until.saturating_duration_since(Instant::now())) {
        if let Some(usage) = usage {
            usages.insert(place, usage);
        }
    }
    usages
}

/// The next look, unless the time is over.
fn next(looks: &Mutex<IntoIter<CapacityCheck>>, until: Instant) -> Option<CapacityCheck> {
    let in_time = Instant::now() < until;
    looks.lock().expect("no thread panics while it takes one").next().filter(|_| in_time)
}

impl CapacityCheck {
    /// The usage of the volume, unless an earlier look at it has not returned yet.
    fn usage(self) -> Option<DriverUsage> {
        let CapacityCheck { name, home, at, earlier, .. } = self;
        if earlier.is_hanging.swap(true, Ordering::AcqRel) {
            return None;
        }
        let usage = home.and_then(|home| of_driver(&home)).map_or_else(|| at.usage(), |usage| Ok(Some(usage)));
        if let Ok(Some(DriverUsage { condition: Some(condition), .. })) = &usage {
            earlier.compare(&name, condition);
        }
        earlier.is_hanging.store(false, Ordering::Release);
        usage.ok().flatten()
    }
}

/// The usage that the volume's driver reports, if it has statistics and answers.
fn of_driver(home: &DriverHome) -> Option<DriverUsage> {
    csi::usage(home).unwrap_or_else(|error| {
        debug!("{error}; podfs asks the file system");
        None
    })
}

impl CapacityHistory {
    /// Logs the condition of a volume, unless the last line said the same.
    fn compare(&self, volume: &str, condition: &str) {
        let mut before = self.condition.lock().expect("no thread panics while it compares");
        if *before == condition {
            return;
        }
        condition.clone_into(&mut before);
        match condition {
            "" => info!(volume, "volume {volume:?}: its CSI driver reports it as healthy again"),
            condition => {
                warn!(volume, "volume {volume:?}: its CSI driver reports it as abnormal: {condition}");
            }
        }
    }
}

impl CapacityTarget {
    fn usage(self) -> io::Result<Option<DriverUsage>> {
        match self {
            CapacityTarget::Source(watch) => Ok(watch.room()?.map(of_file_system)),
            CapacityTarget::Mount(path) => {
                let file = openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
                SpaceUsage::at(file).map(of_file_system).map(Some)
            }
            CapacityTarget::Device(path) => {
                let total = File::open(path)?.seek(SeekFrom::End(0))?;
                Ok(Some(DriverUsage { bytes: Some(Amounts { total, ..Amounts::default() }), ..DriverUsage::default() }))
            }
        }
    }
}

fn of_file_system(room: SpaceUsage) -> DriverUsage {
    let SpaceUsage { capacity, free, available, inodes, inodes_free } = room;
    let bytes = Amounts { total: capacity, available, used: capacity.saturating_sub(free) };
    let files = Amounts { total: inodes, available: inodes_free, used: inodes.saturating_sub(inodes_free) };
    DriverUsage { bytes: Some(bytes), inodes: Some(files).filter(|files| files.total > 0), condition: None }
}
