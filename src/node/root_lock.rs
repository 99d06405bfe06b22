//! One daemon for each root directory.
//!
//! The lock in the run directory is not enough: two daemons with two run directories can have the same root directory. Each would
//! take the pods of the other for pods that the node no longer has, and delete the emptyDir content that the other keeps over a
//! shutdown of the node.
//!
//! The lock is on the directory `pods` in the root directory, which only root may open. Any process that may open a directory can
//! lock it (`flock(2)`), and the root directory itself may be open to all users.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::fcntl::Flock;

use crate::supervisor::run_dir::directory_lock::{AlreadyLocked, lock_directory};

/// How long a daemon that ends, or a child of a killed one, may hold the lock.
const DYING: Duration = Duration::from_secs(3);

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

/// The directory that is locked, in the root directory: that of the pods, as with the kubelet.
const LOCKED: &str = "pods";

/// The lock on the root directory (`flock(2)`). Dropping this releases it, and removes the locked directory if this process has made it
/// and it is empty.
#[derive(Debug)]
pub struct RootLock {
    /// The locked directory, if this process has made it.
    made: Option<PathBuf>,
    /// `None` on a file system without locks. podfs works without the lock.
    _lock: Option<Flock<File>>,
}

impl RootLock {
    /// Takes the lock. Makes the directory if it does not exist.
    ///
    /// # Errors
    /// When another daemon holds the lock, and when the directory cannot be made or opened.
    pub fn take(root_directory: &Path) -> Result<RootLock, RootLockError> {
        let failed = |cause| RootLockError::Directory { path: root_directory.to_owned(), cause };
        DirBuilder::new().recursive(true).mode(0o755).create(root_directory).map_err(failed)?;
        let locked = root_directory.join(LOCKED);
        let made = match DirBuilder::new().mode(0o750).create(&locked) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => None,
            made => made.map(|()| Some(locked.clone())).map_err(failed)?,
        };
        let mut taken = RootLock { made, _lock: None };
        let lock = File::open(&locked).map(|directory| lock_directory(directory, Instant::now() + DYING));
        match lock.map_err(failed)? {
            Ok(lock) => taken._lock = lock,
            Err(AlreadyLocked) => return Err(RootLockError::Taken(root_directory.to_owned())),
        }
        Ok(taken)
    }
}

impl Drop for RootLock {
    fn drop(&mut self) {
        // It has pods, if this fails.
        let _ = self.made.take().map(std::fs::remove_dir);
    }
}
