//! One daemon for each root directory.
//!
//! The lock in the run directory is not enough: two daemons with two run directories can have the same root directory. Each would
//! take the pods of the other for pods that the node no longer has, and delete the emptyDir content that the other keeps over a
//! shutdown of the node.
//!
//! The lock is on a file that only root may open. Any process that may open a file or directory can lock it (`flock(2)`), and the root
//! directory itself may be open to all users.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::fcntl::Flock;

use crate::supervisor::run_dir::claim::is_still_at;
use crate::supervisor::run_dir::timed_lock::{AlreadyLocked, lock_until};

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
    /// `None` on a file system without locks. podfs works without the lock.
    lock: Option<Flock<File>>,
}

impl RootLock {
    /// Takes the lock. Makes the root directory if it does not exist.
    ///
    /// # Errors
    /// When another daemon holds the lock, and when the directory or the file cannot be made or opened.
    pub fn take(root_directory: &Path) -> Result<RootLock, RootLockError> {
        let failed = |cause| RootLockError::Directory { path: root_directory.to_owned(), cause };
        DirBuilder::new().recursive(true).mode(0o755).create(root_directory).map_err(failed)?;
        let (path, until) = (root_directory.join(LOCK), Instant::now() + LOCK_TIMEOUT);
        loop {
            let mut options = OpenOptions::new();
            options.write(true).create(true).truncate(false).mode(0o600).custom_flags(libc::O_NOFOLLOW);
            let file = options.open(&path).map_err(failed)?;
            let locked = lock_until(file, until);
            let lock = locked.map_err(|AlreadyLocked| RootLockError::Taken(root_directory.to_owned()))?;
            // A daemon that has ended meanwhile has removed this file. Then podfs tries again.
            if lock.as_ref().is_none_or(|lock| is_still_at(lock, &path)) {
                return Ok(RootLock { path, lock });
            }
        }
    }
}

impl Drop for RootLock {
    fn drop(&mut self) {
        // While the file is locked: a daemon that waits for the lock notices that the file is removed.
        if self.lock.is_some() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
