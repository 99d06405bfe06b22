//! The file that a descriptor is open on: opening it once more, and a path that leads to it alone.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// Opens the file that `file` is open on once more, with other flags.
pub(super) fn reopen(file: BorrowedFd<'_>, flags: OFlags) -> Result<OwnedFd, Errno> {
    // The path is a magic link of `/proc`, which `O_NOFOLLOW` would refuse.
    let flags = flags.difference(OFlags::NOFOLLOW) | OFlags::CLOEXEC;
    rustix::fs::open(proc_path(file), flags, Mode::empty())
}

/// A path that leads to the file that `file` is open on, and to no other file.
pub(super) fn proc_path(file: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}
