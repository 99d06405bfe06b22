//! Upgrading to the podfs that is on disk now.
//!
//! 1. The supervisor waits for the work under way, and replaces the server by one of the new program, which runs before
//!    the old one ends. It starts the new podfs as `podfs server`, which executes its own podfs-fuse, and refuses one
//!    of another version: both programs are replaced, or neither. If the new program does not start, the supervisor
//!    refuses the upgrade, and nothing has changed.
//! 2. The supervisor executes the new program (`execve(2)`): the process id stays, so its parent does not notice. No
//!    state of a volume is only in its memory: the new program adopts the server, as after a crash.
//! 3. The new program answers the client that asked for the upgrade, on the connection that `execve` left open.
//! 4. If it cannot adopt the server, it executes the previous program again, whose file is open too, and that program answers the
//!    client. The previous podfs-fuse is open as well: the one on disk is of the other version.
//! 5. A signal that arrives meanwhile, such as SIGTERM, is an order to the program that goes on (`signal_record`).

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

use tokio::time::timeout;
use tracing::{error, info, warn};

use super::{Supervisor, TIMEOUT};
use crate::supervisor::control::{ControlAnswer, PendingClient, Upgrade};
use crate::supervisor::exec_state::{ExecState, become_program, inherited};
use crate::supervisor::installed::program_on_disk;
use crate::supervisor::server::program::ServerProgram;
use crate::supervisor::server::{Program, UpgradeError};
use crate::supervisor::status::store::VERSION;

impl Supervisor {
    /// Upgrades to the podfs that is on disk now, and sends the outcome to `upgrading`, the client that asked for it.
    pub(in crate::supervisor) async fn upgrade(&mut self, upgrading: PendingClient) {
        // The program that goes on shows its progress again.
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
        self.report.store().counters().written().await;
        let reason = become_new(&path, &upgrading, &server_program).to_string();
        warn!("{} cannot be started: {reason}; podfs {} goes on", path.display(), VERSION);
        if let Err(error) = self.server.upgrade(Program::Own(&server_program)).await {
            warn!("podfs cannot start its own server again, and keeps that of {}: {error}", path.display());
        }
        upgrading.answer(&ControlAnswer::Upgrade(Upgrade::RolledBack { reason }));
    }
}

/// The state from the program before this one, if that has executed this one.
pub(in crate::supervisor) struct UpgradeHandover {
    upgrading: PendingClient,
    /// The executable of the program before, to roll back to.
    before: Option<OwnedFd>,
    /// The podfs-fuse of the program before. `None` if that program served volumes itself.
    before_server: Option<OwnedFd>,
    rolled_back: Option<String>,
}

impl UpgradeHandover {
    /// Reads the state, at the start of this process.
    pub(in crate::supervisor) fn find() -> Option<UpgradeHandover> {
        let ExecState { connection, before, before_server, rolled_back, .. } = ExecState::of_before()?;
        // SAFETY: the program that executed this one left the descriptors for it, and this is called once.
        let left = |number: Option<RawFd>| number.and_then(|number| unsafe { inherited(number) }.ok());
        let (before, before_server) = (left(before), left(before_server));
        // SAFETY: as above.
        let upgrading = unsafe { PendingClient::inherited(connection) };
        upgrading
            .inspect_err(|error| warn!("the client that asked for an upgrade is gone: {error}"))
            .ok()
            .map(|upgrading| UpgradeHandover { upgrading, before, before_server, rolled_back })
    }

    /// Executes the previous program again, if there is one, because this one cannot adopt the pod's server. Returns if
    /// that is not possible.
    pub(in crate::supervisor) fn give_back(&self, reason: &str) {
        let Some(before) = &self.before else { return };
        error!("podfs {VERSION} cannot continue: {reason}; the podfs before the upgrade continues");
        let path = PathBuf::from(format!("/proc/self/fd/{}", before.as_raw_fd()));
        let connection = self.upgrading.as_fd().as_raw_fd();
        let server = self.before_server.as_ref().map(AsRawFd::as_raw_fd);
        let rolled_back = Some(reason.to_owned());
        let state = ExecState { connection, before: None, before_server: None, server, rolled_back, signals: None };
        let left_open: Vec<_> = self.before_server.iter().map(AsFd::as_fd).chain([self.upgrading.as_fd()]).collect();
        let cause = become_program(&path, state, &left_open);
        error!("the podfs before the upgrade cannot continue either: {cause}");
    }

    /// Answers the client with the version that serves the volumes.
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

/// Executes the program at `path`. Returns only if that fails.
pub(in crate::supervisor) fn become_new(
    path: &Path,
    upgrading: &PendingClient,
    server_program: &ServerProgram,
) -> io::Error {
    let before = match File::open("/proc/self/exe") {
        Ok(before) => before,
        Err(error) => return error,
    };
    let connection = upgrading.as_fd().as_raw_fd();
    let before_server = Some(server_program.as_fd().as_raw_fd());
    let before_program = Some(before.as_raw_fd());
    let state =
        ExecState { connection, before: before_program, before_server, server: None, rolled_back: None, signals: None };
    become_program(path, state, &[upgrading.as_fd(), before.as_fd(), server_program.as_fd()])
}
