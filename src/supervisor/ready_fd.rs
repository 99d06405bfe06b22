//! The descriptor to which a supervisor writes one JSON object when its pod is ready (`--ready-fd`).
//!
//! A supervisor may be upgraded while a volume still waits for an object. Then the next program gets the descriptor and writes the object:
//! to the node agent, the end of the file without an object means that the pod failed.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, MutexGuard};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};

/// The descriptor of this process.
static READY_FD: Mutex<ReadyFd> = Mutex::new(ReadyFd::NotTaken);

enum ReadyFd {
    /// The program has not taken a descriptor. One that its arguments name stays open over `execve(2)`.
    NotTaken,
    /// The pod is not ready yet.
    Waiting(OwnedFd),
    /// The object is written, and the descriptor closed.
    Written,
}

/// Takes the descriptor that `--ready-fd` names.
///
/// # Errors
/// When the kernel does not set the descriptor's close-on-exec flag. Closes the descriptor then.
pub(crate) fn take(descriptor: OwnedFd) -> io::Result<()> {
    fcntl(&descriptor, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
    *state() = ReadyFd::Waiting(descriptor);
    Ok(())
}

/// Writes the object that `json` makes, and closes the descriptor. Does nothing without `--ready-fd`, and after the first call.
///
/// # Errors
/// When the object cannot be made or written, for example because nobody reads. Closes the descriptor then, too.
pub(super) fn write(json: impl FnOnce() -> io::Result<Vec<u8>>) -> io::Result<()> {
    let waiting = {
        let mut state = state();
        if !matches!(*state, ReadyFd::Waiting(_)) {
            return Ok(());
        }
        std::mem::replace(&mut *state, ReadyFd::Written)
    };
    let ReadyFd::Waiting(descriptor) = waiting else { return Ok(()) };
    File::from(descriptor).write_all(&json()?)
}

/// The number of the descriptor, unless the object is written. `inherited` finds the number that the program which executed this one has
/// left, for a program that has not taken the descriptor.
pub(super) fn unwritten(inherited: impl FnOnce() -> Option<RawFd>) -> Option<RawFd> {
    match &*state() {
        ReadyFd::Waiting(descriptor) => Some(descriptor.as_raw_fd()),
        ReadyFd::NotTaken => inherited(),
        ReadyFd::Written => None,
    }
}

/// Sets the flags of the descriptor, unless the object is written.
///
/// # Errors
/// When the kernel refuses.
pub(super) fn set_flags(flags: FdFlag) -> nix::Result<()> {
    match &*state() {
        ReadyFd::Waiting(descriptor) => fcntl(descriptor, FcntlArg::F_SETFD(flags)).map(drop),
        ReadyFd::NotTaken | ReadyFd::Written => Ok(()),
    }
}

fn state() -> MutexGuard<'static, ReadyFd> {
    READY_FD.lock().expect("a thread that panics ends the process")
}
