//! The lock on the directory of a pod's volumes.
//!
//! The claim on a pod is in its run directory, so two podfs with two run directories can both claim the pod. If they have the same
//! root directory, they also have the same directory for the pod's volumes, and only one of them locks it.

use std::fs::{self, File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use nix::fcntl::Flock;
use rustix::fs::{major, minor};

use super::timed_lock::{AlreadyLocked, is_still_at, lock_until};

/// Another supervisor serves the pod below this root directory.
#[derive(Debug, thiserror::Error)]
#[error(
    "pod {uid} is already served by a podfs with another --run-dir, or whose run directory was deleted{}; it has the volumes in \
     {}; stop that one first, or give this one another --root-dir",
    .pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default(), .directory.display()
)]
pub struct VolumesTaken {
    /// The uid of the pod.
    pub uid: String,
    /// The process id of the other supervisor, if the kernel lists its lock.
    pub pid: Option<u32>,
    /// The directory of the pod's volumes.
    pub directory: Box<Path>,
}

/// The directory, and its lock as soon as the directory exists. Dropping this releases the lock.
#[derive(Debug)]
pub struct VolumesLock {
    directory: PathBuf,
    lock: Option<Flock<File>>,
}

impl VolumesLock {
    /// The directory, not yet locked.
    pub fn new(directory: &Path) -> Self {
        Self { directory: directory.to_owned(), lock: None }
    }

    /// Locks the directory if it exists and is not locked yet.
    ///
    /// # Errors
    /// When another podfs has locked it.
    pub fn lock(&mut self) -> Result<(), VolumesTaken> {
        self.lock_until(Instant::now())
    }

    /// As [`VolumesLock::lock`], but waits until this time for a podfs that ends.
    ///
    /// # Errors
    /// When another podfs has still locked the directory at this time.
    pub fn lock_until(&mut self, until: Instant) -> Result<(), VolumesTaken> {
        if self.lock.is_some() {
            return Ok(());
        }
        // If the directory does not exist yet, podfs makes it. Another error is also that of the mount that follows.
        let Ok(directory) = File::open(&self.directory) else { return Ok(()) };
        let metadata = directory.metadata();
        let lock = lock_until(directory, until).map_err(|AlreadyLocked| VolumesTaken {
            uid: self.directory.file_name().unwrap_or_default().display().to_string(),
            pid: metadata.ok().and_then(|metadata| holder(&metadata)),
            directory: self.directory.as_path().into(),
        })?;
        self.lock = lock.filter(|lock| is_still_at(lock, &self.directory));
        Ok(())
    }
}

/// The process that has locked this directory. `None` where the kernel lists another device number than the directory has, as on btrfs.
fn holder(directory: &Metadata) -> Option<u32> {
    let device = directory.dev();
    let wanted = format!("{:02x}:{:02x}:{}", major(device), minor(device), directory.ino());
    // 1: FLOCK  ADVISORY  WRITE 4711 00:2a:1234 0 EOF
    let locks = fs::read_to_string("/proc/locks").ok()?;
    let mut locks = locks.lines().map(|line| line.split_whitespace().skip(1).collect::<Vec<_>>());
    locks.find_map(|lock| match lock[..] {
        ["FLOCK", _, _, pid, place, ..] if place == wanted => pid.parse().ok(),
        _ => None,
    })
}
