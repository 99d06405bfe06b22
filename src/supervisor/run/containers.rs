//! Operations for containers: the supervisor prepares the sources of a container's mounts before the container starts, and
//! removes them after its end.
//!
//! An operation needs work on several volumes. The work on one volume is a part of the operation. As soon as a volume is
//! idle, the supervisor sends it to a blocking thread with its part. So a volume that hangs delays this operation and no
//! other volume. A part without which the operation can go on may be late. When the threads have done the others, one more blocking
//! thread writes the files that belong to no volume, and the supervisor answers the client.
//!
//! A shutdown ends operations as it ends other work: it waits for parts that have begun, and begins no further parts.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use podfs_fuse::mount::private::SELINUX;
use podfs_fuse::mount::table::{MountTableEntry, Restrictions, mounts};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::error;

use super::Supervisor;
use super::container_part::ContainerOperationPart;
use super::work::{ContainerOperationPartOutcome, FinishedWork, WorkOutcome};
use crate::binding::Local;
use crate::manifest::pod::Pod;
use crate::mounts::hosts;
use crate::mounts::{
    AgentFacts, ContainerMount, ContainerMountRequest, Features, MountSource, MountedPodVolume, MountsError,
    NotMounted, PlannedMount, PlannedSource, Propagation, plan,
};
use crate::supervisor::control::{ContainerOperation, ContainerRequest, ContainerTask, ControlAnswer};
use crate::supervisor::run_dir::container_files::{ContainerFileError, ContainerFiles};
use crate::supervisor::run_dir::mount_points::MountPoints;
use crate::supervisor::run_dir::site::Site;
use crate::supervisor::status::store::VolumeReport;
use crate::supervisor::volume::sub_path::SubPathRequest;
use crate::supervisor::volume::{PATH_TIMEOUT, PodVolume, ShownContent, VolumeLife};
use crate::types::is_dns_label;
use crate::volume::VolumeSource;

/// The node's own hosts file.
const HOSTS: &str = "/etc/hosts";

/// The operations of a supervisor.
pub(super) struct ContainerOperations {
    /// The pod as its source describes it now; `None` for a volume that is served without its pod.
    pub(super) pod: Option<Arc<Pod>>,
    pub(super) site: Site,
    pub(super) mount_points: Arc<Mutex<MountPoints>>,
    /// The operations that clients have sent.
    pub(super) operations: mpsc::Receiver<ContainerOperation>,
    /// The operations whose parts are not done yet.
    pending: Vec<PendingContainerOperation>,
    /// Parts of operations that have gone on without them, each with its volume's place.
    late: Vec<(usize, ContainerOperationPart)>,
    /// The number of the last operation.
    last_number: u64,
    /// The last steps of operations, on blocking threads.
    last_steps: JoinSet<FinishedContainerOperation>,
}

/// An operation whose parts are not done yet.
struct PendingContainerOperation {
    number: u64,
    operation: ContainerOperation,
    /// When a client has sent it.
    began: Instant,
    /// The parts that wait until their volume is idle, each with the volume's place.
    waiting: Vec<(usize, ContainerOperationPart)>,
    /// How many parts blocking threads work on.
    busy: usize,
    /// The mount points of the subPaths, by the index of the container's mount.
    sources: BTreeMap<usize, PathBuf>,
    /// The first error.
    refused: Option<String>,
    last_step: LastStep,
}

impl PendingContainerOperation {
    /// When the operation goes on without the parts that can be late, because their volume is busy: perhaps its source does not answer.
    fn goes_on_at(&self) -> Option<Instant> {
        self.waiting.iter().any(|(_, part)| part.can_be_late()).then(|| self.began + PATH_TIMEOUT)
    }
}

/// The step after the parts of all volumes.
enum LastStep {
    Prepare { container: String, mounts: Vec<PlannedMount>, hosts: HostsFile },
    Release { container: Option<String> },
}

/// The content of the pod's hosts file.
enum HostsFile {
    /// This text, for a pod with a network of its own.
    OfPod(String),
    /// The text of the node's file, for a pod in the node's network. podfs reads that file just before it writes the
    /// pod's.
    OfNode(Arc<Pod>),
}

/// Why an operation fails. The client gets the text.
#[derive(Debug, thiserror::Error)]
enum ContainerOperationError {
    #[error("a volume without its pod has no containers")]
    NoPod,
    #[error(
        "{0:?} is no container: a container's name is at most 63 lower-case letters, digits and '-', with a letter or digit at \
         both ends"
    )]
    NoContainer(String),
    #[error(transparent)]
    Mounts(#[from] MountsError),
    #[error("volume {0:?} is not served")]
    NotServed(String),
    #[error("a part of a volume is not mounted")]
    NoPart,
    #[error("cannot read the node's {HOSTS}: {0}")]
    Hosts(#[source] io::Error),
    #[error("cannot read the mount table: {0}")]
    MountTable(#[source] io::Error),
    #[error(transparent)]
    File(#[from] ContainerFileError),
    #[error("the path {} is not UTF-8; choose a root directory whose path is", .0.display())]
    NotUtf8(PathBuf),
}

/// An event for the supervisor's task.
pub(super) enum ContainerEvent {
    /// A client has sent an operation.
    ContainerOperation(ContainerOperation),
    /// The last step of an operation has ended.
    Finished(FinishedContainerOperation),
}

/// An operation whose last step has ended, and its answer.
pub(super) struct FinishedContainerOperation {
    operation: ContainerOperation,
    answer: ControlAnswer,
}

impl ContainerOperations {
    pub(super) fn new(
        pod: Option<Arc<Pod>>,
        site: Site,
        mount_points: Arc<Mutex<MountPoints>>,
        operations: mpsc::Receiver<ContainerOperation>,
    ) -> Self {
        Self {
            pod,
            site,
            mount_points,
            operations,
            pending: Vec::new(),
            late: Vec::new(),
            last_number: 0,
            last_steps: JoinSet::new(),
        }
    }

    /// Waits for the next operation, or for the end of a last step. Cancel-safe.
    pub(super) async fn next(&mut self) -> ContainerEvent {
        tokio::select! {
            Some(operation) = self.operations.recv() => ContainerEvent::ContainerOperation(operation),
            Some(finished) = self.last_steps.join_next() => {
                ContainerEvent::Finished(finished.expect("a blocking thread that panics ends the process"))
            }
            else => std::future::pending().await,
        }
    }

    /// When the next operation goes on without the part of a busy volume.
    pub(super) fn next_to_go_on(&self) -> Option<Instant> {
        self.pending.iter().filter_map(PendingContainerOperation::goes_on_at).min()
    }

    /// Waits for the end of last steps, and answers their clients.
    pub(super) async fn finish(&mut self) {
        while let Some(finished) = self.last_steps.join_next().await {
            let FinishedContainerOperation { operation, answer } =
                finished.expect("a blocking thread that panics ends the process");
            operation.answer(answer);
        }
    }

    /// Records the outcome of a volume's part.
    pub(super) fn take(&mut self, part: ContainerOperationPartOutcome) {
        let Some(pending) = self.pending.iter_mut().find(|pending| pending.number == part.number) else { return };
        pending.busy -= 1;
        match part.outcome {
            Ok(sources) => pending.sources.extend(sources),
            Err(error) => drop(pending.refused.get_or_insert_with(|| error.to_string())),
        }
    }

    /// Starts the last step of operations whose parts are done. Answers the clients of operations that failed.
    fn finish_operations(&mut self) {
        let is_over = |pending: &mut PendingContainerOperation| {
            pending.busy == 0 && (pending.waiting.is_empty() || pending.refused.is_some())
        };
        for PendingContainerOperation { operation, refused, sources, last_step, .. } in
            self.pending.extract_if(.., is_over)
        {
            if let Some(reason) = refused {
                operation.answer(ControlAnswer::Refused(reason));
                continue;
            }
            let (site, mount_points) = (self.site.clone(), Arc::clone(&self.mount_points));
            self.last_steps.spawn_blocking(move || {
                let answer = last_step.carry_out(&site, &mount_points, &sources);
                FinishedContainerOperation {
                    operation,
                    answer: answer.unwrap_or_else(|error| ControlAnswer::Refused(error.to_string())),
                }
            });
        }
        // An operation whose client no longer waits ends, unless a thread works on a part of it.
        self.pending.retain(|pending| pending.busy > 0 || !pending.operation.is_late());
    }
}

impl Supervisor {
    /// Plans an operation that a client has sent, or answers the client of an operation that has ended.
    pub(super) fn handle_container_event(&mut self, event: ContainerEvent) {
        match event {
            ContainerEvent::ContainerOperation(operation) => self.take_operation(operation),
            ContainerEvent::Finished(FinishedContainerOperation { operation, answer }) => operation.answer(answer),
        }
    }

    /// Plans an operation: the part of each volume, and the last step.
    fn take_operation(&mut self, operation: ContainerOperation) {
        let planned = match &operation.task {
            ContainerTask::Prepare(request) => self.plan(request),
            ContainerTask::Release(container) => self.plan_release(container.as_deref()),
        };
        match planned {
            Ok((waiting, last_step)) => {
                let (busy, sources, refused) = (0, BTreeMap::new(), None);
                self.containers.last_number += 1;
                let number = self.containers.last_number;
                let began = Instant::now();
                let pending =
                    PendingContainerOperation { number, operation, began, waiting, busy, sources, refused, last_step };
                self.containers.pending.push(pending);
            }
            Err(error) => operation.answer(ControlAnswer::Refused(error.to_string())),
        }
    }

    /// Sends idle volumes to blocking threads with their parts of operations, late parts first.
    pub(super) fn start_operations(&mut self) {
        let is_idle = |(place, _): &(usize, ContainerOperationPart)| self.idle.contains_key(place);
        let (late, still_late) = std::mem::take(&mut self.containers.late).into_iter().partition(is_idle);
        self.containers.late = still_late;
        let late: Vec<(usize, ContainerOperationPart)> = late;
        for (place, part) in late {
            // No operation has this number, so nothing waits for the outcome.
            if let Some(part) = self.start_part(0, place, part) {
                self.containers.late.push((place, part));
            }
        }
        for mut pending in std::mem::take(&mut self.containers.pending) {
            if pending.refused.is_none() && !pending.operation.is_late() {
                self.start_parts(&mut pending);
            }
            self.containers.pending.push(pending);
        }
        self.containers.finish_operations();
    }

    fn start_parts(&mut self, pending: &mut PendingContainerOperation) {
        for (place, part) in std::mem::take(&mut pending.waiting) {
            match self.start_part(pending.number, place, part) {
                Some(part) => pending.waiting.push((place, part)),
                None => pending.busy += 1,
            }
        }
        if pending.goes_on_at().is_some_and(|at| at <= Instant::now()) {
            for (place, part) in pending.waiting.extract_if(.., |(_, part)| part.can_be_late()) {
                let volume = self.volumes.get(&place).map(|volume| volume.name.as_str()).unwrap_or_default();
                part.warn_late(volume);
                let (part, late) = (part.late(), &mut self.containers.late);
                // A container that fails again and again adds nothing.
                if !late.iter().any(|(at, other)| *at == place && part.says_the_same(other)) {
                    late.push((place, part));
                }
            }
        }
    }

    /// Sends a volume to a blocking thread with its part of an operation. Returns the part if the volume is busy: a volume has at most one
    /// part at a time.
    fn start_part(
        &mut self,
        number: u64,
        place: usize,
        part: ContainerOperationPart,
    ) -> Option<ContainerOperationPart> {
        let Some(mut volume) = self.idle.remove(&place) else { return Some(part) };
        let view = Arc::clone(&self.view);
        self.working.spawn_blocking(move || {
            let outcome = part.carry_out(&mut volume, &view);
            let outcome = WorkOutcome::ContainerOperation(ContainerOperationPartOutcome { number, outcome });
            FinishedWork { place, volume, outcome }
        });
        None
    }

    /// Plans the preparation of a container.
    fn plan(
        &self,
        request: &ContainerRequest,
    ) -> Result<(Vec<(usize, ContainerOperationPart)>, LastStep), ContainerOperationError> {
        let ContainerRequest { container, environment, recursive_read_only, only_volumes } = request;
        let pod = self.containers.pod.as_ref().ok_or(ContainerOperationError::NoPod)?;
        check_name(container)?;
        let features = Features { recursive_read_only: *recursive_read_only, selinux: Path::new(SELINUX).exists() };
        let volumes = self.mounted_volumes();
        let mut mounts = plan(ContainerMountRequest { pod, container, volumes: &volumes, environment, features })?;
        mounts.retain(|mount| {
            !only_volumes || !matches!(mount.source, PlannedSource::Hosts | PlannedSource::TerminationLog)
        });
        let mut parts: BTreeMap<usize, Vec<SubPathRequest>> = BTreeMap::new();
        for mount in &mounts {
            let sub_path = match &mount.source {
                PlannedSource::SubPath(path) => Some(path),
                PlannedSource::Volume(_) => None,
                _ => continue,
            };
            let place = self.volumes.iter().find(|(_, volume)| volume.name.as_str() == mount.name);
            let leader = place.map(|(place, _)| self.sharing.leader(*place));
            let leader = leader.ok_or_else(|| ContainerOperationError::NotServed(mount.name.clone()))?;
            if sub_path.is_none() && !self.follows_path(leader) {
                continue;
            }
            parts.entry(leader).or_default().extend(sub_path.map(|path| SubPathRequest {
                volume: mount.name.clone(),
                container: container.clone(),
                index: mount.index,
                path: path.clone(),
                read_only: mount.read_only,
                both_ways: mount.propagation == Propagation::Bidirectional,
            }));
        }
        let part =
            |(place, sub_paths)| (place, ContainerOperationPart::Prepare { container: container.clone(), sub_paths });
        let parts = parts.into_iter().map(part).collect();
        let hosts = HostsFile::of(pod, environment);
        Ok((parts, LastStep::Prepare { container: container.clone(), mounts, hosts }))
    }

    /// Whether containers get what the path of the volume leads to when they start.
    fn follows_path(&self, place: usize) -> bool {
        let source = self.volumes.get(&place).map(|volume| &volume.source);
        matches!(source, Some(VolumeSource::HostPath(_) | VolumeSource::Claim(_)))
    }

    /// Plans the release of a container, or of all containers (`None`).
    fn plan_release(
        &self,
        container: Option<&str>,
    ) -> Result<(Vec<(usize, ContainerOperationPart)>, LastStep), ContainerOperationError> {
        container.map_or(Ok(()), check_name)?;
        let container = container.map(str::to_owned);
        let top = self.containers.site.sub_paths();
        let has_targets = |leader: &usize| {
            let Some(top) = &top else { return false };
            // The subPaths are below the name of the leader, which the pod may no longer have. Then only its mount has the name.
            let name = self.idle.get(leader).map(PodVolume::spec).or_else(|| self.volumes.get(leader));
            // Another thread may hold the lock while it waits for a mount. This task must not wait, so every volume
            // gets a part.
            let mount_points = self.containers.mount_points.try_lock().ok();
            name.zip(mount_points).is_none_or(|(leader, mount_points)| {
                !mount_points.targets_below(&top.join(leader.name.as_str())).is_empty()
            })
        };
        let leaders: BTreeSet<_> = self.volumes.keys().map(|place| self.sharing.leader(*place)).collect();
        let part = |leader: usize| {
            let has_sub_paths = has_targets(&leader);
            let container = container.clone();
            let part = ContainerOperationPart::Release { container, has_sub_paths };
            (has_sub_paths || self.follows_path(leader)).then_some((leader, part))
        };
        let parts = leaders.into_iter().filter_map(part).collect();
        Ok((parts, LastStep::Release { container }))
    }

    /// The pod's volumes, in the state of their last refresh.
    fn mounted_volumes(&self) -> BTreeMap<String, Result<MountedPodVolume, NotMounted>> {
        let store = self.report.store();
        let status = store.stored();
        let volume = |(place, report): (&usize, &VolumeReport)| {
            let spec = self.volumes.get(place);
            let is_empty_dir = spec.is_some_and(|spec| matches!(spec.source, VolumeSource::EmptyDir(_)));
            (report.name.clone(), mounted(report, is_empty_dir))
        };
        status.volumes.iter().map(volume).collect()
    }
}

/// The mount of a volume for containers, or why the volume has none.
fn mounted(report: &VolumeReport, is_empty_dir: bool) -> Result<MountedPodVolume, NotMounted> {
    let (VolumeLife::Live(shown) | VolumeLife::Behind(shown, _)) = &report.state else {
        let reason = report.state.reason();
        return Err(reason.map_or(NotMounted::NotYet, |reason| NotMounted::Waiting(reason.to_owned())));
    };
    let path = report.path.clone().ok_or(NotMounted::NoPath)?;
    let path = std::path::absolute(&path).unwrap_or(path);
    let read_only = report.is_read_only;
    let device = match shown {
        ShownContent::Device(number) => Some(*number),
        _ => None,
    };
    let selinux_relabel = matches!(shown, ShownContent::Bind(_)) && is_relabelled(is_empty_dir, &path, read_only);
    Ok(MountedPodVolume { path, read_only, selinux_relabel, device })
}

/// Whether the container runtime has to relabel the source of a bind mount for SELinux, because the mount shows the labels of the
/// source: an emptyDir, or a local PersistentVolume that is not read-only (MT-06). The kubelet's directory of the volume names the
/// kind of a PersistentVolume.
fn is_relabelled(is_empty_dir: bool, path: &Path, read_only: bool) -> bool {
    let is_local = path.parent().is_some_and(|plugin| plugin.ends_with(Local::DIRECTORY));
    is_empty_dir || (is_local && !read_only)
}

/// Checks the name of a container, which podfs uses as a component of paths.
fn check_name(container: &str) -> Result<(), ContainerOperationError> {
    if is_dns_label(container) { Ok(()) } else { Err(ContainerOperationError::NoContainer(container.to_owned())) }
}

impl HostsFile {
    fn of(pod: &Arc<Pod>, environment: &AgentFacts) -> Self {
        if environment.host_network || pod.network.host_network {
            return HostsFile::OfNode(Arc::clone(pod));
        }
        let (host, domain) = environment.host_and_domain(pod);
        HostsFile::OfPod(hosts::of_pod(&environment.pod_ips, host, domain, &pod.network.aliases))
    }

    fn text(&self) -> Result<Vec<u8>, ContainerOperationError> {
        match self {
            HostsFile::OfPod(text) => Ok(text.clone().into_bytes()),
            HostsFile::OfNode(pod) => {
                let of_node = std::fs::read(HOSTS).map_err(ContainerOperationError::Hosts)?;
                Ok(hosts::of_host_network(&of_node, &pod.network.aliases))
            }
        }
    }
}

impl LastStep {
    /// Does the step, and returns the answer for the client. `sources` has the mount points of the subPaths.
    fn carry_out(
        self,
        site: &Site,
        mount_points: &Mutex<MountPoints>,
        sources: &BTreeMap<usize, PathBuf>,
    ) -> Result<ControlAnswer, ContainerOperationError> {
        let pod = site.pod().ok_or(ContainerOperationError::NoPod)?;
        let files = ContainerFiles { pod: &pod, mount_points };
        match self {
            LastStep::Release { container } => {
                files.remove(container.as_deref()).map_err(failed)?;
                Ok(ControlAnswer::Released)
            }
            LastStep::Prepare { container, mounts: planned, hosts } => {
                let table = mounts().map_err(ContainerOperationError::MountTable)?;
                let complete = |mount: PlannedMount| {
                    let source = match &mount.source {
                        PlannedSource::Volume(path) => path.clone(),
                        PlannedSource::SubPath(_) => {
                            sources.get(&mount.index).cloned().ok_or(ContainerOperationError::NoPart)?
                        }
                        PlannedSource::Hosts => files.write_hosts(&hosts.text()?).map_err(failed)?,
                        PlannedSource::TerminationLog => files.make_termination_log(&container).map_err(failed)?,
                        PlannedSource::Device(device) => {
                            let device = MountSource::Device(device.clone());
                            return Ok(mount.with_source(device));
                        }
                        PlannedSource::Image { reference, sub_path } => {
                            let image = MountSource::Image { reference: reference.clone(), sub_path: sub_path.clone() };
                            return Ok(mount.with_source(image));
                        }
                    };
                    with_path(mount, source, &table)
                };
                Ok(ControlAnswer::Prepared(
                    planned.into_iter().map(complete).collect::<Result<_, ContainerOperationError>>()?,
                ))
            }
        }
    }
}

/// Logs the error, which the client also gets.
fn failed(error: ContainerFileError) -> ContainerOperationError {
    error!("{error}");
    error.into()
}

/// The container's mount of a path of the node, with the restrictions (such as `nosuid`) of the file system mounted
/// there.
fn with_path(
    mount: PlannedMount,
    path: PathBuf,
    table: &[MountTableEntry],
) -> Result<ContainerMount, ContainerOperationError> {
    if path.to_str().is_none() {
        return Err(ContainerOperationError::NotUtf8(path));
    }
    // Only the path of the directory above is resolved, which is outside of the volume: the volume's server may hang.
    let real_path = path.parent().and_then(|parent| parent.canonicalize().ok()).zip(path.file_name());
    let real_path = real_path.map(|(parent, name)| parent.join(name));
    let mounted = table.iter().rfind(|mounted| Some(&mounted.at) == real_path.as_ref());
    let Restrictions { nosuid, nodev, noexec } = mounted.map(|mounted| mounted.restrictions).unwrap_or_default();
    Ok(ContainerMount { nosuid, nodev, noexec, ..mount.with_source(MountSource::HostPath(path)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mt_06_the_source_of_a_local_volume_shown_by_a_bind_mount_is_relabelled() {
        let volumes = Path::new("/k/pods/u/volumes");
        let is_relabelled = |path: &str, read_only| is_relabelled(false, &volumes.join(path), read_only);
        assert!(is_relabelled("kubernetes.io~local-volume/disk-1", false));
        assert!(!is_relabelled("kubernetes.io~local-volume/disk-1", true), "the kubelet leaves its labels as they are");
        assert!(!is_relabelled("kubernetes.io~host-path/disk-1", false));
        assert!(!is_relabelled("kubernetes.io~csi/pv-1/mount", false));
        assert!(super::is_relabelled(true, &volumes.join("kubernetes.io~empty-dir/huge"), false));
    }
}
