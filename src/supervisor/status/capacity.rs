//! The capacity of volumes that show a source of the node. statfs(2) on a source that does not answer blocks, and so
//! does the call of a driver that hangs. So a few threads look at the sources. The scrape does not wait for a thread
//! that hangs. Until that thread returns, podfs does not look at its volume again. Each scrape starts at most
//! [`MOST_THREADS`] threads, however many threads of earlier scrapes still hang.
//!
//! These threads are not blocking threads of the runtime: mounts and refreshes would lack each such thread that hangs.

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

/// How long all looks of a scrape together may take. A client that asks for metrics waits two seconds.
const TIMEOUT: Duration = Duration::from_secs(1);
/// How many volumes podfs looks at simultaneously.
const MOST_THREADS: usize = 16;

/// A volume to look at.
pub(in crate::supervisor) struct CapacityCheck {
    /// The place of the volume.
    pub(in crate::supervisor) place: usize,
    /// The name of the volume.
    pub(in crate::supervisor) name: String,
    /// The home of the volume, if a CSI driver has mounted it. If the driver has volume statistics, podfs asks the
    /// driver instead of the file system.
    pub(in crate::supervisor) home: Option<DriverHome>,
    /// The object whose capacity is that of the volume.
    pub(in crate::supervisor) at: CapacityTarget,
    /// The state from earlier looks at the volume.
    pub(in crate::supervisor) earlier: CapacityHistory,
}

/// The object whose capacity is that of a volume.
pub(in crate::supervisor) enum CapacityTarget {
    /// The source of a volume that the server serves.
    Source(VolumeObserver),
    /// The mount point of a bind mount.
    Mount(PathBuf),
    /// A block device.
    Device(PathBuf),
}

/// The state from earlier looks at a volume. Cheap to clone.
#[derive(Clone, Default)]
pub(in crate::supervisor) struct CapacityHistory {
    /// Whether a look has not returned yet.
    is_hanging: Arc<AtomicBool>,
    /// The last condition that the volume's driver has reported. A thread locks it only for a comparison.
    condition: Arc<Mutex<String>>,
}

/// Looks at these volumes, and returns their usage by place. Leaves out volumes that do not answer in time.
pub(in crate::supervisor) fn measure(mut looks: Vec<CapacityCheck>) -> HashMap<usize, DriverUsage> {
    let until = Instant::now() + TIMEOUT;
    looks.retain(|look| !look.earlier.is_hanging.load(Ordering::Acquire));
    let threads = looks.len().min(MOST_THREADS);
    let (looks, (sender, receiver)) = (Arc::new(Mutex::new(looks.into_iter())), channel());
    for _ in 0..threads {
        let (looks, sender) = (Arc::clone(&looks), sender.clone());
        let work = move || {
            while let Some(look) = next(&looks, until) {
                let place = look.place;
                // The scrape may have ended by then, and dropped the receiver.
                let _ = sender.send((place, look.usage()));
            }
        };
        // If the kernel starts no thread at all, the scrape leaves out all volumes, as if none answered.
        let _none = thread::Builder::new().name("capacity".to_owned()).spawn(work);
    }
    drop(sender);
    let mut usages = HashMap::new();
    while let Ok((place, usage)) = receiver.recv_timeout(until.saturating_duration_since(Instant::now())) {
        if let Some(usage) = usage {
            usages.insert(place, usage);
        }
    }
    usages
}

/// The next look, unless the time is over.
fn next(looks: &Mutex<IntoIter<CapacityCheck>>, until: Instant) -> Option<CapacityCheck> {
    let is_in_time = Instant::now() < until;
    looks.lock().expect("no thread panics while it takes one").next().filter(|_| is_in_time)
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
    /// Logs the condition of a volume, if it has changed. An empty condition means that the volume is healthy.
    fn compare(&self, volume: &str, condition: &str) {
        let mut last = self.condition.lock().expect("no thread panics while it compares");
        if *last == condition {
            return;
        }
        condition.clone_into(&mut last);
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
            CapacityTarget::Source(watch) => Ok(watch.space_usage()?.map(of_file_system)),
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

/// The usage of a file system, in the type of a driver's report.
fn of_file_system(usage: SpaceUsage) -> DriverUsage {
    let SpaceUsage { capacity, free, available, inodes, inodes_free } = usage;
    let bytes = Amounts { total: capacity, available, used: capacity.saturating_sub(free) };
    let files = Amounts { total: inodes, available: inodes_free, used: inodes.saturating_sub(inodes_free) };
    DriverUsage { bytes: Some(bytes), inodes: Some(files).filter(|files| files.total > 0), condition: None }
}
