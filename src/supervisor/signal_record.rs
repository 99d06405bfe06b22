//! The signals that this program has received and not obeyed yet, for the program that it executes in an upgrade. No signal is
//! lost, whenever it arrives:
//!
//! 1. The signal handlers write each signal into a pipe, the record. The next program inherits the record, and obeys the first
//!    signal in it.
//! 2. A supervisor records signals before it makes its first file. When it can obey orders, it obeys the first signal in its record.
//! 3. The thread that executes the next program blocks the signals just before `execve(2)`, which keeps the thread's signal mask
//!    and the pending signals. The next program unblocks the signals when it has set its handlers.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use nix::sys::signal::{SigSet, Signal};
use rustix::pipe::{PipeFlags, pipe_with};
use tracing::warn;

/// The signals that are orders to a supervisor (`SupervisorOrder`).
const SIGNALS: [Signal; 4] = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGUSR1];

/// The read end of the record.
static RECORD: OnceLock<OwnedFd> = OnceLock::new();
/// The write end of the record.
static WRITER: OnceLock<File> = OnceLock::new();

/// Makes this process record its signals, so that none of them ends it by default. Other handlers of these signals still run.
/// `inherited` finds the record of the program that has executed this one in an upgrade. Does nothing in a process that records
/// signals already.
///
/// # Errors
/// When the kernel makes no pipe, or sets no handlers.
pub(super) fn start(inherited: impl FnOnce() -> Option<OwnedFd>) -> io::Result<()> {
    if RECORD.get().is_some() {
        return Ok(());
    }
    let earlier = inherited().and_then(|record| first(&File::from(record)));
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    let mut writer = File::from(writer);
    if let Some(signal) = earlier {
        // If this program rolls the upgrade back, the earlier program finds the signal in this record.
        writer.write_all(&[signal as u8])?;
    }
    if RECORD.set(reader).is_ok() {
        for signal in SIGNALS.into_iter().filter(|signal| *signal != Signal::SIGHUP || !is_hangup_ignored()) {
            let writer = writer.try_clone()?;
            let record_signal = move || drop((&writer).write(&[signal as u8]));
            // SAFETY: the action only calls write(2) on a pipe that does not block, which is safe in a signal handler.
            unsafe { signal_hook_registry::register(signal as libc::c_int, record_signal) }?;
        }
    }
    let _it_is_set_once = WRITER.set(writer);
    // The program that has executed this one has blocked the signals.
    unblock();
    Ok(())
}

/// Whether the process that started podfs ignores SIGHUP for it, as nohup(1) does: then podfs goes on when the terminal is closed. Only
/// true until a handler is set.
pub(crate) fn is_hangup_ignored() -> bool {
    // SAFETY: the kernel writes the present action to the memory, which outlives the call; all zeros are a valid action.
    let action = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGHUP, std::ptr::null(), &raw mut action);
        action
    };
    action.sa_sigaction == libc::SIG_IGN
}

/// The first signal in the record of this process. It stays there, for the earlier program if this one rolls the upgrade back.
pub(super) fn first_recorded() -> Option<Signal> {
    let signal = first(&File::from(RECORD.get()?.try_clone().ok()?))?;
    // The pipe has room, because a byte of it was read.
    WRITER.get().and_then(|mut writer| writer.write_all(&[signal as u8]).ok());
    Some(signal)
}

/// The record of this process, for the next program.
pub(super) fn record() -> Option<BorrowedFd<'static>> {
    RECORD.get().map(AsFd::as_fd)
}

/// Blocks the signals in this thread until [`unblock`], or until the next program records signals.
///
/// # Errors
/// Never. `CommandExt::pre_exec` needs this type.
pub(super) fn block() -> io::Result<()> {
    Ok(SIGNALS.into_iter().collect::<SigSet>().thread_block()?)
}

/// Unblocks the signals that [`block`] has blocked.
pub(super) fn unblock() {
    let _it_cannot_fail = SIGNALS.into_iter().collect::<SigSet>().thread_unblock();
}

/// The first signal in a record, if there is one. Skips bytes that are no order to this version of podfs.
fn first(mut record: &File) -> Option<Signal> {
    let mut byte = [0];
    loop {
        record.read_exact(&mut byte).ok()?;
        match SIGNALS.into_iter().find(|signal| *signal as u8 == byte[0]) {
            Some(signal) => return Some(signal),
            None => {
                warn!("the podfs before has left an order that this podfs does not know ({}), and ignores", byte[0])
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_record_has_the_bytes_that_other_versions_read() {
        // A byte for each signal.
        let recorded = include_bytes!("../../tests/golden/signals.bin");
        assert_eq!(SIGNALS.map(|signal| signal as u8), *recorded);
        for (byte, expected) in recorded.iter().zip(SIGNALS) {
            let (reader, mut writer) = std::io::pipe().expect("a pipe");
            writer.write_all(&[*byte]).expect("written");
            assert_eq!(first(&File::from(OwnedFd::from(reader))), Some(expected));
        }
    }

    #[test]
    fn an_unknown_byte_hides_no_order_behind_it() {
        let (reader, mut writer) = std::io::pipe().expect("a pipe");
        writer.write_all(&[0, 99, Signal::SIGTERM as u8]).expect("written");
        drop(writer);
        let record = File::from(OwnedFd::from(reader));
        assert_eq!((first(&record), first(&record)), (Some(Signal::SIGTERM), None));
    }
}
