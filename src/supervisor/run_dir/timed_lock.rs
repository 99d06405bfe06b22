//! A lock on an open file or directory (`flock(2)`), with a limit of the time for which podfs waits for it.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

/// The pause before the next try to lock.
const PAUSE: Duration = Duration::from_millis(5);

/// Another process has locked the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AlreadyLocked;

/// Locks an open file or directory until the returned value is dropped. While another process has locked it, waits until this time:
/// the kernel closes the files of a process that ends one after the other. Returns `None` on a file system without locks; podfs works
/// without the lock.
///
/// # Errors
/// When another process has still locked the file at this time.
pub fn lock_until(mut file: File, until: Instant) -> Result<Option<Flock<File>>, AlreadyLocked> {
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(Some(lock)),
            Err((_, Errno::EWOULDBLOCK)) if Instant::now() >= until => return Err(AlreadyLocked),
            Err((same, Errno::EWOULDBLOCK)) => file = same,
            Err(_) => return Ok(None),
        }
        sleep(PAUSE);
    }
}

/// Whether `path` leads to the open file `file`.
pub fn is_still_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), std::fs::metadata(path)) {
        (Ok(held), Ok(found)) => (held.dev(), held.ino()) == (found.dev(), found.ino()),
        _ => false,
    }
}
