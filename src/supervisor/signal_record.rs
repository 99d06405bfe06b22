//! The signals to this program that it has not obeyed yet, for the program that it executes in an upgrade. No signal is lost,
//! whenever it arrives:
//!
//! 1. The handlers write each signal into a pipe, the record. The next program inherits the record, and obeys the first signal in
//!    it.
//! 2. The thread that executes the next program blocks the signals just before it, and `execve(2)` keeps both its mask and what is
//!    pending. The next program unblocks them when it has its handlers.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use nix::sys::signal::{SigSet, Signal};
use rustix::pipe::{PipeFlags, pipe_with};

/// The signals that carry orders.
const SIGNALS: [Signal; 4] = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGUSR1];

/// The read end of the record.
static RECORD: OnceLock<OwnedFd> = OnceLock::new();

/// Lets this process record signals, besides what its other handlers do. `before` is the record of the program before this one;
/// returns the first signal in it.
///
/// # Errors
/// When there is no pipe, or the handlers cannot be set.
pub(super) fn start(before: Option<OwnedFd>) -> io::Result<Option<Signal>> {
    let earlier = before.and_then(|before| first(&File::from(before)));
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    let mut writer = File::from(writer);
    if let Some(signal) = earlier {
        // For a program to which this one rolls back.
        writer.write_all(&[signal as u8])?;
    }
    if RECORD.set(reader).is_ok() {
        for signal in SIGNALS {
            let writer = writer.try_clone()?;
            let note = move || drop((&writer).write(&[signal as u8]));
            // SAFETY: the action only calls write(2) on a pipe that does not block, which is safe in a signal handler.
            unsafe { signal_hook_registry::register(signal as libc::c_int, note) }?;
        }
    }
    // The program before this one may have blocked them.
    release();
    Ok(earlier)
}

/// The record of this process, for the next program.
pub(super) fn record() -> Option<BorrowedFd<'static>> {
    RECORD.get().map(AsFd::as_fd)
}

/// Blocks the signals in this thread until [`release`], or until the next program records signals.
///
/// # Errors
/// Never.
pub(super) fn hold() -> io::Result<()> {
    Ok(SIGNALS.into_iter().collect::<SigSet>().thread_block()?)
}

/// Ends [`hold`].
pub(super) fn release() {
    let _it_cannot_fail = SIGNALS.into_iter().collect::<SigSet>().thread_unblock();
}

fn first(mut record: &File) -> Option<Signal> {
    let mut byte = [0];
    record.read_exact(&mut byte).ok()?;
    Signal::try_from(i32::from(byte[0])).ok()
}
