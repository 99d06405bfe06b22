//! Going on as the podfs that is on disk now.
//!
//! 1. The supervisor waits for the work under way, and replaces the server by one of the new program, which runs before the old
//!    one ends. It starts the new podfs as `podfs server`, which executes its own podfs-fuse, and refuses one of another version:
//!    both programs are replaced, or neither. A program that does not start is refused here; nothing has happened.
//! 2. It becomes the new program itself (`execve(2)`): the process id stays, so its parent does not notice. No state of a volume
//!    is only in its memory: the new program adopts the server, as after a crash.
//! 3. The new program answers the client that asked for the upgrade, on the connection that `execve` left open.
//! 4. If it cannot adopt the server, it executes the previous program again, whose file is open too, and that program answers the
//!    client. The previous podfs-fuse is open as well: the one on disk is of the other version.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use serde::{Deserialize, Serialize};
use tokio::time::timeout;
use tracing::{error, info, warn};

use super::{Supervisor, TIMEOUT};
use crate::supervisor::control::{Caller, ControlAnswer, Upgrade};
use crate::supervisor::server::program::ServerProgram;
use crate::supervisor::server::{Program, UpgradeError};
use crate::supervisor::status::store::VERSION;

/// The state that a program passes to the program that it executes.
pub(in crate::supervisor) const LEGACY: &str = "PODFS_UPGRADE";
/// Beside the directory of a podfs that a container has installed, the link to the directory of the last one.
pub(crate) const CURRENT: &str = "current";

impl Supervisor {
    /// Goes on as the podfs that is on disk now, and answers the client that asked for it, `upgrading`, with the outcome.
    pub(in crate::supervisor) async fn upgrade(&mut self, upgrading: Caller) {
        // The program that goes on shows it anew.
        self.report.hide_progress();
        let path = match program_on_disk() {
            Ok(path) => path,
            Err(error) => {
                return upgrading.answer(&ControlAnswer::Upgrade(Upgrade::Refused { reason: error.to_string() }));
            }
        };
        upgrading.answer(&ControlAnswer::Upgrade(Upgrade::Started));
        // The new program continues work that does not end in time.
        let _ = timeout(TIMEOUT, self.finish_all()).await;
        // If this program goes on, it refreshes all volumes again.
        self.version += 1;
        match self.server.upgrade(Program::OfPodfs(&path)).await {
            Ok(()) => {}
            Err(UpgradeError::Refused(reason)) => {
                return upgrading.answer(&ControlAnswer::Upgrade(Upgrade::Refused { reason }));
            }
            Err(UpgradeError::RolledBack(reason)) => {
                return upgrading.answer(&ControlAnswer::Upgrade(Upgrade::RolledBack { reason }));
            }
        }
        let server_program = self.server.program();
        let reason = become_new(&path, &upgrading, &server_program).to_string();
        warn!("{} cannot be started: {reason}; podfs {} goes on", path.display(), VERSION);
        if let Err(error) = self.server.upgrade(Program::Own(&server_program)).await {
            warn!("podfs cannot start its own server again, and keeps that of {}: {error}", path.display());
        }
        upgrading.answer(&ControlAnswer::Upgrade(Upgrade::RolledBack { reason }));
    }
}

/// What the program before this one has left, if it has become this one.
pub(in crate::supervisor) struct Continuing {
    upgrading: Caller,
    /// The program before, until it is not needed any more.
    before: Option<OwnedFd>,
    /// The podfs-fuse of the program before. None if that program served volumes itself.
    before_server: Option<OwnedFd>,
    rolled_back: Option<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Legacy {
    /// The client's connection, on which it waits for the answer.
    connection: RawFd,
    /// The program before.
    before: Option<RawFd>,
    /// The podfs-fuse of the program before.
    #[serde(default)]
    before_server: Option<RawFd>,
    /// The podfs-fuse of the program that reads this, if it is not the one on disk.
    #[serde(default)]
    server: Option<RawFd>,
    /// Why the program after this one has become this one again.
    #[serde(default)]
    rolled_back: Option<String>,
}

/// Whether this process was another version of podfs, which left its state for this one.
pub fn is_under_way() -> bool {
    env::var_os(LEGACY).is_some()
}

impl Continuing {
    /// Finds what the program before has left, when this process begins.
    pub(in crate::supervisor) fn find() -> Option<Continuing> {
        let legacy: Legacy = serde_json::from_str(&env::var(LEGACY).ok()?).ok()?;
        let Legacy { connection, before, before_server, rolled_back, .. } = legacy;
        // SAFETY: the program that executed this one left the descriptors for it, and this is called once.
        let left = |number: Option<RawFd>| number.and_then(|number| unsafe { inherited(number) }.ok());
        let (before, before_server) = (left(before), left(before_server));
        // SAFETY: as above.
        let upgrading = unsafe { Caller::inherited(connection) };
        upgrading
            .inspect_err(|error| warn!("the client that asked for an upgrade is gone: {error}"))
            .ok()
            .map(|upgrading| Continuing { upgrading, before, before_server, rolled_back })
    }

    /// The pod's server cannot be adopted, for this reason: executes the previous program again, if there is one. Returns when
    /// that is not possible.
    pub(in crate::supervisor) fn give_back(&self, reason: &str) {
        let Some(before) = &self.before else { return };
        error!("podfs {VERSION} cannot continue: {reason}; the podfs before the upgrade continues");
        let path = PathBuf::from(format!("/proc/self/fd/{}", before.as_raw_fd()));
        let connection = self.upgrading.as_fd().as_raw_fd();
        let server = self.before_server.as_ref().map(AsRawFd::as_raw_fd);
        let rolled_back = Some(reason.to_owned());
        let legacy = Legacy { connection, before: None, before_server: None, server, rolled_back };
        let left_open: Vec<_> = self.before_server.iter().map(AsFd::as_fd).chain([self.upgrading.as_fd()]).collect();
        let cause = become_program(&path, &legacy, &left_open);
        error!("the podfs before the upgrade cannot continue either: {cause}");
    }

    /// The volumes are served as before: answers the client with the version that serves them.
    pub(in crate::supervisor) fn complete(self) {
        match self.rolled_back {
            None => {
                info!("podfs {VERSION} serves the pod now");
                self.upgrading.answer(&ControlAnswer::Upgrade(Upgrade::Done { version: VERSION.to_owned() }));
            }
            Some(reason) => self.upgrading.answer(&ControlAnswer::Upgrade(Upgrade::RolledBack { reason })),
        }
    }
}

/// The podfs-fuse that the program after this one has left, when this one goes on in its place. What is on disk is of another
/// version.
pub(in crate::supervisor) fn server_program_left() -> Option<OwnedFd> {
    let legacy: Legacy = serde_json::from_str(&env::var(LEGACY).ok()?).ok()?;
    // SAFETY: the program after this one has left the descriptor for it, and this is called once.
    unsafe { inherited(legacy.server?) }.ok()
}

/// Takes a descriptor that the program before has left open. No process that is started from here on gets it, too.
///
/// # Errors
/// When nothing is open there.
///
/// # Safety
/// No other code in this process owns the descriptor.
pub(in crate::supervisor) unsafe fn inherited(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: for a number that is no descriptor, fcntl(2) fails without any effect.
    let set = unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) };
    nix::errno::Errno::result(set)?;
    // SAFETY: it is open, and the caller promises that no other code owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Why there is no program to go on as.
#[derive(Debug, thiserror::Error)]
pub(in crate::supervisor) enum NoProgram {
    #[error(transparent)]
    Unknown(#[from] io::Error),
    #[error("there is no podfs at {} any more", .0.display())]
    Gone(PathBuf),
}

/// Where the program that runs here was started from, whatever is there now; or where a container has installed podfs on the node
/// since then.
///
/// # Errors
/// When there is nothing that could be started.
pub(in crate::supervisor) fn program_on_disk() -> Result<PathBuf, NoProgram> {
    const DELETED: &[u8] = b" (deleted)";
    let path = std::fs::read_link("/proc/self/exe")?;
    let bytes = path.as_os_str().as_bytes();
    let path = PathBuf::from(OsStr::from_bytes(bytes.strip_suffix(DELETED).unwrap_or(bytes)));
    let name = path.file_name().unwrap_or_default().to_owned();
    let installed = path.parent().and_then(Path::parent).map(|all| all.join(CURRENT).join(&name));
    let path = installed.filter(|installed| installed.is_file()).unwrap_or(path);
    if path.is_file() { Ok(path) } else { Err(NoProgram::Gone(path)) }
}

/// Becomes the program at `path`. Returns only why that failed.
pub(in crate::supervisor) fn become_new(path: &Path, upgrading: &Caller, server_program: &ServerProgram) -> io::Error {
    let before = match File::open("/proc/self/exe") {
        Ok(before) => before,
        Err(error) => return error,
    };
    let connection = upgrading.as_fd().as_raw_fd();
    let before_server = Some(server_program.as_fd().as_raw_fd());
    let before_program = Some(before.as_raw_fd());
    let legacy = Legacy { connection, before: before_program, before_server, server: None, rolled_back: None };
    become_program(path, &legacy, &[upgrading.as_fd(), before.as_fd(), server_program.as_fd()])
}

fn become_program(path: &Path, legacy: &Legacy, left_open: &[BorrowedFd<'_>]) -> io::Error {
    let set = |flags: FdFlag| {
        left_open.iter().try_for_each(|descriptor| fcntl(descriptor, FcntlArg::F_SETFD(flags)).map(drop))
    };
    if let Err(errno) = set(FdFlag::empty()) {
        return errno.into();
    }
    let legacy = match serde_json::to_string(legacy) {
        Ok(legacy) => legacy,
        Err(error) => return error.into(),
    };
    let name = env::args_os().next().unwrap_or_else(|| "podfs".into());
    let cause = Command::new(path).arg0(name).args(arguments(env::args_os())).env(LEGACY, legacy).exec();
    // The process goes on after all: later children must not inherit them.
    let _ = set(FdFlag::FD_CLOEXEC);
    cause
}

/// The arguments of this process, without the descriptor that it has written to and closed, and without the file of settings,
/// which are in the environment by now: a pod keeps those it was started with.
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
    fn a_descriptor_that_was_written_to_and_settings_are_not_asked_for_again() {
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
