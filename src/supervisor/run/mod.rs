//! The task that runs a pod: prepare, adopt or start a server, serve, end.
//!
//! | module | owns |
//! |---|---|
//! | `assignment` | the input of a supervisor |
//! | `start` | from an assignment to volumes that are served: prepare, adopt or start |
//! | `profile` | the profile of the server that the pod's volumes need |
//! | `adoption` | taking over from an earlier supervisor whose server still serves |
//! | `sharing` | volumes of one claim, which are one mount |
//! | `containers` | preparing the sources of containers' mounts, and removing them |
//! | `container_part` | the part of one volume in that |
//! | `publishing` | volumes that an agent adds and removes while the pod runs |
//! | `work` | work on volumes, on blocking threads |
//! | `table_watch` | when to read the mount table |
//! | `unmount_watch` | noticing that another process has unmounted a volume |
//! | `run_directory` | making the pod's run directory again when another process has deleted it |
//! | `changed_manifest` | a manifest file that was changed while the pod runs |
//! | `upgrade` | executing another version of podfs |
//! | `orders`, `signals` | the orders that the supervisor gets by signals |
//! | `heartbeat` | notifying systemd's watchdog |
//! | `shutdown` | ending: unmount everything, or leave it for the next supervisor |
//! | [`machine`] | the resources that this machine offers to pods |

pub(in crate::supervisor) mod adoption;
mod assignment;
pub(in crate::supervisor) mod changed_manifest;
mod container_part;
mod containers;
pub(crate) mod heartbeat;
pub mod machine;
mod orders;
mod profile;
mod publishing;
mod run_directory;
pub(crate) mod sharing;
mod shutdown;
pub(crate) mod signals;
mod start;
pub(crate) mod table_watch;
mod unmount_watch;
pub mod upgrade;
mod work;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use podfs_fuse::{log, memory_lock};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use tracing::{debug, info, warn};

use crate::manifest::PodView;
use crate::manifest::pod::PodIdentity;
use crate::source::{Snapshot, Source};
use crate::supervisor::control::{Control, PendingClient, RequestedChange};
use crate::supervisor::run_dir::defined_volume::DefinedVolume;
use crate::supervisor::server::PodServer;
use crate::supervisor::status::report::Report;
use crate::supervisor::volume::search::Searches;
use crate::supervisor::volume::{PodEnd, PodVolume, VolumeContext};
use crate::volume::{Volume, VolumeSource};
pub use assignment::{Assignment, SupervisorError};
use containers::ContainerOperations;
use heartbeat::Heartbeat;
use orders::{OrderSignals, SupervisorOrder};
use publishing::{PendingUnmounts, UnmountedVolume};
use run_directory::RunDirectoryTimer;
use sharing::Sharing;
use start::{PreparedSupervisor, StartedSupervisor};
use unmount_watch::UnmountWatch;
use work::{FinishedWork, RefreshTime};

/// How long work under way may take before the supervisor ends or is upgraded, and how long the server may take to end.
const TIMEOUT: Duration = Duration::from_secs(2);

/// How long after its last work the supervisor returns unused memory to the kernel.
const MEMORY_RETURN_DELAY: Duration = Duration::from_secs(1);

/// Serves the volumes until a signal ends the process.
///
/// # Errors
/// When the volumes cannot be served. A missing object is not an error: its volume waits.
pub async fn run(
    assignment: Assignment,
    source: Source,
    snapshot: Snapshot,
    report: Report,
) -> Result<(), SupervisorError> {
    log::set_pod(&assignment.identity.to_string(), assignment.identity.uid.as_str());
    let mut orders = OrderSignals::listen().map_err(SupervisorError::Signals)?;
    let prepared = PreparedSupervisor::of(assignment, source, snapshot, report);
    let StartedSupervisor { mut supervisor, mount_points, is_claimed } = prepared.adopt_or_start()?;
    let removal = supervisor.removal();
    let outcome = match supervisor.serve(&mut orders).await {
        // Without a claim on the pod, the next podfs would not find the volumes.
        Ok(SupervisorOrder::Leave) if is_claimed => supervisor.leave().await,
        Ok(_) => Ok(()),
        Err(error) => Err(error),
    };
    let control = supervisor.control.take();
    let counters = supervisor.report.store().counters().clone();
    let unmounted = supervisor.shut_down(if outcome.is_ok() { PodEnd::Stopped } else { PodEnd::Failed }).await;
    drop(control);
    shutdown::remove_files(&mount_points, &counters, &removal, unmounted);
    outcome
}

struct Supervisor {
    identity: PodIdentity,
    source: Source,
    report: Report,
    server: PodServer,
    /// The volumes that no blocking thread works on, by place.
    idle: HashMap<usize, PodVolume>,
    /// The work on the other volumes, on blocking threads.
    working: JoinSet<FinishedWork>,
    /// When to refresh each mounted volume, by place. A volume is behind until it is refreshed with `version`.
    refresh_times: HashMap<usize, RefreshTime>,
    /// The pod and its objects, for refreshes.
    view: Arc<PodView>,
    /// The version of `view`.
    version: u64,
    sharing: Sharing,
    /// The definitions of the volumes, by place: first the volumes of the manifest at the start, in its order, then the
    /// volumes that were published later.
    volumes: BTreeMap<usize, Volume>,
    /// The definitions of the volumes, for the record. Empty for a supervisor of podfs node, which gives the next one the pod.
    definitions: Vec<DefinedVolume>,
    /// Whether the record has `definitions`.
    are_definitions_recorded: bool,
    /// The place of the next volume that is published. The supervisor uses no place twice.
    next_place: usize,
    setting: VolumeContext,
    /// Blocking threads that unmount volumes, or leftovers of an earlier supervisor, while the pod goes on.
    unmounting: JoinSet<UnmountedVolume>,
    pending_unmounts: PendingUnmounts,
    /// Clients that ask for an upgrade.
    upgrades: mpsc::Receiver<PendingClient>,
    /// Changes of the volumes, each with the client that asks for it.
    changes: mpsc::Receiver<(RequestedChange, PendingClient)>,
    /// The control socket. Its threads answer until this is dropped.
    control: Option<Control>,
    /// The searches for NFS servers that do not answer.
    searches: Searches,
    unmount_watch: Option<UnmountWatch>,
    /// Why the supervisor cannot make its run directory again, if it cannot. The log has this already.
    run_directory_trouble: Option<String>,
    containers: ContainerOperations,
}

impl Supervisor {
    async fn serve(&mut self, orders: &mut OrderSignals) -> Result<SupervisorOrder, SupervisorError> {
        self.report.started();
        self.allow_all_volumes().await;
        let mut heartbeat = Heartbeat::of_unit();
        let mut run_directory_timer = RunDirectoryTimer::new(self.has_run_directory());
        let mut tidy_at = Some(Instant::now() + MEMORY_RETURN_DELAY);
        let mut has_started = false;
        loop {
            self.start_operations();
            self.start_work();
            self.report.progress();
            let (next, has_daemon) = (self.next_work(), self.has_daemon());
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
                Some(finished) = self.working.join_next() => {
                    self.finish_work(finished)?;
                    tidy_at = Some(Instant::now() + MEMORY_RETURN_DELAY);
                }
                event = self.containers.next() => self.handle_container_event(event),
                Some(unmounted) = self.unmounting.join_next() => self.finish_unmount(unmounted),
                Some((change, client)) = self.changes.recv() => self.change(change, client).await,
                Some(client) = self.upgrades.recv() => self.upgrade(client).await,
                () = heartbeat.beat() => self.look_at_run_directory(&mut run_directory_timer),
                // podfs node disconnects when it misses a file in the pod's run directory.
                () = run_directory::look_is_due(self.control.as_ref()) => {
                    self.look_at_run_directory(&mut run_directory_timer);
                }
                () = run_directory_timer.look_is_due(has_daemon) => self.look_at_run_directory(&mut run_directory_timer),
                () = sleep_until(tidy_at.unwrap_or_else(Instant::now)), if tidy_at.is_some() => {
                    memory_lock::return_unused_memory();
                    if !has_started {
                        memory_lock::unmap_program();
                        has_started = true;
                    }
                    tidy_at = None;
                }
                () = unmount_watch::look_is_due(self.unmount_watch.as_mut()) => {
                    if let Some(path) = self.look_at_mounts() {
                        info!("another process unmounted {}; podfs ends", path.display());
                        return Ok(SupervisorOrder::Stop);
                    }
                }
                () = sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => {}
            }
        }
    }

    /// The last step of the supervisor, which removes the pod's files, for the log.
    fn removal(&self) -> String {
        let directories = format!("remove the pod's directories in {}", self.setting.site.path().display());
        let run = self.setting.mount_points().run_directory().map(|run| format!(" and its files in {}", run.display()));
        directories + &run.unwrap_or_default()
    }

    /// Reports the history of the pod's servers.
    fn report_server(&mut self) {
        let restarts = self.server.take_restarts();
        self.report.server(self.server.history(), restarts, self.server.version());
    }

    /// Reports each volume before its first refresh: its path and its state. A volume with a source on the node counts
    /// as refreshed already, so that the report has it as waiting for its source.
    fn report_volumes(&mut self) {
        let idle = std::mem::take(&mut self.idle);
        for (place, volume) in &idle {
            match volume.spec().source {
                VolumeSource::Projection(_) => self.report.record_before_refresh(*place, &self.volumes[place], volume),
                _ => self.report_volume(*place, volume),
            }
        }
        self.idle = idle;
    }

    /// Reports the volume at the place `leader`, and each volume that shares its mount.
    fn report_volume(&mut self, leader: usize, volume: &PodVolume) {
        for (place, spec) in self.sharing.places(leader).filter_map(|place| Some((place, self.volumes.get(&place)?))) {
            self.report.volume(place, spec, volume);
            if let Some(condition) = volume.condition() {
                self.source.set_condition(spec.name.as_str(), condition);
            }
        }
    }

    /// Takes over the pod and the objects of a snapshot, and schedules a refresh of all volumes.
    fn take_snapshot(&mut self, mut snapshot: Snapshot) {
        match &snapshot.pod {
            Some(pod) if pod.identity != self.identity => {
                match self.identity.refuse_rename(&pod.identity) {
                    Some(reason) => warn!("{reason}; podfs continues with {}", self.identity),
                    None => {
                        warn!(
                            "the pod manifest now describes {}; podfs continues with {}",
                            pod.identity, self.identity
                        );
                    }
                }
                snapshot.pod = None;
            }
            Some(pod) => {
                self.warn_of_other_volumes(pod);
                self.containers.pod = Some(Arc::clone(pod));
            }
            None => {}
        }
        debug!("the pod or its objects changed");
        self.refresh_times.values_mut().for_each(|time| time.noticed_at = time.noticed_at.or(snapshot.noticed_at));
        self.report.tokens(snapshot.known.tokens.clone());
        let PodView { identity, facts, machine, .. } = &*self.view;
        self.view = Arc::new(snapshot.view(identity, facts, *machine));
        self.version += 1;
    }
}
