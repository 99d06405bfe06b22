//! The state that a supervisor passes to the program that it executes in an upgrade: a variable with the numbers of
//! descriptors that stay open over `execve(2)`, and the same arguments.

use std::env;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use serde::{Deserialize, Serialize};

use super::signal_record;

/// The variable that holds the state.
const VARIABLE: &str = "PODFS_UPGRADE";

/// The content of the variable, as JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct ExecState {
    /// The connection of the client that asked for the upgrade.
    pub(super) connection: RawFd,
    /// The program before.
    pub(super) before: Option<RawFd>,
    /// The podfs-fuse of the program before.
    #[serde(default)]
    pub(super) before_server: Option<RawFd>,
    /// The podfs-fuse of the program that reads this, if it is not the one on disk.
    #[serde(default)]
    pub(super) server: Option<RawFd>,
    /// Why the program after this one has become this one again.
    #[serde(default)]
    pub(super) rolled_back: Option<String>,
    /// The signals to the program before.
    #[serde(default)]
    pub(super) signals: Option<RawFd>,
}

impl ExecState {
    /// The state from the program before, if this process was another version of podfs.
    pub(super) fn of_before() -> Option<ExecState> {
        serde_json::from_str(&env::var(VARIABLE).ok()?).ok()
    }
}

/// Whether this process was another version of podfs, which left its state for this one.
pub(crate) fn upgrade_is_under_way() -> bool {
    env::var_os(VARIABLE).is_some()
}

/// The podfs-fuse of this version, if the program after this one rolled back to this one and left it open. The
/// podfs-fuse on disk is of another version.
pub(super) fn server_program_left() -> Option<OwnedFd> {
    let number = ExecState::of_before()?.server?;
    // SAFETY: the program after this one has left the descriptor for it, and this is called once.
    unsafe { inherited(number) }.ok()
}

/// The record of signals to the program before, which that program has left open.
pub(super) fn record_left() -> Option<OwnedFd> {
    let number = ExecState::of_before()?.signals?;
    // SAFETY: the program before has left the descriptor for this one, and this is called once.
    unsafe { inherited(number) }.ok()
}

/// Takes a descriptor that the program before has left open, and sets its close-on-exec flag.
///
/// # Errors
/// When nothing is open there.
///
/// # Safety
/// No other code in this process owns the descriptor.
pub(super) unsafe fn inherited(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: for a number that is no descriptor, fcntl(2) fails without any effect.
    let set = unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) };
    nix::errno::Errno::result(set)?;
    // SAFETY: it is open, and the caller promises that no other code owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Executes the program at `path` with this state and these descriptors. The program gets the signals that this one has not
/// obeyed, too. Returns only if that fails.
pub(super) fn become_program(path: &Path, mut state: ExecState, left_open: &[BorrowedFd<'_>]) -> io::Error {
    let record = signal_record::record();
    state.signals = record.as_ref().map(AsRawFd::as_raw_fd);
    let set = |flags: FdFlag| {
        let mut all = left_open.iter().chain(&record);
        all.try_for_each(|descriptor| fcntl(descriptor, FcntlArg::F_SETFD(flags)).map(drop))
    };
    if let Err(errno) = set(FdFlag::empty()) {
        return errno.into();
    }
    let state = match serde_json::to_string(&state) {
        Ok(state) => state,
        Err(error) => return error.into(),
    };
    let name = env::args_os().next().unwrap_or_else(|| "podfs".into());
    let mut command = Command::new(path);
    command.arg0(name).args(arguments(env::args_os())).env(VARIABLE, state);
    // SAFETY: there is no new process, so any call is allowed. The standard library unblocks all signals before it.
    let cause = unsafe { command.pre_exec(signal_record::hold) }.exec();
    // The process goes on after all: later children must not inherit them.
    signal_record::release();
    let _ = set(FdFlag::FD_CLOEXEC);
    cause
}

/// The arguments for the next program. They leave out `--ready-fd`, a descriptor that this process has written to and
/// closed, and `--config`, whose settings are in the environment: a pod keeps the settings it was started with.
pub(crate) fn arguments(all: impl Iterator<Item = OsString>) -> Vec<OsString> {
    const LEFT_OUT: [&[u8]; 2] = [b"--ready-fd", b"--config"];
    let mut arguments = Vec::new();
    let mut all = all.skip(1);
    while let Some(argument) = all.next() {
        match LEFT_OUT.iter().find_map(|option| argument.as_bytes().strip_prefix(*option)) {
            Some(b"") => drop(all.next()),
            Some([b'=', ..]) => {}
            _ => arguments.push(argument),
        }
    }
    arguments
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    #[test]
    fn the_next_program_gets_the_arguments_without_ready_fd_and_config() {
        let given = |words: &[&str]| {
            arguments(words.iter().map(OsString::from)).into_iter().map(OsString::into_vec).collect::<Vec<_>>()
        };
        let expected: Vec<Vec<u8>> =
            ["run", "--pod", "a", "--run-dir", "b"].map(|word| word.as_bytes().to_vec()).into();
        assert_eq!(given(&["podfs", "run", "--ready-fd", "9", "--pod", "a", "--run-dir", "b"]), expected);
        assert_eq!(given(&["podfs", "run", "--pod", "a", "--run-dir", "b", "--ready-fd=9"]), expected);
        assert_eq!(given(&["podfs", "--config", "c", "run", "--pod", "a", "--run-dir", "b", "--config=c"]), expected);
    }
}
