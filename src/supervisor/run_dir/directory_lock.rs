//! A lock on a directory itself (`flock(2)`), without a file in it.

use std::fs::File;
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

/// The pause before the next try to lock.
const PAUSE: Duration = Duration::from_millis(5);

/// Another process has locked the directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AlreadyLocked;

/// Locks an open directory until the returned value is dropped. While another process has locked it, waits until this time: the
/// kernel closes the files of a process that ends one after the other. Returns `None` on a file system without locks on
/// directories; podfs works without the lock.
///
/// # Errors
/// When another process has still locked the directory at this time.
pub fn lock_directory(mut directory: File, until: Instant) -> Result<Option<Flock<File>>, AlreadyLocked> {
    loop {
        match Flock::lock(directory, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(Some(lock)),
            Err((_, Errno::EWOULDBLOCK)) if Instant::now() >= until => return Err(AlreadyLocked),
            Err((same, Errno::EWOULDBLOCK)) => directory = same,
            Err(_) => return Ok(None),
        }
        sleep(PAUSE);
    }
}
