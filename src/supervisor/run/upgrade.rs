//! Upgrading to the podfs that is on disk now.
//!
//! 1. The supervisor refuses the upgrade if a manifest file is invalid at this moment, or has another pod or other volumes than it
//!    serves: it uses the earlier content, which a program that starts does not know. Then it waits for the work under way, and
//!    replaces the server by a server of the new program, which runs before the old server ends. It starts the new podfs as
//!    `podfs server`. That executes the podfs-fuse of its version, which refuses to serve for another version: both programs are
//!    replaced, or neither. If the new server does not start, the supervisor refuses the upgrade, and nothing has changed.
//! 2. The supervisor executes the new program (`execve(2)`): the process id stays, so the parent process does not notice. No
//!    state of a volume is only in the supervisor's memory: the new program adopts the server, as after a crash.
//! 3. The new program answers the client that asked for the upgrade, on the connection that `execve` left open.
//! 4. If the new program fails before it serves the pod, it rolls back: it executes the previous program again, whose file is open,
//!    too, and that program answers the client. The previous podfs-fuse is open as well, because the podfs-fuse on disk is of the
//!    new version. The new program may refuse its arguments or the manifest, or may not adopt the server, or may fail after that.
//!    It unmounts nothing then, so that the previous program adopts the server with all volumes.
//! 5. A signal that arrives meanwhile, such as SIGTERM, is an order to the program that goes on (`signal_record`).

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

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
    /// Upgrades to the podfs that is on disk now, and sends the outcome to the client that asked for the upgrade.
    pub(in crate::supervisor) async fn upgrade(&mut self, client: PendingClient) {
        // Whichever program goes on shows the progress of the volumes again.
        self.report.hide_progress();
        let refused = |reason| client.answer(&ControlAnswer::Upgrade(Upgrade::Refused { reason }));
        let path = match program_on_disk() {
            Ok(path) => path,
            Err(error) => return refused(error.to_string()),
        };
        // Both the new program and, after a rollback, this one would read these files, and end.
        if let Some(problem) = self.source.start_problem() {
            return refused(format!("{problem}; the new podfs could not read it either: correct it, then try again"));
        }
        if let Some(change) = self.changed_manifest() {
            return refused(format!(
                "{change}; make the file as the pod is, or stop podfs by SIGTERM and start it again"
            ));
        }
        client.answer(&ControlAnswer::Upgrade(Upgrade::Started));
        // If work does not end in time, the new program does it again.
        let _ = timeout(TIMEOUT, self.finish_all()).await;
        // If this program goes on, it has to refresh all volumes, because `finish_all` ignores the outcomes of the work.
        self.version += 1;
        match self.server.upgrade(Program::OfPodfs(&path)).await {
            Ok(()) => {}
            Err(UpgradeError::RolledBack(reason)) => {
                return client.answer(&ControlAnswer::Upgrade(Upgrade::RolledBack { reason }));
            }
            Err(error) => return refused(error.to_string()),
        }
        let server_program = self.server.program();
        self.report.store().counters().written().await;
        let reason = become_new(&path, &client, &server_program).to_string();
        warn!("{} cannot be started: {reason}; podfs {} goes on", path.display(), VERSION);
        if let Err(error) = self.server.upgrade(Program::Own(&server_program)).await {
            warn!("podfs cannot start its own server again, and keeps that of {}: {error}", path.display());
        }
        client.answer(&ControlAnswer::Upgrade(Upgrade::RolledBack { reason }));
    }
}

/// The state from the program that has executed this one in an upgrade or a rollback.
pub(in crate::supervisor) struct UpgradeHandover {
    client: PendingClient,
    /// The executable of the program to roll back to. `None` in a program that another one has rolled back to.
    before: Option<OwnedFd>,
    /// The podfs-fuse of the program to roll back to. `None` if that program serves volumes itself, as old versions do.
    before_server: Option<OwnedFd>,
    /// In a rollback: why the newer program could not continue.
    rolled_back: Option<String>,
}

impl UpgradeHandover {
    /// Reads the state, at the start of this program. `None` without an upgrade, if the client's connection is not open, and after
    /// the first call: the descriptors then belong to the result of that call.
    pub(in crate::supervisor) fn find() -> Option<UpgradeHandover> {
        static IS_READ: AtomicBool = AtomicBool::new(false);
        if IS_READ.swap(true, Ordering::Relaxed) {
            return None;
        }
        let ExecState { connection, before, before_server, rolled_back, .. } = ExecState::of_before()?;
        // SAFETY: the program that executed this one left the descriptors for it, and this is reached once.
        let take = |number: Option<RawFd>| number.and_then(|number| unsafe { inherited(number) }.ok());
        let (before, before_server) = (take(before), take(before_server));
        // SAFETY: as above.
        let client = unsafe { PendingClient::inherited(connection) };
        client
            .inspect_err(|error| warn!("the client that asked for an upgrade is gone: {error}"))
            .ok()
            .map(|client| UpgradeHandover { client, before, before_server, rolled_back })
    }

    /// Rolls the upgrade back: executes the previous program again, because this one cannot serve the pod. Returns if there is no
    /// previous program, or the kernel does not execute it.
    pub(in crate::supervisor) fn give_back(&self, reason: &str) {
        let Some(before) = &self.before else { return };
        error!("podfs {VERSION} cannot continue: {reason}; the podfs before the upgrade continues");
        let path = PathBuf::from(format!("/proc/self/fd/{}", before.as_raw_fd()));
        let connection = self.client.as_fd().as_raw_fd();
        let server = self.before_server.as_ref().map(AsRawFd::as_raw_fd);
        let rolled_back = Some(reason.to_owned());
        let state = ExecState {
            connection,
            before: None,
            before_server: None,
            server,
            rolled_back,
            signals: None,
            ready_fd: None,
        };
        let left_open: Vec<_> = self.before_server.iter().map(AsFd::as_fd).chain([self.client.as_fd()]).collect();
        let cause = become_program(&path, state, &left_open);
        error!("the podfs before the upgrade cannot continue either: {cause}");
    }

    /// Answers the client with the version that serves the volumes.
    pub(in crate::supervisor) fn complete(self) {
        match self.rolled_back {
            None => {
                info!("podfs {VERSION} serves the pod now");
                self.client.answer(&ControlAnswer::Upgrade(Upgrade::Done { version: VERSION.to_owned() }));
            }
            Some(reason) => self.client.answer(&ControlAnswer::Upgrade(Upgrade::RolledBack { reason })),
        }
    }
}

/// Rolls an upgrade back if this program fails before it prepares to serve the pod. The program calls this only if its arguments
/// are those of a supervisor. Returns if there is no upgrade, or if the kernel does not execute the previous program.
pub(crate) fn roll_back(reason: &str) {
    if let Some(handover) = UpgradeHandover::find() {
        handover.give_back(reason);
    }
}

/// Executes the new program at `path`, and leaves open what it needs for a rollback. Returns only if that fails.
pub(in crate::supervisor) fn become_new(
    path: &Path,
    client: &PendingClient,
    server_program: &ServerProgram,
) -> io::Error {
    let before = match File::open("/proc/self/exe") {
        Ok(before) => before,
        Err(error) => return error,
    };
    let connection = client.as_fd().as_raw_fd();
    let before_server = Some(server_program.as_fd().as_raw_fd());
    let before_program = Some(before.as_raw_fd());
    let state = ExecState {
        connection,
        before: before_program,
        before_server,
        server: None,
        rolled_back: None,
        signals: None,
        ready_fd: None,
    };
    become_program(path, state, &[client.as_fd(), before.as_fd(), server_program.as_fd()])
}
