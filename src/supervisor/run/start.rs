//! The start of a supervisor: from an assignment to volumes that are served.
//!
//! 1. Prepare: the steps that touch no volume. After them, the control socket answers.
//! 2. Adopt or start: the supervisor adopts the server of an earlier podfs, with the volumes that the pod still has, or
//!    starts a new server. It makes the mount points of projections. The main loop mounts the volumes.

use std::collections::HashMap;
use std::mem::ManuallyDrop;
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use podfs_fuse::mount::point::MountPoint;
use podfs_fuse::mount::private::MountPointType;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tracing::warn;

use super::adoption;
use super::containers::ContainerOperations;
use super::profile::profile;
use super::publishing::PendingUnmounts;
use super::sharing::Sharing;
use super::unmount_watch::UnmountWatch;
use super::upgrade::UpgradeHandover;
use super::work::RefreshTime;
use super::{Assignment, Supervisor, SupervisorError, machine};
use crate::manifest::PodView;
use crate::manifest::pod::{Pod, PodIdentity};
use crate::metrics::{Exposition, exporter};
use crate::source::{PushReceiver, Snapshot, Source};
use crate::supervisor::control::{ContainerOperation, Control, PendingClient, RequestedChange, TaskQueues};
use crate::supervisor::long_step::report_if_long;
use crate::supervisor::run_dir::cgroup::{self, Cgroup};
use crate::supervisor::run_dir::claim::{PodLeftovers, PodLock};
use crate::supervisor::run_dir::defined_volume::DefinedVolume;
use crate::supervisor::run_dir::file_names::SERVER;
use crate::supervisor::run_dir::mount_points::{MountPoints, MountPointsError};
use crate::supervisor::run_dir::server_socket;
use crate::supervisor::run_dir::site::Site;
use crate::supervisor::server::program::ServerProgram;
use crate::supervisor::server::{PodServer, oom};
use crate::supervisor::status::metrics;
use crate::supervisor::status::report::Report;
use crate::supervisor::volume::adopted::KeptVolume;
use crate::supervisor::volume::search::Searches;
use crate::supervisor::volume::{PodVolume, VolumeContext};
use crate::volume::{SubPathMode, Volume, VolumeSource};

/// Most operations that wait for the supervisor's task.
const MAX_CONTAINER_OPERATIONS: usize = 8;
/// Most changes of the volumes that wait for the supervisor's task.
const MAX_CHANGES: usize = 16;

/// A supervisor that has not touched a volume yet.
pub(super) struct PreparedSupervisor {
    identity: PodIdentity,
    volumes: Vec<Volume>,
    definitions: Vec<DefinedVolume>,
    site: Site,
    claim: Option<PodLock>,
    inheritance: PodLeftovers,
    server_program: Arc<ServerProgram>,
    cgroup: Option<Cgroup>,
    flex_volumes: PathBuf,
    trace: bool,
    keep_old_generations: Duration,
    sub_path: SubPathMode,
    io_uring: bool,
    agent_watches_mounts: bool,
    keep_empty_dirs: bool,
    view: PodView,
    source: Source,
    report: Report,
    control: Option<Control>,
    upgrades: mpsc::Receiver<PendingClient>,
    changes: mpsc::Receiver<(RequestedChange, PendingClient)>,
    pod: Option<Arc<Pod>>,
    operations: mpsc::Receiver<ContainerOperation>,
}

/// A supervisor whose volumes are adopted or about to be mounted.
pub(super) struct StartedSupervisor {
    pub(super) supervisor: Supervisor,
    /// The mount points of the supervisor's volumes.
    pub(super) mount_points: Arc<Mutex<MountPoints>>,
    /// Whether the supervisor has claimed the pod, so that the next podfs of the pod finds the volumes.
    pub(super) is_claimed: bool,
}

impl PreparedSupervisor {
    /// Does the steps that touch no volume.
    pub(super) fn of(
        assignment: Assignment,
        source: Source,
        snapshot: Snapshot,
        mut report: Report,
    ) -> PreparedSupervisor {
        let Assignment { identity, facts, volumes, site, mut claim, inheritance, .. } = assignment;
        let Assignment { server_program, trace, keep_old_generations, server_memory, metrics, .. } = assignment;
        let Assignment { agent_watches_mounts, keep_empty_dirs, flex_volumes, sub_path, io_uring, definitions, .. } =
            assignment;
        oom::protect_supervisor();
        let cgroup = claim.as_mut().and_then(|claim| {
            cgroup::warn_of_kubelet();
            let cgroup = Cgroup::of_server(&identity.uid, server_memory, claim.cgroup());
            claim.set_cgroup(cgroup.as_ref().map(Cgroup::path));
            cgroup
        });
        let machine = machine::allocatable(site.path());
        let view = snapshot.view(&identity, &facts, machine);
        let pod = snapshot.pod;
        if let Some(claim) = &claim {
            report.count_in(claim.directory());
        }
        if let Some(listener) = metrics {
            serve_metrics(listener, &report);
        }
        report.contacts(source.contacts());
        report.tokens(view.known.tokens.clone());
        let (upgrade_queue, upgrades) = mpsc::channel(1);
        let ((change_queue, changes), (operation_queue, operations)) =
            (mpsc::channel(MAX_CHANGES), mpsc::channel(MAX_CONTAINER_OPERATIONS));
        let task_queues = TaskQueues { upgrades: upgrade_queue, changes: change_queue, operations: operation_queue };
        let control = claim.as_ref().and_then(|claim| listen(claim, &report, source.inbox(), task_queues));
        let server_program = Arc::new(server_program);
        PreparedSupervisor {
            identity,
            volumes,
            definitions,
            site,
            claim,
            inheritance,
            server_program,
            cgroup,
            flex_volumes,
            trace,
            keep_old_generations,
            sub_path,
            io_uring,
            agent_watches_mounts,
            keep_empty_dirs,
            view,
            source,
            report,
            control,
            upgrades,
            changes,
            pod,
            operations,
        }
    }

    /// Adopts the server of an earlier podfs, or starts a new server. If that fails, leaves the volumes of an earlier podfs as they
    /// are, for the next podfs; in an upgrade, that is the program before the upgrade.
    ///
    /// # Errors
    /// When no server can be started, or mount points cannot be made.
    pub(super) fn adopt_or_start(self) -> Result<StartedSupervisor, SupervisorError> {
        let handover = UpgradeHandover::find();
        let give_back = |reason: &str| handover.iter().for_each(|handover| handover.give_back(reason));
        let started = self.adopt_or_start_for(give_back).inspect_err(|error| give_back(&error.to_string()))?;
        if let Some(handover) = handover {
            handover.complete();
        }
        Ok(started)
    }

    /// As [`Self::adopt_or_start`]. Calls `refused` with the reason if the server of an earlier podfs cannot be adopted.
    fn adopt_or_start_for(self, refused: impl FnOnce(&str)) -> Result<StartedSupervisor, SupervisorError> {
        let PreparedSupervisor { identity, volumes, site, mut claim, inheritance, server_program, cgroup, .. } = self;
        let PreparedSupervisor {
            trace, keep_old_generations, agent_watches_mounts, view, source, report, control, ..
        } = self;
        let PreparedSupervisor {
            upgrades,
            changes,
            pod,
            operations,
            flex_volumes,
            sub_path,
            io_uring,
            keep_empty_dirs,
            definitions,
            ..
        } = self;
        let step = format!("make the mount points in {}", site.path().display());
        if let Some(claim) = &mut claim {
            let locked = report_if_long(&step, || claim.lock_volumes(site.path()));
            // Only the other podfs delays this, and no disk.
            locked.or_else(|_taken| claim.wait_for_volumes())?;
        }
        let (sharing, mounted) = Sharing::of(&volumes, &identity);
        let directory = claim.as_ref().map(|claim| claim.directory().to_owned());
        let profile = profile(&volumes, io_uring);
        let find =
            |directory| adoption::find(directory, &server_program, &identity, profile, report.log_format(), refused);
        let adopted = directory.as_deref().map_or(Ok(None), find)?;
        let (server, adoption) = adopted.unzip();
        let mut mount_points = MountPoints::new(claim, inheritance);
        let kept = adoption
            .map_or(Ok(HashMap::new()), |adoption| adoption.keep(&mounted, &identity, &site, &mut mount_points));
        // An error in the next steps must not drop the volumes, because that unmounts them.
        let kept = ManuallyDrop::new(kept.map_err(MountPointsError::Mount)?);
        let points = report_if_long(&step, || prepare_mount_points(&mounted, &kept, &site, &mut mount_points))?;
        let server = match server {
            Some(server) => server.with_cgroup(cgroup),
            None => PodServer::start(&server_program, &identity, profile, report.log_format(), cgroup)
                .map_err(SupervisorError::Start)?,
        };
        if let Some(directory) = &directory {
            let listening = server_socket::renew(directory, |socket| server.listen(socket));
            listening.map_err(|cause| SupervisorError::Socket { path: directory.join(SERVER), cause })?;
        }
        let mut kept = ManuallyDrop::into_inner(kept);
        let (unmount_watch, containers_site) = (UnmountWatch::of(&site, agent_watches_mounts), site.clone());
        let mount_points = Arc::new(Mutex::new(mount_points));
        let setting = VolumeContext {
            server: server.client(),
            site,
            mount_points: Arc::clone(&mount_points),
            flex_volumes,
            driver_calls: report.driver_calls(),
            ownership: report.ownership(),
            trace,
            keep_old_generations,
            sub_path,
            io_uring,
            keep_empty_dirs,
        };
        let mut refresh_times = HashMap::new();
        let idle = mounted.into_iter().zip(points).map(|((place, spec), point)| {
            let setting = setting.clone();
            refresh_times.insert(place, RefreshTime::default());
            let volume = match (kept.remove(&place), point) {
                (Some(kept), _) => PodVolume::adopted(spec, kept, setting),
                (None, point) => PodVolume::new(spec, point, setting),
            };
            (place, volume)
        });
        let idle = idle.collect();
        let containers = ContainerOperations::new(pod, containers_site, Arc::clone(&mount_points), operations);
        let mut supervisor = Supervisor {
            identity,
            source,
            report,
            idle,
            server,
            working: JoinSet::new(),
            refresh_times,
            view: Arc::new(view),
            version: 1,
            sharing,
            definitions,
            are_definitions_recorded: false,
            next_place: volumes.len(),
            volumes: volumes.into_iter().enumerate().collect(),
            setting,
            unmounting: JoinSet::new(),
            pending_unmounts: PendingUnmounts::default(),
            upgrades,
            changes,
            control,
            searches: Searches::default(),
            unmount_watch,
            run_directory_trouble: None,
            containers,
        };
        supervisor.record_definitions();
        supervisor.remove_leftovers();
        supervisor.report_server();
        supervisor.report_volumes();
        Ok(StartedSupervisor { supervisor, mount_points, is_claimed: directory.is_some() })
    }
}

/// Opens the control socket. If that fails, podfs only logs it: the pod's volumes do not depend on the socket.
fn listen(claim: &PodLock, report: &Report, inbox: Option<PushReceiver>, task_queues: TaskQueues) -> Option<Control> {
    let control = Control::open(claim.directory(), report.store(), inbox, task_queues);
    control.inspect_err(|error| warn!("podfs status cannot ask this process: {error}")).ok()
}

/// Serves metrics over HTTP. If that fails, podfs only logs it, too.
fn serve_metrics(listener: TcpListener, report: &Report) {
    let store = report.store();
    let read = move || Exposition::of(vec![metrics::read(&store)]);
    if let Err(error) = exporter::start(listener, read) {
        warn!("podfs cannot serve metrics: {error}");
    }
}

/// Makes the mount points of projections, whose paths are known from the start, except of those that are mounted
/// already. A passthrough volume gets its mount point when podfs has found its source.
fn prepare_mount_points(
    volumes: &[(usize, Volume)],
    kept: &HashMap<usize, KeptVolume>,
    site: &Site,
    mount_points: &mut MountPoints,
) -> Result<Vec<Option<MountPoint>>, SupervisorError> {
    let mut prepare = |(place, volume): &(usize, Volume)| {
        let (VolumeSource::Projection(_), Some(directory), false) =
            (&volume.source, volume.kind.directory, kept.contains_key(place))
        else {
            return Ok(None);
        };
        let point = mount_points.prepare(&site.volume(directory, volume.name.as_str()), MountPointType::Directory);
        point.map(Some).map_err(|cause| SupervisorError::Mount { volume: volume.name.to_string(), cause })
    };
    let points = volumes.iter().map(&mut prepare).collect::<Result<_, _>>()?;
    mount_points.record()?;
    Ok(points)
}
