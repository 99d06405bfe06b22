//! The state that a supervisor passes to the program that it executes in an upgrade: an environment variable with the
//! numbers of descriptors that stay open over `execve(2)`, and the arguments of this program.

use std::env;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::signal::{SigHandler, Signal, signal};
use serde::{Deserialize, Serialize};

use super::{ready_fd, signal_record};
use crate::types::{UnusableRecord, parse_record};

/// The environment variable that holds the state.
const VARIABLE: &str = "PODFS_UPGRADE";

/// The content of the variable, as JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct ExecState {
    /// The connection of the client that asked for the upgrade.
    pub(super) connection: RawFd,
    /// The executable of the program that wrote this state. The program that reads it executes that again to roll back.
    pub(super) before: Option<RawFd>,
    /// The podfs-fuse of the program that wrote this state, for a rollback.
    #[serde(default)]
    pub(super) before_server: Option<RawFd>,
    /// In a rollback: the podfs-fuse of the program that reads this state. The podfs-fuse on disk is of another version.
    #[serde(default)]
    pub(super) server: Option<RawFd>,
    /// In a rollback: why the new program has executed the earlier one again.
    #[serde(default)]
    pub(super) rolled_back: Option<String>,
    /// The record of signals of the program that wrote this state ([`signal_record`]).
    #[serde(default)]
    pub(super) signals: Option<RawFd>,
    /// The descriptor of `--ready-fd`, if the pod was not ready yet ([`ready_fd`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) ready_fd: Option<RawFd>,
}

impl ExecState {
    /// The state from the program that has executed this one in an upgrade, if one has. A state of another version ([`check`]) is
    /// good for a rollback, if it has the same fields.
    pub(super) fn of_before() -> Option<ExecState> {
        serde_json::from_str(&env::var(VARIABLE).ok()?).ok()
    }
}

/// Why the state of the program that has executed this one cannot be used.
#[derive(Debug, thiserror::Error)]
#[error(
    "podfs cannot take over from the podfs that has executed it, because of the state in {VARIABLE}: {0}; the pod is still served: start podfs anew"
)]
pub(crate) struct ExecStateError(#[source] UnusableRecord);

/// Checks the state from the program that has executed this one, if one has. After an error, this program must roll the upgrade
/// back, or end before it changes anything: its server serves the pod until the next start.
///
/// # Errors
/// When only another version of podfs can use the state.
pub(crate) fn check() -> Result<(), ExecStateError> {
    env::var(VARIABLE).map_or(Ok(()), |state| parse(&state).map(drop).map_err(ExecStateError))
}

fn parse(state: &str) -> Result<ExecState, UnusableRecord> {
    parse_record(state.as_bytes())
}

/// Whether another version of podfs has executed this program in an upgrade or a rollback, and left its state for it.
pub(crate) fn upgrade_is_under_way() -> bool {
    env::var_os(VARIABLE).is_some()
}

/// The podfs-fuse of this version, which a newer podfs left open when it rolled an upgrade back to this program. The
/// podfs-fuse on disk is of that newer version.
pub(super) fn server_program_left() -> Option<OwnedFd> {
    let number = ExecState::of_before()?.server?;
    // SAFETY: the program that executed this one has left the descriptor for it, and this is called once.
    unsafe { inherited(number) }.ok()
}

/// The record of signals that the program which executed this one has left open. `None` after the first call.
pub(super) fn record_left() -> Option<OwnedFd> {
    static IS_TAKEN: AtomicBool = AtomicBool::new(false);
    let number = ExecState::of_before()?.signals?;
    if IS_TAKEN.swap(true, Ordering::Relaxed) {
        return None;
    }
    // SAFETY: the program that executed this one has left the descriptor for it, and this is reached once.
    unsafe { inherited(number) }.ok()
}

/// Takes a descriptor that the program which executed this one has left open, and sets its close-on-exec flag.
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
    // SAFETY: the descriptor is open, and the caller promises that no other code owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Executes the program at `path` in this process, with this state, and with the descriptors `left_open`. The program also
/// gets the record of the signals that this one has not obeyed. Returns only if that fails.
pub(super) fn become_program(path: &Path, mut state: ExecState, left_open: &[BorrowedFd<'_>]) -> io::Error {
    // A program that fails before it records signals passes on the record that it has inherited.
    let inherited = signal_record::record().is_none().then(record_left).flatten();
    let record = signal_record::record().or(inherited.as_ref().map(AsFd::as_fd));
    state.signals = record.as_ref().map(AsRawFd::as_raw_fd);
    state.ready_fd = ready_fd::unwritten(|| ExecState::of_before()?.ready_fd);
    let set_flags = |flags: FdFlag| {
        let mut all = left_open.iter().chain(&record);
        all.try_for_each(|descriptor| fcntl(descriptor, FcntlArg::F_SETFD(flags)).map(drop))?;
        ready_fd::set_flags(flags)
    };
    if let Err(errno) = set_flags(FdFlag::empty()) {
        return errno.into();
    }
    let mut given = arguments(env::args_os());
    given.extend(state.ready_fd.map(|number| format!("{READY_FD}={number}").into()));
    let state = match serde_json::to_string(&state) {
        Ok(state) => state,
        Err(error) => return error.into(),
    };
    let name = env::args_os().next().unwrap_or_else(|| "podfs".into());
    let mut command = Command::new(path);
    command.arg0(name).args(given).env(VARIABLE, state);
    // SAFETY: `exec` does not fork, so any call is allowed. The standard library unblocks all signals before this call.
    let cause = unsafe { command.pre_exec(signal_record::block) }.exec();
    // The kernel did not execute the program, and this one goes on. `exec` has set the default action of SIGPIPE, which ends a
    // process that writes to a pipe without a reader.
    ignore_sigpipe();
    signal_record::unblock();
    // The later children of this program must not inherit the descriptors.
    let _ = set_flags(FdFlag::FD_CLOEXEC);
    cause
}

/// Makes a write(2) to a pipe without a reader fail, as the standard library does at the start of a program.
fn ignore_sigpipe() {
    // SAFETY: no handler is set.
    let _it_cannot_fail = unsafe { signal(Signal::SIGPIPE, SigHandler::SigIgn) };
}

/// The option with the descriptor to which the program writes when the pod is ready.
const READY_FD: &str = "--ready-fd";
/// The option with the file of the settings. The settings are in the environment: a pod keeps the settings that it was started with.
const CONFIG: &str = "--config";

/// The arguments for the next program: those of this one without its name, `--ready-fd` and `--config`.
pub(crate) fn arguments(all: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut arguments = Vec::new();
    let mut all = all.skip(1);
    while let Some(argument) = all.next() {
        match [READY_FD, CONFIG].iter().find_map(|option| argument.as_bytes().strip_prefix(option.as_bytes())) {
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
    use crate::types::golden::{golden, values};

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

    #[test]
    fn the_state_has_the_bytes_that_other_versions_read() {
        let states = values::<ExecState>(golden!("exec-state.jsonl"));
        assert_eq!((states[0].connection, states[0].before, states[0].signals), (9, Some(10), Some(12)));
        assert_eq!((states[1].server, states[1].rolled_back.as_deref()), (Some(11), Some("it does not start")));
        assert_eq!((states[1].ready_fd, states[2].ready_fd), (None, Some(7)));
    }

    #[test]
    fn a_state_of_another_version_is_refused() {
        for unknown in [r#"{"version":2,"connection":9,"before":10}"#, r#"{"connection":"a socket"}"#, "{"] {
            let refused = ExecStateError(parse(unknown).expect_err(unknown)).to_string();
            assert!(refused.contains("the state in PODFS_UPGRADE: "), "{refused}");
            assert!(refused.ends_with("the pod is still served: start podfs anew"), "{refused}");
        }
    }
}
