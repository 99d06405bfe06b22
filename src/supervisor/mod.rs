//! The supervisor: the life of one pod's volumes, from the first mount to the last unmount.
//!
//! | module | owns |
//! |---|---|
//! | [`volume`] | one volume: waiting, live, or live with a refresh that failed |
//! | `server` | the server process, and those that follow when it dies |
//! | `adoption` | taking over from a supervisor that was killed |
//! | `cgroup` | where the server's memory is counted and limited |
//! | `oom` | whom the kernel kills last |
//! | `upgrade` | going on as another version of podfs |
//! | [`site`] | where volumes appear |
//! | [`mount_points`] | directories and mount points, made and taken back |
//! | `sharing` | volumes of one claim, which are one mount |
//! | [`claim`] | that one pod has one supervisor |
//! | [`bounds`] | which paths that an earlier podfs recorded are believed |
//! | [`report`] | readiness and state, told to people, to the node agent and to systemd |
//! | `progress` | what a terminal shows while volumes come up, below the log |
//! | `status_store` | the state of the pod at this moment, for `podfs status` and metrics |
//! | `work` | what is done on blocking threads |
//! | `shutdown` | ending, with nothing left behind or with all of it |
//! | `orders` | what signals tell it to do |
//! | `signals` | being told to end |
//! | `heartbeat` | telling systemd that this process goes on |
//! | `health` | whether what has become of the servers is trouble |
//! | [`status`] | what is told of a pod and its volumes |
//! | [`metrics`] | the same in numbers |
//! | `counters` | what is counted, and kept for the next supervisor |
//! | `capacity` | how much room there is in volumes whose sources may not answer |
//! | [`control`] | the socket on which the supervisor is asked |
//! | `questions` | asking a server that may not answer |
//! | `socket` | sockets in the run directory, however long its path is |
//! | `unmount_watch` | noticing that another process has unmounted a volume |
//! | `machine` | what this machine offers to pods |
//!
//! One task runs the pod. It never blocks: whatever makes system calls on a mount (bringing a volume
//! up, committing) runs on a blocking thread, one per volume at a time, and takes the volume with it.
//! So a volume that hangs holds up no other. Who asks on the control socket is answered by threads of its own.

mod adoption;
pub mod bounds;
mod capacity;
pub(crate) mod cgroup;
pub mod claim;
pub mod control;
mod counters;
mod health;
mod heartbeat;
pub mod machine;
pub mod metrics;
pub mod mount_points;
mod oom;
mod orders;
pub(crate) mod progress;
mod questions;
pub mod report;
pub(crate) mod server;
mod sharing;
mod shutdown;
pub(crate) mod signals;
pub mod site;
mod socket;
pub mod status;
mod status_store;
pub mod trust;
mod unmount_watch;
pub mod upgrade;
pub mod volume;
mod work;

use std::collections::HashMap;
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{self, Duration};

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use tracing::{debug, info, warn};

use podfs_fuse::confinement::Profile;
use podfs_fuse::mount::MountError;
use podfs_fuse::mount::private::Shape;
use podfs_fuse::mount::visible::MountPoint;

use crate::manifest::pod::{PodFacts, PodIdentity};
use crate::metrics::{Exposition, exporter};
use crate::source::{Inbox, Snapshot, Source};
use crate::volume::{Volume, VolumeSource};
use adoption::Kept;
use cgroup::Cgroup;
use claim::{Claim, Inheritance};
use control::{Control, Upgrading};
use heartbeat::Heartbeat;
use mount_points::{MountPoints, MountPointsError};
use orders::{Order, Orders};
use report::Report;
use server::PodServer;
use server::program::ServerProgram;
use sharing::Sharing;
use site::Site;
use unmount_watch::UnmountWatch;
use upgrade::Continuing;
use volume::search::Searches;
use volume::{End, PodVolume, Refresh, Setting};
use work::Done;

/// How long work under way may take when podfs is told to stop, and a server to end.
const TIMEOUT: Duration = Duration::from_secs(2);

/// What one supervisor serves.
pub struct Assignment {
    /// The pod the volumes belong to.
    pub identity: PodIdentity,
    /// What else is known of it, until the source says more.
    pub facts: PodFacts,
    /// The volumes.
    pub volumes: Vec<Volume>,
    /// Where they are to be seen.
    pub site: Site,
    /// The right to serve them, where somebody else might.
    pub claim: Option<Claim>,
    /// What is left of a podfs that served the pod before.
    pub inheritance: Inheritance,
    /// The program of its servers.
    pub server_program: ServerProgram,
    /// Report every FUSE request on standard output.
    pub trace: bool,
    /// How long a projection keeps a generation after the switch to the next one.
    pub keep_old_generations: Duration,
    /// Most bytes of memory that the server may take.
    pub server_memory: Option<u64>,
    /// Where metrics are served over HTTP, too.
    pub metrics: Option<TcpListener>,
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
    /// What was made could not be written down.
    #[error(transparent)]
    MountPoints(#[from] MountPointsError),
    /// The socket that the server is found at cannot be made.
    #[error("cannot make the socket {}: {cause}", path.display())]
    Socket {
        /// Where.
        path: PathBuf,
        /// What the kernel said.
        cause: std::io::Error,
    },
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
    source: Source,
    snapshot: Snapshot,
    mut report: Report,
) -> Result<(), SupervisorError> {
    let mut orders = Orders::listen().map_err(SupervisorError::Signals)?;
    let Assignment { identity, facts, volumes, site, mut claim, inheritance, server_memory, metrics, .. } = assignment;
    let Assignment { trace, keep_old_generations, .. } = assignment;
    let server_program = Arc::new(assignment.server_program);
    oom::protect_supervisor();
    let cgroup = claim.as_mut().and_then(|claim| {
        cgroup::warn_of_kubelet();
        let cgroup = Cgroup::of_server(&identity.uid, server_memory, claim.cgroup());
        claim.set_cgroup(cgroup.as_ref().map(Cgroup::path));
        cgroup
    });
    let allocatable = machine::allocatable(site.path());
    let facts = snapshot.pod.as_ref().map_or(facts, |pod| pod.facts.clone());
    let Snapshot { objects, tokens, is_settling, .. } = snapshot;
    let refresh = Refresh { identity: identity.clone(), facts, objects, tokens, allocatable, is_settling };

    if let Some(claim) = &claim {
        report.count_in(claim.directory());
    }
    if let Some(listener) = metrics {
        serve_metrics(listener, &report);
    }
    report.contacts(source.contacts());
    report.tokens(refresh.tokens.clone());
    let (wishes, upgrades) = mpsc::channel(1);
    let control = claim.as_ref().and_then(|claim| listen(claim, &report, source.inbox(), wishes));
    let (sharing, mounted) = Sharing::of(&volumes, &identity);
    let directory = claim.as_ref().map(|claim| claim.directory().to_owned());
    let profile = profile(&volumes);
    let continuing = Continuing::find();
    let found = directory.as_deref().and_then(|directory| {
        let refused = |reason: &str| continuing.iter().for_each(|continuing| continuing.give_back(reason));
        adoption::find(directory, &server_program, &identity, profile, report.audience(), refused)
    });
    let (server, adoption) = found.unzip();
    let mut mount_points = MountPoints::new(claim, inheritance);
    let kept = adoption.map_or(Ok(HashMap::new()), |adoption| adoption.keep(&mounted, &site, &mut mount_points));
    let mut kept = kept.map_err(MountPointsError::Mount)?;
    let points = prepare_mount_points(&mounted, &kept, &site, &mut mount_points)?;
    let server = match server {
        Some(server) => server.with_cgroup(cgroup),
        None => PodServer::start(&server_program, &identity, profile, report.audience(), cgroup)
            .map_err(SupervisorError::Start)?,
    };
    if let Some(directory) = &directory {
        let listening = socket::make(directory, claim::SERVER).and_then(|socket| server.listen(socket));
        listening.map_err(|cause| SupervisorError::Socket { path: directory.join(claim::SERVER), cause })?;
    }
    let unmount_watch = UnmountWatch::of(&site);
    let mount_points = Arc::new(Mutex::new(mount_points));
    let setting =
        Setting { server: server.client(), site, mount_points: Arc::clone(&mount_points), trace, keep_old_generations };
    let idle = mounted.into_iter().zip(points).map(|((place, spec), point)| {
        let setting = setting.clone();
        let volume = match (kept.remove(&place), point) {
            (Some(kept), _) => PodVolume::adopted(spec, kept, setting),
            (None, Some(point)) => PodVolume::projected(spec, point, setting),
            (None, None) => PodVolume::passthrough(spec, setting),
        };
        (place, volume)
    });
    let mut supervisor = Supervisor {
        identity,
        source,
        report,
        idle: idle.collect(),
        server,
        working: JoinSet::new(),
        refreshed: vec![0; volumes.len()],
        heard: vec![None; volumes.len()],
        retry_at: vec![None; volumes.len()],
        refresh: Arc::new(refresh),
        version: 1,
        sharing,
        volumes,
        upgrades,
        searches: Searches::default(),
        unmount_watch,
    };
    drop(setting);
    supervisor.report_server();
    supervisor.report_volumes();
    if let Some(continuing) = continuing {
        continuing.complete();
    }
    let outcome = match supervisor.serve(&mut orders).await {
        // Without a claim, nobody would find the volumes.
        Ok(Order::Leave) if directory.is_some() => supervisor.leave().await,
        Ok(_) => Ok(()),
        Err(error) => Err(error),
    };
    supervisor.shut_down(if outcome.is_ok() { End::Clean } else { End::Failed }).await;
    drop(control);
    // The volumes are gone, and with them every other hold on it.
    if let Some(mount_points) = Arc::into_inner(mount_points).and_then(|mount_points| mount_points.into_inner().ok()) {
        mount_points.take_back();
    }
    outcome
}

/// What the server of these volumes is for.
fn profile(volumes: &[Volume]) -> Profile {
    let is_projected =
        |volume: &Volume| matches!(volume.source, VolumeSource::Projection(_) | VolumeSource::Unsupported(_));
    let projected = volumes.iter().all(is_projected);
    match projected {
        true if volumes.iter().any(|volume| volume.preferences.audit) => Profile::Audit,
        true => Profile::Projection,
        false => Profile::Passthrough,
    }
}

/// The pod's volumes do not depend on whether anybody can ask for their state.
fn listen(claim: &Claim, report: &Report, inbox: Option<Inbox>, upgrades: mpsc::Sender<Upgrading>) -> Option<Control> {
    let control = Control::open(claim.directory(), report.store(), inbox, upgrades);
    control.inspect_err(|error| warn!("podfs status cannot ask this process: {error}")).ok()
}

/// Likewise.
fn serve_metrics(listener: TcpListener, report: &Report) {
    let store = report.store();
    let read = move || Exposition::of(vec![metrics::read(&store)]);
    if let Err(error) = exporter::start(listener, read) {
        warn!("metrics are not served: {error}");
    }
}

/// The mount points of projections, which are known from the start, but for those that are mounted already. Those of
/// passthroughs are made when their sources are found.
fn prepare_mount_points(
    volumes: &[(usize, Volume)],
    kept: &HashMap<usize, Kept>,
    site: &Site,
    mount_points: &mut MountPoints,
) -> Result<Vec<Option<MountPoint>>, SupervisorError> {
    let mut prepare = |(place, volume): &(usize, Volume)| {
        let (VolumeSource::Projection(_), Some(directory), false) =
            (&volume.source, volume.kind.directory, kept.contains_key(place))
        else {
            return Ok(None);
        };
        let point = mount_points.prepare(&site.volume(directory, volume.name.as_str()), Shape::Directory);
        point.map(Some).map_err(|cause| SupervisorError::Mount { volume: volume.name.to_string(), cause })
    };
    let points = volumes.iter().map(&mut prepare).collect::<Result<_, _>>()?;
    mount_points.record()?;
    Ok(points)
}

struct Supervisor {
    identity: PodIdentity,
    source: Source,
    report: Report,
    server: PodServer,
    /// Volumes with nothing to do, by their place in the manifest.
    idle: HashMap<usize, PodVolume>,
    working: JoinSet<Done>,
    /// What each volume was last refreshed with; it is behind while this is not `version`.
    refreshed: Vec<u64>,
    /// When the oldest change was heard of that it was not refreshed with.
    heard: Vec<Option<time::Instant>>,
    retry_at: Vec<Option<Instant>>,
    refresh: Arc<Refresh>,
    version: u64,
    sharing: Sharing,
    volumes: Vec<Volume>,
    /// Those who wish for an upgrade.
    upgrades: mpsc::Receiver<Upgrading>,
    /// NFS servers that are silent.
    searches: Searches,
    unmount_watch: Option<UnmountWatch>,
}

impl Supervisor {
    async fn serve(&mut self, orders: &mut Orders) -> Result<Order, SupervisorError> {
        self.report.started();
        let mut heartbeat = Heartbeat::of_unit();
        loop {
            self.start_work();
            self.report.progress();
            let next = self.next_work();
            tokio::select! {
                (signal, order) = orders.received() => {
                    info!("{signal} received");
                    return Ok(order);
                }
                () = self.server.guard() => {
                    self.report_server();
                    self.searches.start(&self.server.client());
                    if self.server.gave_up() {
                        self.version += 1;
                    }
                }
                snapshot = self.source.changed() => self.take_snapshot(snapshot),
                Some(done) = self.working.join_next() => self.finish_work(done)?,
                Some(upgrading) = self.upgrades.recv() => self.upgrade(upgrading).await,
                () = heartbeat.beat() => {}
                () = unmount_watch::look_is_due(self.unmount_watch.as_mut()) => {
                    if let Some(path) = self.look_at_mounts() {
                        info!("another process unmounted {}; podfs ends", path.display());
                        return Ok(Order::Stop);
                    }
                }
                () = sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => {}
            }
        }
    }

    fn report_server(&mut self) {
        self.report.server(self.server.record(), self.server.version());
    }

    /// Tells of each volume before its first refresh: where it is, and, of one that shows something of the host, that it
    /// waits for its source until that has answered.
    fn report_volumes(&mut self) {
        let idle = std::mem::take(&mut self.idle);
        for (place, volume) in &idle {
            match volume.spec().source {
                VolumeSource::Projection(_) => self.report.found(*place, &self.volumes[*place], volume),
                _ => self.report_volume(*place, volume),
            }
        }
        self.idle = idle;
    }

    /// A volume may have several places in the manifest.
    fn report_volume(&mut self, leader: usize, volume: &PodVolume) {
        for place in self.sharing.places(leader) {
            self.report.volume(place, &self.volumes[place], volume);
            if let Some(condition) = volume.condition() {
                self.source.tell(self.volumes[place].name.as_str(), condition);
            }
        }
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
        debug!("the pod or its objects changed");
        self.heard.iter_mut().for_each(|heard| *heard = heard.or(snapshot.heard));
        self.report.tokens(snapshot.tokens.clone());
        let Refresh { identity, allocatable, .. } = &*self.refresh;
        self.refresh = Arc::new(Refresh {
            identity: identity.clone(),
            allocatable: *allocatable,
            facts,
            objects: snapshot.objects,
            tokens: snapshot.tokens,
            is_settling: snapshot.is_settling,
        });
        self.version += 1;
    }
}
