//! The supervisor: the life of one pod's volumes, from the first mount to the last unmount.
//!
//! | module | owns |
//! |---|---|
//! | [`volume`] | one volume: waiting, live, or live with a refresh that failed |
//! | `server` | the server process |
//! | [`claim`] | that one pod has one supervisor |
//! | [`report`] | readiness and state, told to people, to the node agent and to systemd |
//! | `machine` | what this machine offers to pods |
//!
//! One task runs the pod. It never blocks: whatever makes system calls on a mount (bringing a volume
//! up, committing) runs on a blocking thread, one per volume at a time, and takes the volume with it.
//! So a volume that hangs holds up no other.
//!
//! Shutdown loses nothing and leaves nothing:
//! 1. No new work is started; work under way is given two seconds, then the server is killed, which
//!    ends every call that waits for it.
//! 2. Each volume is unmounted while the server still answers.
//! 3. The server's socket is closed; it ends by itself, and is killed if it does not.
//! 4. The directories made for the volumes are removed, then the claim is given up.

pub mod claim;
mod machine;
pub mod report;
mod server;
pub mod volume;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{debug, info, warn};

use podfs_fuse::mount::MountError;
use podfs_fuse::mount::directories::Directories;
use podfs_fuse::mount::visible::{Leftovers, MountPoint};

use crate::manifest::pod::{PodFacts, PodIdentity};
use crate::source::{FileSource, Snapshot};
use crate::volume::Volume;
use claim::Claim;
use report::Report;
use server::ServerProcess;
use volume::{Attempt, PodVolume, Refresh};

/// How long work under way may take when podfs is told to stop, and a server to end.
const PATIENCE: Duration = Duration::from_secs(2);

/// What one supervisor serves.
pub struct Assignment {
    /// The pod the volumes belong to.
    pub identity: PodIdentity,
    /// What else is known of it, until the source says more.
    pub facts: PodFacts,
    /// The volumes, and where each is to be seen.
    pub volumes: Vec<(Volume, PathBuf)>,
    /// The right to serve them, where somebody else might.
    pub claim: Option<Claim>,
    /// Directories made for the pod so far.
    pub directories: Directories,
    /// Report every FUSE request on standard output.
    pub trace: bool,
}

/// Why a supervisor ended early. Everything it had mounted is unmounted again.
#[derive(Debug, thiserror::Error)]
pub enum SupervisorError {
    /// A volume cannot be mounted, and waiting would not help.
    #[error("volume {volume:?}: {cause}")]
    Mount {
        /// Its name.
        volume: String,
        /// Why.
        cause: MountError,
    },
    /// The server could not be started.
    #[error("cannot start the server process: {0}")]
    Start(#[source] std::io::Error),
    /// The server ended while it was needed.
    #[error("the server process ended unexpectedly ({0}); the volumes of the pod are unmounted")]
    ServerEnded(String),
    /// What was made could not be written down.
    #[error("cannot write the run directory: {0}")]
    Record(#[source] std::io::Error),
    /// The process cannot listen for signals.
    #[error("cannot listen for signals: {0}")]
    Signals(#[source] std::io::Error),
}

/// Serves the volumes until the process is told to stop.
///
/// # Errors
/// When the volumes cannot be served. A missing object is not an error: its volume waits.
pub async fn run(
    assignment: Assignment,
    source: FileSource,
    snapshot: Snapshot,
    report: Report,
) -> Result<(), SupervisorError> {
    let mut stop = StopSignals::listen().map_err(SupervisorError::Signals)?;
    let Assignment { identity, facts, volumes, mut claim, mut directories, trace } = assignment;
    let leftovers = if claim.is_some() { Leftovers::Remove } else { Leftovers::RemoveDead };
    let points = mount_points(&volumes, leftovers, &mut directories)?;
    if let Some(claim) = &mut claim {
        claim.record(&directories).map_err(SupervisorError::Record)?;
    }
    let allocatable = machine::allocatable(points.first().map(MountPoint::path));
    let facts = snapshot.pod.as_ref().map_or(facts, |pod| pod.facts.clone());
    let refresh = Refresh { identity: identity.clone(), facts, objects: snapshot.objects, allocatable };

    let server = ServerProcess::start(&identity).map_err(SupervisorError::Start)?;
    let volumes: Vec<_> = volumes.into_iter().map(|(volume, _)| volume).collect();
    let idle = volumes.iter().zip(points).enumerate();
    let idle = idle.map(|(place, (spec, point))| (place, PodVolume::new(spec.clone(), point, trace, server.client())));
    let mut supervisor = Supervisor {
        identity,
        source,
        report,
        idle: idle.collect(),
        server,
        working: JoinSet::new(),
        refreshed: vec![0; volumes.len()],
        retry_at: vec![None; volumes.len()],
        refresh: Arc::new(refresh),
        version: 1,
        volumes,
    };
    let outcome = supervisor.serve(&mut stop).await;
    supervisor.shut_down().await;
    drop(directories);
    drop(claim);
    outcome
}

fn mount_points(
    volumes: &[(Volume, PathBuf)],
    leftovers: Leftovers,
    directories: &mut Directories,
) -> Result<Vec<MountPoint>, SupervisorError> {
    let prepare = |(volume, path): &(Volume, PathBuf)| {
        let point = MountPoint::prepare(path, leftovers, directories);
        point.map_err(|cause| SupervisorError::Mount { volume: volume.name.to_string(), cause })
    };
    volumes.iter().map(prepare).collect()
}

struct Supervisor {
    identity: PodIdentity,
    source: FileSource,
    report: Report,
    server: ServerProcess,
    /// Volumes with nothing to do, by their place in the manifest.
    idle: HashMap<usize, PodVolume>,
    working: JoinSet<(usize, PodVolume, Attempt)>,
    /// What each volume was last refreshed with; it is behind while this is not `version`.
    refreshed: Vec<u64>,
    retry_at: Vec<Option<Instant>>,
    refresh: Arc<Refresh>,
    version: u64,
    volumes: Vec<Volume>,
}

impl Supervisor {
    async fn serve(&mut self, stop: &mut StopSignals) -> Result<(), SupervisorError> {
        self.report.started();
        loop {
            self.start_work();
            self.report.progress();
            let retry = self.retry_at.iter().flatten().min().copied();
            tokio::select! {
                signal = stop.received() => {
                    info!("{signal} received: unmounting");
                    return Ok(());
                }
                ended = self.server.ended() => return Err(SupervisorError::ServerEnded(ended)),
                snapshot = self.source.changed() => self.take_snapshot(snapshot),
                Some(done) = self.working.join_next() => self.finish_work(done)?,
                () = sleep_until(retry.unwrap_or_else(Instant::now)), if retry.is_some() => {}
            }
        }
    }

    /// Sends every volume that is behind, or that is due for another try, to a blocking thread.
    fn start_work(&mut self) {
        let now = Instant::now();
        let due: Vec<_> = self
            .idle
            .keys()
            .copied()
            .filter(|place| self.refreshed[*place] < self.version || self.retry_at[*place].is_some_and(|at| at <= now))
            .collect();
        for place in due {
            let Some(mut volume) = self.idle.remove(&place) else { continue };
            self.refreshed[place] = self.version;
            self.retry_at[place] = None;
            let refresh = Arc::clone(&self.refresh);
            self.working.spawn_blocking(move || {
                let attempt = volume.refresh(&refresh);
                (place, volume, attempt)
            });
        }
    }

    fn finish_work(
        &mut self,
        done: Result<(usize, PodVolume, Attempt), tokio::task::JoinError>,
    ) -> Result<(), SupervisorError> {
        let (place, volume, attempt) = done.expect("a blocking thread that panics ends the process");
        match attempt {
            Attempt::Settled => {}
            Attempt::RetryIn(delay) => self.retry_at[place] = Some(Instant::now() + delay),
            Attempt::Hopeless(cause) => {
                let name = volume.spec().name.to_string();
                self.idle.insert(place, volume);
                return Err(SupervisorError::Mount { volume: name, cause });
            }
        }
        self.report.volume(place, volume.spec(), volume.path(), volume.state());
        self.idle.insert(place, volume);
        Ok(())
    }

    fn take_snapshot(&mut self, snapshot: Snapshot) {
        let facts = match &snapshot.pod {
            Some(pod) if pod.identity != self.identity => {
                warn!("the pod manifest now describes {}; podfs goes on with {}", pod.identity, self.identity);
                self.refresh.facts.clone()
            }
            Some(pod) => {
                if pod.volumes != self.volumes {
                    warn!(
                        "the volumes of a pod cannot change while it runs; the new ones take effect when it is restarted"
                    );
                }
                pod.facts.clone()
            }
            None => self.refresh.facts.clone(),
        };
        debug!("the manifests changed");
        let Refresh { identity, allocatable, .. } = &*self.refresh;
        self.refresh = Arc::new(Refresh {
            identity: identity.clone(),
            allocatable: *allocatable,
            facts,
            objects: snapshot.objects,
        });
        self.version += 1;
    }

    async fn shut_down(mut self) {
        self.report.stopping();
        if timeout(PATIENCE, self.finish_all()).await.is_err() {
            warn!("a commit does not end; the server is killed");
            self.server.kill().await;
            self.finish_all().await;
        }
        for (_, volume) in self.idle {
            let name = volume.spec().name.clone();
            if let Err(error) = volume.take_down() {
                warn!("volume {:?}: {error}", name.as_str());
            }
        }
        self.server.stop(PATIENCE).await;
    }

    async fn finish_all(&mut self) {
        while let Some(done) = self.working.join_next().await {
            if let Ok((place, volume, _)) = done {
                self.idle.insert(place, volume);
            }
        }
    }
}

/// The signals that mean: unmount and end.
struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
}

impl StopSignals {
    fn listen() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: signal(SignalKind::hangup())?,
        })
    }

    async fn received(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.hang_up.recv() => "SIGHUP",
        }
    }
}
