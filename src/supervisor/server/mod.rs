//! The server of a pod. The supervisor watches it, and replaces it when it dies.
//!
//! A server that dies is no failure of the pod: the next server continues the FUSE connections
//! (`podfs_fuse::client::succession` says why nothing is lost). The keeper of a server that was killed starts the next
//! server, which is faster than executing the program. If several servers in a row die without having answered a
//! request, the supervisor pauses before it starts the next one, longer each time. It never gives up the mounts.

mod alarm;
mod call;
mod fd_keeper;
mod fusectl;
pub(super) mod oom;
mod process;
pub(crate) mod program;
mod replace;
mod source_errors;
pub(crate) mod spawn;
mod unkillable;
mod watchdog;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::Signal;
use podfs_fuse::client::{AdoptedVolume, LastFdKeeper, ServerClient, TakeoverOutcome, UnloadableVolume};
use podfs_fuse::confinement::Profile;
use podfs_fuse::protocol::Greeting;
use podfs_fuse::{Backoff, DoublingPause};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{error, info, warn};

use super::log_format::LogFormat;
use super::run_dir::cgroup::Cgroup;
use crate::manifest::pod::PodIdentity;
use fd_keeper::{FdKeeperChange, FdKeeperState};
pub(super) use process::Program;
pub(crate) use process::{ProcessEnd, WatchedProcess, kill_server};
use program::ServerProgram;
pub use replace::UpgradeError;
use source_errors::SourceErrors;
use watchdog::WatchdogState;

/// The first and the longest pause before the supervisor starts another server.
const PAUSE: DoublingPause = DoublingPause::new(Duration::from_millis(20), Duration::from_secs(5));
/// How long a process may take to end once it was killed.
const KILL_TIMEOUT: Duration = Duration::from_secs(2);
/// How many servers in a row may end without having answered a request before the supervisor pauses.
const TRIES: u32 = 2;

/// The server of a pod: the process that serves now, and its successors.
pub(super) struct PodServer {
    client: Arc<ServerClient>,
    program: Arc<ServerProgram>,
    pod: PodIdentity,
    profile: Profile,
    log_format: LogFormat,
    /// The cgroup of all servers of the pod.
    cgroup: Option<Cgroup>,
    life: ServerLife,
    keeper: FdKeeperState,
    /// The pauses between attempts to start another keeper.
    keeper_pauses: Backoff,
    history: ServerHistory,
    /// How many servers have replaced another one since the last report.
    restarts: u32,
    /// Whether a takeover has given up volumes since the last report.
    gave_up: bool,
    watchdog: WatchdogState,
    errors: SourceErrors,
}

/// The history of a pod's servers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerHistory {
    /// The process id of the server; `None` while there is no server.
    pub pid: Option<i32>,
    /// How the last server ended.
    pub last_end: Option<String>,
    /// How many servers in a row have ended without having answered a request.
    pub unanswered: u32,
    /// The names of the volumes whose sources do not answer.
    pub silent_sources: Vec<String>,
    /// The errors that the kernel has counted on the disks of sources, by volume.
    pub disk_errors: BTreeMap<String, BTreeMap<String, u64>>,
}

/// An event while a server serves.
enum ServerEvent {
    Ended(ProcessEnd),
    FdKeeper(FdKeeperChange),
    /// The watchdog has looked at the server. The text is its problem, if the server hangs.
    Looked(Option<String>),
}

/// The state of the server process.
enum ServerLife {
    /// A server serves. The servers before it had answered `answered_before` requests.
    Serving { process: WatchedProcess, answered_before: u64 },
    /// There is no server. The supervisor starts the next one at `until`, through the keeper if `by_keeper`.
    Dead { until: Instant, keeper: LastFdKeeper, by_keeper: bool },
    /// The next server takes over the FUSE connections. On success it serves; otherwise there is no server again.
    Succeeding { process: Option<WatchedProcess>, attempt: JoinHandle<(io::Result<TakeoverOutcome>, LastFdKeeper)> },
    /// The supervisor has ended the server for good, because the pod ends.
    Over,
}

impl PodServer {
    /// Starts a server for a pod that has none.
    ///
    /// # Errors
    /// When the server cannot be started, or does not answer.
    pub(super) fn start(
        program: &Arc<ServerProgram>,
        pod: &PodIdentity,
        profile: Profile,
        log_format: LogFormat,
        cgroup: Option<Cgroup>,
    ) -> io::Result<Self> {
        become_subreaper();
        let (process, control) =
            WatchedProcess::start(Program::Own(program), pod, profile, log_format, cgroup.as_ref())?;
        let client = ServerClient::new(control, greeting(pod)).map_err(|error| process.why_not_ready(error))?;
        Ok(Self::serving(Arc::new(client), process, program, pod, profile, log_format).with_cgroup(cgroup))
    }

    /// Adopts the running server at the other end of `control`. Returns the server and its volumes.
    ///
    /// # Errors
    /// When the server does not answer, or podfs does not understand its answer.
    pub(super) fn adopt(
        control: UnixStream,
        pid: i32,
        program: &Arc<ServerProgram>,
        pod: &PodIdentity,
        profile: Profile,
        log_format: LogFormat,
    ) -> io::Result<(Self, Vec<AdoptedVolume>)> {
        become_subreaper();
        let process = WatchedProcess::with_pid(pid)?;
        let (client, volumes) = ServerClient::adopt(control, greeting(pod))?;
        // The server may serve a volume with an access log, although the pod has no such annotation any more.
        let audited = volumes.iter().any(|volume| volume.is_audited());
        let profile = if audited && profile == Profile::Projection { Profile::Audit } else { profile };
        // A FUSE connection over io_uring keeps its rings until it ends, whatever --io-uring says now.
        let has_rings = volumes.iter().any(|volume| volume.is_over_io_uring());
        let profile = if has_rings { profile.max(Profile::Rings) } else { profile };
        Ok((Self::serving(client, process, program, pod, profile, log_format), volumes))
    }

    /// The server whose process serves already, at the other end of `client`.
    fn serving(
        client: Arc<ServerClient>,
        process: WatchedProcess,
        program: &Arc<ServerProgram>,
        pod: &PodIdentity,
        profile: Profile,
        log_format: LogFormat,
    ) -> Self {
        let history = ServerHistory { pid: Some(process.pid()), ..ServerHistory::default() };
        let life = ServerLife::Serving { process, answered_before: client.requests() };
        let mut server = Self {
            client,
            program: Arc::clone(program),
            pod: pod.clone(),
            profile,
            log_format,
            cgroup: None,
            life,
            keeper: FdKeeperState::Unknown,
            keeper_pauses: PAUSE.backoff(),
            history,
            restarts: 0,
            gave_up: false,
            watchdog: WatchdogState::default(),
            errors: SourceErrors::default(),
        };
        server.watch_keeper();
        server
    }

    /// Sets the cgroup in which the supervisor starts successors. Dropping this server removes the cgroup.
    pub(super) fn with_cgroup(mut self, cgroup: Option<Cgroup>) -> Self {
        self.cgroup = cgroup;
        self
    }

    /// The program of this supervisor's servers.
    pub(super) fn program(&self) -> Arc<ServerProgram> {
        Arc::clone(&self.program)
    }

    /// The connection to the server.
    pub(super) fn client(&self) -> Arc<ServerClient> {
        Arc::clone(&self.client)
    }

    /// The history of the servers so far.
    pub(super) fn history(&self) -> &ServerHistory {
        &self.history
    }

    /// How many servers have replaced another one since the last call.
    pub(super) fn take_restarts(&mut self) -> u32 {
        std::mem::take(&mut self.restarts)
    }

    /// The version of the server's program; `None` while there is no server.
    pub(super) fn version(&self) -> Option<String> {
        self.client.facts().map(|(_, program)| program)
    }

    /// Whether a takeover has given up volumes since the last call. They need a new mount.
    pub(super) fn gave_up(&mut self) -> bool {
        std::mem::take(&mut self.gave_up)
    }

    /// Makes the server listen on this socket, on which the next supervisor finds it.
    ///
    /// # Errors
    /// When the server does not answer, or cannot listen.
    pub(super) fn listen(&self, socket: OwnedFd) -> io::Result<()> {
        self.client.listen(socket)
    }

    /// Watches the server, and replaces it when it dies. Returns after each change. Cancel-safe: the next call
    /// continues.
    pub(super) async fn guard(&mut self) {
        match &mut self.life {
            ServerLife::Serving { process, .. } => {
                let event = tokio::select! {
                    end = process.ended() => ServerEvent::Ended(end),
                    change = self.keeper.changed() => ServerEvent::FdKeeper(change),
                    problem = self.watchdog.next_look(process.pid(), &self.client, &mut self.errors) => ServerEvent::Looked(problem),
                };
                match event {
                    ServerEvent::Ended(end) => self.mark_dead(end.to_string(), end),
                    ServerEvent::FdKeeper(change) => self.replace_keeper(change),
                    ServerEvent::Looked(problem) => self.handle_look(problem).await,
                }
            }
            ServerLife::Dead { until, keeper, .. } => {
                // tokio's timer fires only at the next millisecond, even if its time has passed.
                if *until > Instant::now() {
                    sleep_until(*until).await;
                }
                if fd_keeper::is_gone(keeper).await {
                    keeper.let_go();
                    warn!(
                        "the server and its keeper ended; podfs reopens the open files of containers, as far as it can"
                    );
                }
                self.start_next_server();
            }
            ServerLife::Succeeding { process, attempt } => {
                let outcome = tokio::select! {
                    outcome = &mut *attempt => Some(outcome),
                    () = ended(process) => None,
                };
                let outcome = match outcome {
                    Some(outcome) => outcome,
                    None => {
                        if let Some(process) = process {
                            process.hang_up();
                        }
                        attempt.await
                    }
                };
                let outcome = outcome.expect("a task that panics ends the process");
                self.settle(outcome);
            }
            ServerLife::Over => std::future::pending().await,
        }
    }

    /// Waits until the server no longer answers, because it ended or hangs. Without a server this waits forever: no
    /// server can lose a request then.
    pub(super) async fn wait_until_lost(&mut self) {
        let ServerLife::Serving { process, .. } = &self.life else { return std::future::pending().await };
        loop {
            tokio::select! {
                _ = process.ended() => return,
                problem = self.watchdog.next_look(process.pid(), &self.client, &mut self.errors) => if problem.is_some() {
                    return;
                },
            }
        }
    }

    /// Records which sources do not answer, and kills a server that hangs. `problem` says how it hangs.
    async fn handle_look(&mut self, problem: Option<String>) {
        self.history.silent_sources = self.watchdog.silent_sources();
        self.history.disk_errors = self.errors.of_disks();
        if let (Some(reason), ServerLife::Serving { process, .. }) = (problem, &self.life) {
            error!("the server (pid {}) hangs: {reason}; podfs replaces it", process.pid());
            process.kill();
            let end = process.ended_or_inert().await;
            self.mark_dead(format!("{reason}; {end}"), end);
        }
    }

    /// Records the end of the server, and schedules the start of the next one. `description` is the end in words.
    fn mark_dead(&mut self, description: String, end: ProcessEnd) {
        let ServerLife::Serving { answered_before, .. } = &self.life else { return };
        let answered = self.client.requests() > *answered_before;
        self.history.unanswered = if answered { 0 } else { self.history.unanswered + 1 };
        self.history.silent_sources.clear();
        self.watchdog = WatchdogState::default();
        self.history.pid = None;
        self.history.last_end = Some(description);
        let keeper = self.client.mark_dead();
        // A clone of the keeper has the memory layout of the dead server. After a crash, which may be the failed guess
        // of an attacker at that layout, the supervisor executes the program instead, so that the layout is a new one.
        let by_keeper = end == ProcessEnd::Signal(Signal::SIGKILL);
        let dead = ServerLife::Dead { until: Instant::now() + self.pause(), keeper, by_keeper };
        if let ServerLife::Serving { process, .. } = std::mem::replace(&mut self.life, dead) {
            process.reap_in_background();
        }
    }

    /// Starts the successor, which takes over the connections on a blocking thread.
    fn start_next_server(&mut self) {
        let dead = std::mem::replace(&mut self.life, ServerLife::Over);
        let ServerLife::Dead { keeper, by_keeper, .. } = dead else { return };
        match self.start_successor(&keeper, by_keeper) {
            Ok((process, control)) => {
                let (client, pid) = (Arc::clone(&self.client), process.pid());
                let attempt = tokio::task::spawn_blocking(move || {
                    let mut keeper = keeper;
                    let greeted = client.greet(control).inspect(|_| process::separate(pid));
                    let outcome =
                        greeted.and_then(|successor| client.succeed(successor, &mut keeper, UnloadableVolume::GivenUp));
                    (outcome, keeper)
                });
                self.life = ServerLife::Succeeding { process: Some(process), attempt };
            }
            Err(error) => self.fail(&error, keeper),
        }
    }

    /// Starts the successor as a clone of the keeper, which needs no execve(2) and is confined already. Executes the
    /// program if `by_keeper` is false, or if the keeper starts no server.
    fn start_successor(&self, keeper: &LastFdKeeper, by_keeper: bool) -> io::Result<(WatchedProcess, UnixStream)> {
        if by_keeper {
            match WatchedProcess::start_by_keeper(keeper, self.profile) {
                Ok(Some(started)) => return Ok(started),
                Ok(None) => {}
                Err(error) => {
                    warn!("podfs-keeper cannot start the next server: {error}; podfs executes the server's program");
                }
            }
        }
        let (program, cgroup) = (Program::Own(&self.program), self.cgroup.as_ref());
        WatchedProcess::start(program, &self.pod, self.profile, self.log_format, cgroup)
    }

    /// Handles the outcome of a takeover.
    fn settle(&mut self, (outcome, keeper): (io::Result<TakeoverOutcome>, LastFdKeeper)) {
        let ServerLife::Succeeding { process, .. } = &mut self.life else { return };
        let Some(process) = process.take() else { return };
        match outcome {
            Ok(takeover) => {
                for (_, reason) in takeover.given_up {
                    self.gave_up = true;
                    error!("containers have lost a volume, and podfs mounts it anew: {reason}");
                }
                self.restarts += 1;
                self.history.pid = Some(process.pid());
                let last_end = self.history.last_end.as_deref().unwrap_or("it is gone");
                info!("the server ended ({last_end}); another one (pid {}) goes on", process.pid());
                self.life = ServerLife::Serving { process, answered_before: self.client.requests() };
                self.watch_keeper();
            }
            Err(error) => {
                process.kill();
                process.reap_in_background();
                if keeper.has_hung_up() {
                    // The keeper died during the attempt. The next attempt does not use it, so it need not wait.
                    self.life = ServerLife::Dead { until: Instant::now(), keeper, by_keeper: false };
                } else {
                    self.fail(&error, keeper);
                }
            }
        }
    }

    /// Records that no server could be started, and schedules the next attempt.
    fn fail(&mut self, error: &io::Error, keeper: LastFdKeeper) {
        self.history.unanswered += 1;
        self.history.last_end = Some(format!("it could not take over: {error}"));
        let pause = self.pause();
        error!("podfs cannot start a server for the volumes: {error}; it tries again in {} ms", pause.as_millis());
        self.life = ServerLife::Dead { until: Instant::now() + pause, keeper, by_keeper: false };
    }

    /// The pause before the supervisor starts the next server.
    fn pause(&self) -> Duration {
        match self.history.unanswered.checked_sub(TRIES) {
            None | Some(0) => Duration::ZERO,
            Some(more) => PAUSE.after(more - 1),
        }
    }

    /// Continues the server if it is stopped. Returns its process id then.
    pub(super) fn continue_if_stopped(&self) -> Option<i32> {
        let ServerLife::Serving { process, .. } = &self.life else { return None };
        let stopped = Some(process).filter(|process| watchdog::is_stopped(process.pid()))?;
        stopped.signal(rustix::process::Signal::CONT);
        Some(stopped.pid())
    }

    /// Kills the server for good: every call that waits for it fails.
    pub(super) async fn kill(&mut self) {
        self.client.end();
        let life = std::mem::replace(&mut self.life, ServerLife::Over);
        if let ServerLife::Serving { process, .. } | ServerLife::Succeeding { process: Some(process), .. } = life {
            process.kill();
            wait_for_end(&process).await;
        }
    }

    /// Lets the server end by itself, or kills it after `limit`.
    pub(super) async fn stop(mut self, limit: Duration) {
        self.client.end();
        if let ServerLife::Serving { process, .. } = &self.life
            && timeout(limit, process.ended()).await.is_err()
        {
            self.kill().await;
        }
        if let ServerLife::Succeeding { .. } = &self.life {
            self.kill().await;
        }
        // The keeper ends when the server has ended and this process has closed its end of the keeper's channel.
        // `ServerClient::end` has closed that.
        if matches!(self.keeper, FdKeeperState::Unknown | FdKeeperState::Missing(..)) {
            return;
        }
        if timeout(limit, self.keeper.changed()).await.is_err()
            && let FdKeeperState::Watched(keeper) = &self.keeper
        {
            keeper.kill();
            wait_for_end(keeper).await;
        }
    }
}

/// Runs `work` on a blocking thread.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work).await.expect("a blocking thread that panics ends the process")
}

/// Waits at most [`KILL_TIMEOUT`] for the end of a process that was killed. A process that has to write data to an NFS
/// server that does not answer ends when that NFS server answers again.
async fn wait_for_end(process: &WatchedProcess) {
    if timeout(KILL_TIMEOUT, process.ended()).await.is_err() {
        warn!("process {} was killed and waits for a source that does not answer; it ends by itself", process.pid());
    }
}

/// Waits for the end of a process; forever if there is none.
async fn ended(process: &Option<WatchedProcess>) {
    match process {
        Some(process) => drop(process.ended().await),
        None => std::future::pending().await,
    }
}

/// Makes this process a subreaper (`PR_SET_CHILD_SUBREAPER`): the kernel makes the keepers of dead servers its
/// children, and it reaps them.
fn become_subreaper() {
    // On an error, the init process of the PID namespace reaps them instead.
    let _ = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
}

/// The first message of this program to a server.
fn greeting(pod: &PodIdentity) -> Greeting {
    Greeting::new(env!("CARGO_PKG_VERSION"), pod.uid.as_str())
}
