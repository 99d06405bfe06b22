//! Errands for containers: podfs prepares what a container mounts before it starts, and removes it after its end.
//!
//! An errand needs work on several volumes. As soon as one of them is idle, the errand sends it to a blocking thread
//! with its part. So a volume that hangs delays this errand and no other volume. When all volumes have done their
//! parts, one more thread writes the files that belong to no volume, and the client gets its answer.
//!
//! A shutdown ends errands as it ends other work: it waits for parts that have begun, and begins no others.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use podfs_fuse::mount::table::{MountTableEntry, Restrictions, mounts};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tracing::error;

use super::Supervisor;
use super::work::{FinishedWork, WorkOutcome};
use crate::manifest::pod::Pod;
use crate::mounts::hosts;
use crate::mounts::{
    AgentFacts, ContainerMount, Features, Inputs, MountSource, MountedPodVolume, MountsError, NotMounted, PlannedMount,
    PlannedSource, Propagation, plan,
};
use crate::supervisor::control::{ContainerRequest, ControlAnswer, Errand, ErrandTask};
use crate::supervisor::run_dir::container_files::{ContainerFileError, ContainerFiles};
use crate::supervisor::run_dir::mount_points::MountPoints;
use crate::supervisor::run_dir::site::Site;
use crate::supervisor::status::store::VolumeReport;
use crate::supervisor::volume::sub_path::{PartError, SubPathRequest};
use crate::supervisor::volume::{SELINUX, ShownContent, VolumeLife};
use crate::types::is_dns_label;
use crate::volume::{Volume, VolumeSource};

/// The node's own names of hosts.
const HOSTS: &str = "/etc/hosts";

/// The errands of a supervisor.
pub(super) struct ContainerErrands {
    /// The pod as its source describes it now; `None` for a volume that is served without its pod.
    pub(super) pod: Option<Arc<Pod>>,
    pub(super) site: Site,
    pub(super) mount_points: Arc<Mutex<MountPoints>>,
    pub(super) errands: mpsc::Receiver<Errand>,
    under_way: Vec<PendingErrand>,
    last: u64,
    /// The last steps of errands, on blocking threads.
    last_steps: JoinSet<FinishedErrand>,
}

/// An errand that has not ended.
struct PendingErrand {
    number: u64,
    errand: Errand,
    /// Parts that wait until their volume is idle, by the volume's place.
    waiting: Vec<(usize, VolumeErrand)>,
    /// How many volumes work on their parts.
    busy: usize,
    /// The mount points of parts of volumes (subPath), by the index of the container's mount.
    sources: BTreeMap<usize, PathBuf>,
    /// The first error.
    refused: Option<String>,
    last_step: LastStep,
}

/// What a volume does for an errand.
pub(super) enum VolumeErrand {
    Prepare(Vec<SubPathRequest>),
    Release(Option<String>),
}

/// The outcome of a part: where parts of the volume are mounted.
pub(super) struct VolumeErrandOutcome {
    pub(super) number: u64,
    pub(super) outcome: Result<Vec<(usize, PathBuf)>, PartError>,
}

/// The step after the parts of all volumes.
enum LastStep {
    Prepare { container: String, mounts: Vec<PlannedMount>, hosts: HostsFile },
    Release { container: Option<String> },
}

/// The content of the pod's hosts file.
enum HostsFile {
    OfPod(String),
    /// The node's file, read just before podfs writes the pod's.
    OfNode(Arc<Pod>),
}

/// Why an errand fails. The client gets the text.
#[derive(Debug, thiserror::Error)]
enum ErrandError {
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
    /// A client has sent an errand.
    Errand(Errand),
    /// The last step of an errand has ended.
    Finished(FinishedErrand),
}

/// An errand whose last step has ended, and its answer.
pub(super) struct FinishedErrand {
    errand: Errand,
    answer: ControlAnswer,
}

impl ContainerErrands {
    pub(super) fn new(
        pod: Option<Arc<Pod>>,
        site: Site,
        mount_points: Arc<Mutex<MountPoints>>,
        errands: mpsc::Receiver<Errand>,
    ) -> Self {
        Self { pod, site, mount_points, errands, under_way: Vec::new(), last: 0, last_steps: JoinSet::new() }
    }

    /// Waits for the next errand, or for the end of a last step. Cancel-safe.
    pub(super) async fn next(&mut self) -> ContainerEvent {
        tokio::select! {
            Some(errand) = self.errands.recv() => ContainerEvent::Errand(errand),
            Some(finished) = self.last_steps.join_next() => {
                ContainerEvent::Finished(finished.expect("a blocking thread that panics ends the process"))
            }
            else => std::future::pending().await,
        }
    }

    /// Waits for last steps, without answering.
    pub(super) async fn finish(&mut self) {
        while self.last_steps.join_next().await.is_some() {}
    }

    /// Records the outcome of a volume's part.
    pub(super) fn take(&mut self, done: VolumeErrandOutcome) {
        let Some(under_way) = self.under_way.iter_mut().find(|other| other.number == done.number) else { return };
        under_way.busy -= 1;
        match done.outcome {
            Ok(sources) => under_way.sources.extend(sources),
            Err(error) => drop(under_way.refused.get_or_insert_with(|| error.to_string())),
        }
    }

    /// Starts the last step of errands whose volumes have done their parts. Answers errands that failed.
    fn finish_errands(&mut self) {
        let is_over = |one: &mut PendingErrand| one.busy == 0 && (one.waiting.is_empty() || one.refused.is_some());
        for PendingErrand { errand, refused, sources, last_step, .. } in self.under_way.extract_if(.., is_over) {
            if let Some(reason) = refused {
                errand.answer(ControlAnswer::Refused(reason));
                continue;
            }
            let (site, mount_points) = (self.site.clone(), Arc::clone(&self.mount_points));
            self.last_steps.spawn_blocking(move || {
                let answer = last_step.carry_out(&site, &mount_points, &sources);
                FinishedErrand {
                    errand,
                    answer: answer.unwrap_or_else(|error| ControlAnswer::Refused(error.to_string())),
                }
            });
        }
        // An errand whose client no longer waits ends, unless a volume works on a part of it.
        self.under_way.retain(|one| one.busy > 0 || !one.errand.is_late());
    }
}

impl Supervisor {
    /// Starts an errand, or answers one that has ended.
    pub(super) fn handle_container_event(&mut self, event: ContainerEvent) {
        match event {
            ContainerEvent::Errand(errand) => self.take_errand(errand),
            ContainerEvent::Finished(FinishedErrand { errand, answer }) => errand.answer(answer),
        }
    }

    /// Plans an errand: the part of each volume, and the last step.
    fn take_errand(&mut self, errand: Errand) {
        let planned = match &errand.task {
            ErrandTask::Prepare(request) => self.plan(request),
            ErrandTask::Release(container) => self.plan_release(container.as_deref()),
        };
        match planned {
            Ok((waiting, last_step)) => {
                let (busy, sources, refused) = (0, BTreeMap::new(), None);
                self.containers.last += 1;
                let number = self.containers.last;
                let under_way = PendingErrand { number, errand, waiting, busy, sources, refused, last_step };
                self.containers.under_way.push(under_way);
            }
            Err(error) => errand.answer(ControlAnswer::Refused(error.to_string())),
        }
    }

    /// Sends idle volumes to blocking threads with their parts of errands.
    pub(super) fn start_errands(&mut self) {
        for under_way in &mut self.containers.under_way {
            if under_way.refused.is_some() || under_way.errand.is_late() {
                continue;
            }
            let (ready, waiting) = std::mem::take(&mut under_way.waiting)
                .into_iter()
                .partition(|(place, _)| self.idle.contains_key(place));
            under_way.waiting = waiting;
            let ready: Vec<(usize, VolumeErrand)> = ready;
            for (place, part) in ready {
                // A volume has at most one part of an errand.
                let Some(mut volume) = self.idle.remove(&place) else { continue };
                under_way.busy += 1;
                let number = under_way.number;
                self.working.spawn_blocking(move || {
                    let outcome = match part {
                        VolumeErrand::Prepare(requests) => {
                            let prepare =
                                |request: &SubPathRequest| Ok((request.index, volume.prepare_sub_path(request)?));
                            requests.iter().map(prepare).collect()
                        }
                        VolumeErrand::Release(container) => match volume.release_sub_paths(container.as_deref()) {
                            Ok(()) => Ok(Vec::new()),
                            Err(error) => Err(error.into()),
                        },
                    };
                    FinishedWork {
                        place,
                        volume,
                        outcome: WorkOutcome::Errand(VolumeErrandOutcome { number, outcome }),
                    }
                });
            }
        }
        self.containers.finish_errands();
    }

    fn plan(&self, request: &ContainerRequest) -> Result<(Vec<(usize, VolumeErrand)>, LastStep), ErrandError> {
        let ContainerRequest { container, environment, recursive_read_only, only_volumes } = request;
        let pod = self.containers.pod.as_ref().ok_or(ErrandError::NoPod)?;
        check_name(container)?;
        let features = Features { recursive_read_only: *recursive_read_only, selinux: Path::new(SELINUX).exists() };
        let volumes = self.mounted_volumes();
        let inputs = Inputs { pod, container, volumes: &volumes, environment, features };
        let mut mounts = plan(inputs)?;
        mounts.retain(|mount| {
            !only_volumes || !matches!(mount.source, PlannedSource::Hosts | PlannedSource::TerminationLog)
        });
        let mut parts: BTreeMap<usize, Vec<SubPathRequest>> = BTreeMap::new();
        for mount in &mounts {
            let PlannedSource::SubPath(path) = &mount.source else { continue };
            let place = self.volumes.iter().find(|(_, volume)| volume.name.as_str() == mount.name);
            let leader = place.map(|(place, _)| self.sharing.leader(*place));
            let leader = leader.ok_or_else(|| ErrandError::NotServed(mount.name.clone()))?;
            parts.entry(leader).or_default().push(SubPathRequest {
                volume: mount.name.clone(),
                container: container.clone(),
                index: mount.index,
                path: path.clone(),
                read_only: mount.read_only,
                both_ways: mount.propagation == Propagation::Bidirectional,
            });
        }
        let parts = parts.into_iter().map(|(place, requests)| (place, VolumeErrand::Prepare(requests))).collect();
        let hosts = HostsFile::of(pod, environment);
        Ok((parts, LastStep::Prepare { container: container.clone(), mounts, hosts }))
    }

    fn plan_release(&self, container: Option<&str>) -> Result<(Vec<(usize, VolumeErrand)>, LastStep), ErrandError> {
        container.map_or(Ok(()), check_name)?;
        let container = container.map(str::to_owned);
        let is_concerned = |volume: &Volume| {
            let directory = self.containers.site.sub_paths().map(|top| top.join(volume.name.as_str()));
            // Another thread may hold the lock while it waits on a mount. Then every volume gets a part.
            let mount_points = self.containers.mount_points.try_lock();
            directory.is_some_and(|directory| {
                mount_points.map_or(true, |mount_points| !mount_points.targets_below(&directory).is_empty())
            })
        };
        let concerned = self.volumes.iter().filter(|(_, volume)| is_concerned(volume));
        let parts = concerned.map(|(place, _)| (*place, VolumeErrand::Release(container.clone()))).collect();
        Ok((parts, LastStep::Release { container }))
    }

    /// The pod's volumes, in the state of their last refresh.
    fn mounted_volumes(&self) -> BTreeMap<String, Result<MountedPodVolume, NotMounted>> {
        let store = self.report.store();
        let known = store.known();
        let volume = |(place, report): (&usize, &VolumeReport)| {
            let is_empty_dir =
                self.volumes.get(place).is_some_and(|one| matches!(one.source, VolumeSource::EmptyDir(_)));
            (report.name.clone(), mounted(report, is_empty_dir))
        };
        known.volumes.iter().map(volume).collect()
    }
}

/// What a container can mount of a volume.
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
    // A bind mount shows the SELinux labels of its source, so the runtime has to relabel that of an emptyDir.
    Ok(MountedPodVolume { path, read_only, selinux_relabel: is_empty_dir && *shown == ShownContent::Bind, device })
}

/// The name becomes a component of paths.
fn check_name(container: &str) -> Result<(), ErrandError> {
    if is_dns_label(container) { Ok(()) } else { Err(ErrandError::NoContainer(container.to_owned())) }
}

impl HostsFile {
    fn of(pod: &Arc<Pod>, environment: &AgentFacts) -> Self {
        if environment.host_network || pod.network.host_network {
            return HostsFile::OfNode(Arc::clone(pod));
        }
        let (host, domain) = environment.host_and_domain(pod);
        HostsFile::OfPod(hosts::of_pod(&environment.pod_ips, host, domain, &pod.network.aliases))
    }

    fn text(&self) -> Result<Vec<u8>, ErrandError> {
        match self {
            HostsFile::OfPod(text) => Ok(text.clone().into_bytes()),
            HostsFile::OfNode(pod) => {
                let of_node = std::fs::read(HOSTS).map_err(ErrandError::Hosts)?;
                Ok(hosts::of_host_network(&of_node, &pod.network.aliases))
            }
        }
    }
}

impl LastStep {
    fn carry_out(
        self,
        site: &Site,
        mount_points: &Mutex<MountPoints>,
        sources: &BTreeMap<usize, PathBuf>,
    ) -> Result<ControlAnswer, ErrandError> {
        let pod = site.pod().ok_or(ErrandError::NoPod)?;
        let files = ContainerFiles { pod: &pod, mount_points };
        match self {
            LastStep::Release { container } => {
                files.remove(container.as_deref()).map_err(failed)?;
                Ok(ControlAnswer::Released)
            }
            LastStep::Prepare { container, mounts: planned, hosts } => {
                let table = mounts().map_err(ErrandError::MountTable)?;
                let complete = |mount: PlannedMount| {
                    let source = match &mount.source {
                        PlannedSource::Volume(path) => path.clone(),
                        PlannedSource::SubPath(_) => sources.get(&mount.index).cloned().ok_or(ErrandError::NoPart)?,
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
                Ok(ControlAnswer::Prepared(planned.into_iter().map(complete).collect::<Result<_, ErrandError>>()?))
            }
        }
    }
}

fn failed(error: ContainerFileError) -> ErrandError {
    error!("{error}");
    error.into()
}

/// The container's mount of a path of the host, with the restrictions of the file system that is mounted there.
fn with_path(mount: PlannedMount, path: PathBuf, table: &[MountTableEntry]) -> Result<ContainerMount, ErrandError> {
    if path.to_str().is_none() {
        return Err(ErrandError::NotUtf8(path));
    }
    // Resolves only the directory above, which is outside of the volume: the volume's server may hang.
    let real = path.parent().and_then(|parent| parent.canonicalize().ok()).zip(path.file_name());
    let real = real.map(|(parent, name)| parent.join(name));
    let mounted = table.iter().rfind(|mounted| Some(&mounted.at) == real.as_ref());
    let Restrictions { nosuid, nodev, noexec } = mounted.map(|mounted| mounted.restrictions).unwrap_or_default();
    Ok(ContainerMount { nosuid, nodev, noexec, ..mount.with_source(MountSource::HostPath(path)) })
}
