//! The manager: one task that owns the state of the node's pods, decides what to mount and unmount, and publishes the state.
//!
//! | module | owns |
//! |---|---|
//! | [`pods`] | the pods as the sources describe them, and until when their volumes are needed |
//! | `published` | publishing the state |
//! | `pod_entry` | the published state of a pod |
//! | `containers` | whether the containers of chosen pods have podfs's volumes or the kubelet's |
//! | `events` | events of the pods of an API server |
//! | `growing` | the status of claims whose volumes are about to grow |
//! | `claims` | the status of claims whose volumes have grown |
//! | `operations` | starting the reconciler's operations, and handling their ends |
//! | `gone_pods` | pods that no source describes: when podfs knows for certain that they are gone, and removes what is left of them |
//! | `housekeeping` | the passes over directories of deleted pods |
//! | [`recovery`] | pods that an earlier daemon left |
//! | `retirements` | removing what is left of pods that nothing needs any more |
//! | `without_volumes` | the supervisors of pods that want no volume |
//! | `unmounts` | volumes that another process has unmounted |
//! | `pusher` | pushing objects to the supervisor of a pod |
//!
//! The manager takes events one after another: pods from the [`feed`](super::feed), statuses from supervisors, commands from
//! agents, ends of operations, ends of pauses. After each event it brings the desired world up to date, asks the
//! [reconciler](super::reconciler) for operations, starts a task for each operation, and publishes the state. The manager's own
//! task never waits for a supervisor, a mount or a server.

mod claims;
mod containers;
mod events;
mod gone_pods;
mod growing;
mod housekeeping;
mod operations;
mod pod_entry;
pub mod pods;
mod published;
mod pusher;
pub mod recovery;
mod retirements;
mod unmounts;
mod without_volumes;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until};
use tracing::{Instrument, Span, info, warn};

use super::backing::Backing;
use super::feed::{Feed, FeedEvent, PodSource};
use super::handle::{CommandError, ManagerCommand, NodeHandle};
use super::metrics::Recorder;
use super::operation::Executor;
use super::orphans::Orphans;
use super::plugin::PluginRegistry;
use super::pod::PodOrigin;
use super::spans;
use super::state::{MountState, NodeState};
use super::supervisors::{SupervisorReport, Supervisors};
use super::world::VolumeId;
use super::world::actual::{ActualWorld, ObservedVolume};
use super::world::desired::DesiredWorld;
use crate::manifest::pod::{Pod, PodUid};
use crate::supervisor::status::{PodStatus, VolumeState, VolumeStatus};
use claims::Claims;
use containers::PodContainers;
use events::Events;
pub use gone_pods::LostPod;
use housekeeping::{HOUSEKEEPING_INTERVAL, Housekeeping};
use operations::EndedOperation;
use pods::Pods;
use pusher::{PusherReport, Pushers};
use recovery::Recovered;
use retirements::Retirements;
use unmounts::Unmounts;
use without_volumes::WithoutVolumes;

/// How many commands the queue holds. When it is full, senders wait.
const MAX_COMMANDS: usize = 256;

/// The manager of the node's volumes.
pub struct Manager {
    pods: Pods,
    desired: DesiredWorld,
    actual: ActualWorld,
    plugins: PluginRegistry,
    executor: Executor,
    supervisors: Supervisors,
    /// The process ids of supervisors that have reported a status.
    pids: BTreeMap<PodUid, u32>,
    /// What podfs waits for, of pods whose supervisors do not end.
    ending: BTreeMap<PodUid, String>,
    pushers: Pushers,
    /// The backings of volumes, as the pushers reported them last.
    backings: BTreeMap<VolumeId, Backing>,
    pusher_reports: mpsc::UnboundedReceiver<PusherReport>,
    events: Events,
    claims: Claims,
    containers: PodContainers,
    unmounts: Unmounts,
    without_volumes: WithoutVolumes,
    retirements: Retirements,
    housekeeping: Housekeeping,
    recorder: Recorder,
    /// Since when pods have wanted volumes that are not mounted yet.
    wanted_since: BTreeMap<VolumeId, Instant>,
    trouble: BTreeMap<PodSource, Vec<String>>,
    /// The pods of an earlier daemon whose checkpoints this daemon cannot use, until they are described or removed.
    lost: BTreeMap<PodUid, LostPod>,
    /// The directory in which the kubelet has a directory for each of its pods, if podfs serves pods of a kubelet.
    kubelet_pods: Option<PathBuf>,
    /// The pods whose published state may have changed.
    touched: BTreeSet<PodUid>,
    commands: mpsc::Receiver<ManagerCommand>,
    ends: mpsc::UnboundedReceiver<EndedOperation>,
    end_sender: mpsc::UnboundedSender<EndedOperation>,
    state: watch::Sender<Arc<NodeState>>,
}

/// The settings of a manager.
pub struct ManagerSettings {
    /// The sources of pods. The manager unmounts nothing before each of them has listed its pods.
    pub sources: Vec<PodSource>,
    /// The name of the node, where it is known.
    pub node: Option<String>,
    /// Where volumes appear.
    pub root_directory: PathBuf,
    /// Whether podfs releases a pod that no source has any more, without waiting for an agent.
    pub release_when_gone: bool,
    /// The pods of an earlier daemon whose checkpoints this daemon cannot use.
    pub lost: BTreeMap<PodUid, LostPod>,
    /// The directory in which the kubelet has a directory for each of its pods, if podfs serves pods of a kubelet.
    pub kubelet_pods: Option<PathBuf>,
}

impl Manager {
    /// A manager that continues with the pods of an earlier daemon, and its handle.
    pub fn new(
        recovered: Vec<Recovered>,
        settings: ManagerSettings,
        feed: &Feed,
        supervisors: Supervisors,
        orphans: Orphans,
        recorder: Recorder,
    ) -> (Manager, NodeHandle) {
        let (sender, commands) = mpsc::channel(MAX_COMMANDS);
        let (end_sender, ends) = mpsc::unbounded_channel();
        let (state, receiver) = watch::channel(Arc::default());
        let (pushers, pusher_reports) = Pushers::new(feed.objects(), supervisors.clone(), feed.client());
        let mut manager = Manager {
            pods: Pods::new(settings.sources, settings.release_when_gone),
            desired: DesiredWorld::default(),
            actual: ActualWorld::default(),
            plugins: PluginRegistry::built_in(),
            executor: Executor::default(),
            pushers,
            backings: BTreeMap::new(),
            pusher_reports,
            supervisors,
            pids: BTreeMap::new(),
            ending: BTreeMap::new(),
            unmounts: Unmounts::new(&settings.root_directory),
            without_volumes: WithoutVolumes::default(),
            retirements: Retirements::default(),
            events: Events::new(feed.client(), settings.node.clone()),
            claims: Claims::new(feed.client(), settings.node),
            containers: PodContainers::default(),
            housekeeping: Housekeeping::new(orphans),
            recorder,
            wanted_since: BTreeMap::new(),
            trouble: BTreeMap::new(),
            kubelet_pods: settings.kubelet_pods,
            touched: settings.lost.keys().cloned().collect(),
            lost: settings.lost,
            commands,
            ends,
            end_sender,
            state,
        };
        recovered.into_iter().for_each(|pod| manager.recover(pod));
        (manager, NodeHandle::new(receiver, sender))
    }

    /// Takes over a pod of an earlier daemon.
    fn recover(&mut self, recovered: Recovered) {
        let Recovered { pod, released, volumes, without_volumes } = recovered;
        let uid = pod.pod.identity.uid.clone();
        for volume in volumes {
            self.actual.reconstruct(VolumeId { pod: uid.clone(), volume });
        }
        if without_volumes {
            self.without_volumes.recover(uid.clone());
        }
        self.pods.recover(pod, released);
        self.describe(&uid);
    }

    /// Serves until the process ends.
    pub async fn run(mut self, mut feed: Feed, mut reports: mpsc::Receiver<(PodUid, SupervisorReport)>) {
        let mut housekeeping = tokio::time::interval(HOUSEKEEPING_INTERVAL);
        housekeeping.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let before = Instant::now();
            self.start_operations();
            self.publish();
            let retries = [
                self.executor.next_retry(before),
                self.without_volumes.next_retry(before),
                self.retirements.next_retry(before),
            ];
            let retry = retries.into_iter().flatten().min();
            tokio::select! {
                event = feed.next() => self.take_event(event),
                Some((uid, report)) = reports.recv() => self.take_report(&uid, report),
                Some(command) = self.commands.recv() => self.take_command(command),
                Some(ended) = self.ends.recv() => self.take_end(ended),
                started = self.without_volumes.next() => self.take_start(started),
                ended = self.retirements.next() => self.take_retirement(ended),
                Some(report) = self.pusher_reports.recv() => self.take_pusher_report(report),
                () = sleep_until(retry.unwrap_or(before)), if retry.is_some() => {}
                () = self.unmounts.look_is_due() => self.look_at_mounts(),
                _ = housekeeping.tick() => self.keep_house(),
            }
            // Takes all waiting reports and ends before the next pass over the pods.
            while let Ok((uid, report)) = reports.try_recv() {
                self.take_report(&uid, report);
            }
            while let Ok(ended) = self.ends.try_recv() {
                self.take_end(ended);
            }
        }
    }

    fn take_event(&mut self, event: FeedEvent) {
        let changed = match event {
            FeedEvent::Pods(source, pods) => {
                let mut changed = self.pods.take_list(source, pods);
                changed.extend(self.release_gone_pods());
                if self.pods.sources_ready() {
                    info!("every source has listed its pods: {} on this node", self.pods.iter().count());
                }
                changed
            }
            FeedEvent::Put(pod) => {
                let uid = self.pods.put(pod);
                self.housekeeping.note_known(&uid);
                vec![uid]
            }
            FeedEvent::Gone(_, uid) => {
                self.pods.note_undescribed(&uid);
                vec![uid]
            }
            FeedEvent::Containers(pod, containers) => {
                self.touch(&pod.uid);
                self.containers.take(&pod, containers, &mut self.events);
                // The manager does not know the pod, so nothing else would stop the poster of its events.
                if self.containers.of(&pod.uid).is_empty() && self.pods.get(&pod.uid).is_none() {
                    self.events.stop(&pod.uid);
                }
                Vec::new()
            }
            FeedEvent::Failure(source, trouble) => {
                trouble.iter().for_each(|sentence| warn!("{sentence}"));
                self.trouble.insert(source, trouble);
                self.release_gone_pods()
            }
        };
        changed.iter().for_each(|uid| self.describe(uid));
    }

    /// Brings the desired world up to date with the pod's description.
    fn describe(&mut self, uid: &PodUid) {
        self.touch(uid);
        let Some(known) = self.pods.get(uid) else { return };
        if known.is_described || known.needs_volumes() {
            self.retirements.forget_failure(uid);
        }
        match known.needs_volumes() {
            true => {
                self.desired.put(known.pod.clone(), &self.plugins, &self.actual);
                if let Some(wanted) = self.desired.pod(uid) {
                    self.pushers.describe(&wanted.pod);
                    // A supervisor that starts later reads the checkpoint.
                    if self.pids.contains_key(uid) {
                        self.supervisors.update(&wanted.pod);
                    }
                }
            }
            false => self.desired.remove(uid),
        }
        self.forget_unmounted();
    }

    fn take_report(&mut self, uid: &PodUid, report: SupervisorReport) {
        let _span = self.pod_span(uid).entered();
        self.touch(uid);
        match report {
            SupervisorReport::Up(pid) => self.supervisor_is_up(uid, pid),
            SupervisorReport::Status(status) => self.take_status(uid, &status),
            SupervisorReport::Gone => {
                warn!(
                    "pod {uid}: its supervisor is gone; its server still serves, and podfs starts another supervisor"
                );
                self.pids.remove(uid);
                self.without_volumes.gone(uid);
                self.actual.require_remount(uid);
            }
            SupervisorReport::Ending(Some(awaited)) => {
                self.ending.insert(uid.clone(), awaited);
            }
            SupervisorReport::Ending(None) => drop(self.ending.remove(uid)),
        }
    }

    /// Pushes all objects to a new supervisor.
    fn supervisor_is_up(&mut self, uid: &PodUid, pid: u32) {
        self.pids.insert(uid.clone(), pid);
        let wanted = self.desired.pod(uid).map(|wanted| &wanted.pod);
        if let Some(pod) = wanted.or_else(|| self.pods.get(uid).map(|known| &known.pod)) {
            self.pushers.start(pod);
        }
    }

    /// Takes the status of a supervisor.
    fn take_status(&mut self, uid: &PodUid, status: &PodStatus) {
        let known = self.pods.get(uid).filter(|known| known.pod.origin == PodOrigin::Api);
        let pod = known.map(|known| known.pod.pod.clone());
        for volume in &status.volumes {
            if let Some(pod) = &pod {
                self.events.report(&pod.identity, volume);
                self.events.report_ownership(&pod.identity, volume);
                self.report_growth(pod, volume);
            }
            let id = VolumeId { pod: uid.clone(), volume: volume.name.clone() };
            let is_mounted = volume.state != VolumeState::Waiting;
            // For a wanted volume, the manager publishes the reason why it waits already during its first mount.
            if !is_mounted && self.actual.volume(&id).is_none() && self.desired.volume(&id).is_none() {
                continue;
            }
            if is_mounted {
                self.executor.forget(&id);
            }
            self.actual.report(&id, is_mounted, observed(volume), volume.reason.clone());
            self.count_mounted(&id);
        }
    }

    /// Reports the outcome of a volume's last growth to the cluster.
    fn report_growth(&mut self, pod: &Pod, volume: &VolumeStatus) {
        let Some(expansion) = &volume.expansion else { return };
        let spec = pod.volumes.iter().find(|spec| spec.name.as_str() == volume.name);
        let Some(claim) = spec.and_then(|spec| spec.claim_name(&pod.identity.name)) else { return };
        if self.claims.report_growth(&pod.identity, &volume.name, claim, expansion) {
            self.events.report_growth(&pod.identity, &volume.name, expansion);
        }
    }

    fn take_command(&mut self, command: ManagerCommand) {
        match command {
            ManagerCommand::Reprocess(uid) => self.describe(&uid),
            ManagerCommand::RemountRequired(uid) => {
                self.touch(&uid);
                self.actual.require_remount(&uid);
            }
            ManagerCommand::Release(uid, answer) => {
                let _span = self.pod_span(&uid).entered();
                if self.pods.get(&uid).is_none() && self.release_lost_pod(&uid) {
                    // Fails only if the client no longer waits.
                    let _ = answer.send(Ok(()));
                    return;
                }
                if let Err(refusal) = self.pods.release(&uid) {
                    // Fails only if the client no longer waits.
                    let _ = answer.send(Err(refusal));
                    return;
                }
                info!("pod {uid} is released; podfs unmounts its volumes");
                self.remember_release(&uid, answer);
                self.describe(&uid);
            }
        }
    }

    /// Records a release before the agent gets its answer: after a SIGKILL of the daemon, the agent does not release
    /// again.
    fn remember_release(&self, uid: &PodUid, answer: oneshot::Sender<Result<(), CommandError>>) {
        let (supervisors, uid, span) = (self.supervisors.clone(), uid.clone(), self.pod_span(uid));
        let remember = async move {
            if let Err(error) = supervisors.set_released(&uid, true).await {
                warn!(
                    "pod {uid}: cannot record its release: {error}; if podfs node is killed now, release the pod again"
                );
            }
            // Fails only if the client no longer waits.
            let _ = answer.send(Ok(()));
        };
        tokio::spawn(remember.instrument(span));
    }

    /// Retires pods that need no volumes and have no mounts.
    fn forget_ended_pods(&mut self) {
        let idle = |uid: &PodUid| !self.actual.has_mounts(uid) && self.actual.of_pod(uid).next().is_none();
        let ended = self.pods.iter().filter(|(uid, known)| !known.needs_volumes() && idle(uid));
        let ended: Vec<_> = ended.map(|(uid, known)| (uid.clone(), known.is_described)).collect();
        for (uid, described) in ended {
            self.touch(&uid);
            self.pushers.stop(&uid);
            self.events.stop(&uid);
            self.claims.stop(&uid);
            self.pids.remove(&uid);
            let has_supervisor = self.without_volumes.forget(&uid);
            match described {
                false => self.retire_ended_pod(&uid),
                // A pod that its source still describes stays released. Without volumes, it has no unmount that would end its
                // supervisor.
                true if has_supervisor => self.retire(&uid),
                true => {}
            }
        }
    }

    /// Makes supervisors mount volumes again that another process has unmounted or covered.
    fn look_at_mounts(&mut self) {
        let mounted = self.actual.volumes().filter(|(_, volume)| volume.mount == MountState::Mounted);
        let mounted = mounted.filter_map(|(id, volume)| Some((id, volume.observed.path.as_deref()?)));
        for id in self.unmounts.look(mounted) {
            self.log_detail(&id, &"its mounts have changed");
            self.touch(&id.pod);
            self.actual.require_remount_of(&id);
        }
    }

    /// Ends the supervisor of a pod, and removes what it may have left.
    fn retire(&self, uid: &PodUid) {
        let (supervisors, uid, span) = (self.supervisors.clone(), uid.clone(), self.pod_span(uid));
        let retire = async move {
            if let Err(reason) = supervisors.retire(&uid).await {
                warn!("pod {uid}: podfs cannot remove all of it: {reason}");
            }
        };
        tokio::spawn(retire.instrument(span));
    }

    /// Forgets volumes that are not mounted and that no pod wants.
    fn forget_unmounted(&mut self) {
        let forgotten = self.actual.forget_unmounted(|id| self.desired.volume(id).is_some());
        forgotten.iter().for_each(|id| self.touch(&id.pod));
        let (desired, actual) = (&self.desired, &self.actual);
        let is_known = |id: &VolumeId| desired.volume(id).is_some() || actual.volume(id).is_some();
        self.backings.retain(|id, _| is_known(id));
        // No unmount ends the time of a volume that was never mounted.
        self.wanted_since.retain(|id, _| is_known(id));
    }

    /// The span of log lines about a pod.
    fn pod_span(&self, uid: &PodUid) -> Span {
        spans::of_uid(uid, self.pods.get(uid).map(|known| &known.pod.pod.identity))
    }

    /// The span of log lines about a volume.
    fn volume_span(&self, id: &VolumeId) -> Span {
        let known = self.pods.get(&id.pod);
        spans::of_volume(&id.pod, known.map(|known| &known.pod.pod.identity), &id.volume)
    }
}

/// The properties of a volume that the manager takes from its supervisor's status.
fn observed(volume: &VolumeStatus) -> ObservedVolume {
    let plugin = volume.path.as_deref().and_then(|path| path.parent()?.file_name()?.to_str());
    ObservedVolume {
        path: volume.path.clone(),
        plugin: plugin.map(|directory| directory.replace('~', "/")),
        group: volume.supplemental_group,
        read_only: volume.read_only,
    }
}
