//! One daemon for each root directory.
//!
//! The lock in the run directory is not enough: two daemons with two run directories can have the same root directory. Each would
//! take the pods of the other for pods that the node no longer has, and delete the emptyDir content that the other keeps over a
//! shutdown of the node.
//!
//! The lock is on a file that only root may open. Any process that may open a file or directory can lock it (`flock(2)`), and the root
//! directory itself may be open to all users.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::fcntl::Flock;
use tracing::warn;

use crate::supervisor::run_dir::timed_lock::{AlreadyLocked, is_still_at, lock_until};

/// How long a daemon that ends, or a child of a killed one, may hold the lock.
const LOCK_TIMEOUT: Duration = Duration::from_secs(3);

/// Why the daemon cannot use the root directory.
#[derive(Debug, thiserror::Error)]
pub enum RootLockError {
    /// A daemon with another run directory uses it.
    #[error(
        "a podfs node with another --run-dir uses {} already; stop that one first, or give this one another --root-dir",
        .0.display()
    )]
    Taken(PathBuf),
    /// It cannot be made or opened.
    #[error("cannot use {}: {cause}", .path.display())]
    Directory {
        /// The root directory.
        path: PathBuf,
        /// The error of the system call.
        #[source]
        cause: io::Error,
    },
}

/// The locked file, in the root directory.
const LOCK: &str = ".podfs-node.lock";

/// The lock on the root directory (`flock(2)`). Dropping this removes the file and releases the lock.
#[derive(Debug)]
pub struct RootLock {
    path: PathBuf,
    /// `None` on a file system without locks, or one that is full or can only be read. podfs works without the lock.
    lock: Option<Flock<File>>,
}

impl RootLock {
    /// Takes the lock. Makes the root directory if it does not exist.
    ///
    /// # Errors
    /// When another daemon holds the lock, and when the directory or the file cannot be made or opened for another reason than a full
    /// or read-only file system.
    pub fn take(root_directory: &Path) -> Result<RootLock, RootLockError> {
        let failed = |cause| RootLockError::Directory { path: root_directory.to_owned(), cause };
        DirBuilder::new().recursive(true).mode(0o755).create(root_directory).map_err(failed)?;
        let (path, until) = (root_directory.join(LOCK), Instant::now() + LOCK_TIMEOUT);
        loop {
            let file = match open(&path) {
                Ok(file) => file,
                // The pods of the node need the daemon more than the lock.
                Err(error) if is_full_or_read_only(&error) => {
                    warn!("podfs cannot lock {}: {error}; let no other podfs node use it", root_directory.display());
                    return Ok(RootLock { path, lock: None });
                }
                Err(error) => return Err(failed(error)),
            };
            let locked = lock_until(file, until);
            let lock = locked.map_err(|AlreadyLocked| RootLockError::Taken(root_directory.to_owned()))?;
            // A daemon that has ended meanwhile has removed this file. Then podfs tries again.
            if lock.as_ref().is_none_or(|lock| is_still_at(lock, &path)) {
                return Ok(RootLock { path, lock });
            }
        }
    }
}

/// Opens the file, and makes it if it does not exist. NFS locks only files that are open for writing; on a file system that can only
/// be read, podfs locks the file that a killed daemon has left.
fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_NOFOLLOW);
    let opened = options.clone().write(true).create(true).truncate(false).mode(0o600).open(path);
    opened
        .or_else(|error| if is_full_or_read_only(&error) { options.open(path).map_err(|_| error) } else { Err(error) })
}

fn is_full_or_read_only(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::ReadOnlyFilesystem)
}

impl Drop for RootLock {
    fn drop(&mut self) {
        // While the file is locked: a daemon that waits for the lock notices that the file is removed.
        if self.lock.is_some() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
