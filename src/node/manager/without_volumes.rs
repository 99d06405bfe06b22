//! The supervisors of pods that want no volume. A supervisor prepares the hosts file, the termination log and the
//! images of their containers.
//!
//! A pod of a kubelet or a container runtime gets no such supervisor: they make such files themselves.

use std::collections::BTreeMap;
use std::time::Duration;

use podfs_fuse::Backoff;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::warn;

use super::Manager;
use super::operations::MOUNT_TIMEOUT;
use crate::manifest::pod::PodUid;
use crate::node::operation::PAUSE;
use crate::node::pod::{NodePod, PodOrigin};
use crate::node::state::PodEntry;
use crate::node::supervisors::{MountFailure, Supervisors};
use crate::node::world::desired::DesiredPod;

/// The pods without volumes, and the tasks that start their supervisors.
#[derive(Default)]
pub(super) struct WithoutVolumes {
    pods: BTreeMap<PodUid, WithoutVolumesState>,
    starts: JoinSet<StartOutcome>,
}

/// The end of a supervisor's start.
pub(super) struct StartOutcome {
    uid: PodUid,
    outcome: Result<(), MountFailure>,
}

/// The supervisor of a pod without volumes.
enum WithoutVolumesState {
    /// An earlier daemon has started the supervisor. If it has ended, podfs starts another supervisor.
    Recovered,
    /// It is starting; `backoff` has the failures so far.
    Starting { backoff: Backoff },
    /// It answers. When it ends by itself, podfs starts another supervisor.
    Up,
    /// It did not start.
    Failed { reason: String, backoff: Backoff, retry_at: Instant },
}

impl WithoutVolumes {
    /// Notes that an earlier daemon has started a supervisor for this pod.
    pub(super) fn recover(&mut self, uid: PodUid) {
        self.pods.insert(uid, WithoutVolumesState::Recovered);
    }

    /// Notes that the supervisor of the pod has ended by itself.
    pub(super) fn gone(&mut self, uid: &PodUid) {
        if matches!(self.pods.get(uid), Some(WithoutVolumesState::Up)) {
            self.pods.remove(uid);
        }
    }

    /// Forgets the pod. Returns whether it may have a supervisor.
    pub(super) fn forget(&mut self, uid: &PodUid) -> bool {
        self.pods.remove(uid).is_some()
    }

    /// Waits for the end of the next start. Cancel-safe.
    pub(super) async fn next(&mut self) -> StartOutcome {
        match self.starts.join_next().await {
            Some(started) => started.expect("a task that panics ends the process"),
            None => std::future::pending().await,
        }
    }

    /// When the next pause ends, of those that end after `before`.
    pub(super) fn next_retry(&self, before: Instant) -> Option<Instant> {
        let pauses = self.pods.values().filter_map(|service| match service {
            WithoutVolumesState::Failed { retry_at, .. } => Some(*retry_at),
            _ => None,
        });
        pauses.filter(|retry_at| *retry_at > before).min()
    }

    /// Whether podfs has to start a supervisor for the pod now. If so, the pauses after failed starts so far.
    fn due(&self, uid: &PodUid, now: Instant) -> Option<Backoff> {
        match self.pods.get(uid) {
            None | Some(WithoutVolumesState::Recovered) => Some(PAUSE.backoff()),
            Some(WithoutVolumesState::Failed { backoff, retry_at, .. }) if *retry_at <= now => Some(*backoff),
            Some(
                WithoutVolumesState::Starting { .. } | WithoutVolumesState::Up | WithoutVolumesState::Failed { .. },
            ) => None,
        }
    }

    fn start(&mut self, pod: NodePod, backoff: Backoff, supervisors: Supervisors) {
        let uid = pod.pod.identity.uid.clone();
        self.pods.insert(uid.clone(), WithoutVolumesState::Starting { backoff });
        self.starts.spawn(async move { StartOutcome { uid, outcome: supervisors.serve(&pod, MOUNT_TIMEOUT).await } });
    }

    /// Takes the end of a start. After a failure, returns its reason, and the pause before the next start.
    fn take(&mut self, started: StartOutcome) -> Option<(String, Duration)> {
        let service = self.pods.get_mut(&started.uid)?;
        let WithoutVolumesState::Starting { mut backoff } = *service else { return None };
        match started.outcome {
            Ok(()) => {
                *service = WithoutVolumesState::Up;
                None
            }
            Err(MountFailure { reason, .. }) => {
                let pause = backoff.fail();
                *service =
                    WithoutVolumesState::Failed { reason: reason.clone(), backoff, retry_at: Instant::now() + pause };
                Some((reason, pause))
            }
        }
    }
}

impl Manager {
    /// Starts the missing supervisors of pods without volumes.
    pub(super) fn serve_pods_without_volumes(&mut self) {
        let now = Instant::now();
        let without_supervisor = self
            .desired
            .pods()
            .filter(|(_, wanted)| needs_only_a_supervisor(wanted))
            .filter_map(|(uid, wanted)| Some((wanted.pod.clone(), self.without_volumes.due(uid, now)?)));
        let without_supervisor: Vec<_> = without_supervisor.collect();
        for (pod, backoff) in without_supervisor {
            self.touch(&pod.pod.identity.uid);
            self.without_volumes.start(pod, backoff, self.supervisors.clone());
        }
    }

    pub(super) fn take_start(&mut self, started: StartOutcome) {
        let uid = started.uid.clone();
        self.touch(&uid);
        if let Some((reason, pause)) = self.without_volumes.take(started) {
            let _span = self.pod_span(&uid).entered();
            warn!("pod {uid}: its supervisor is not there: {reason}; podfs tries again in {pause:?}");
        }
    }

    /// Adds the state of the supervisor to the published state of a pod without volumes.
    pub(super) fn complete(&self, uid: &PodUid, entry: &mut PodEntry) {
        if !self.desired.pod(uid).is_some_and(needs_only_a_supervisor) {
            return;
        }
        match self.without_volumes.pods.get(uid) {
            Some(WithoutVolumesState::Up) => {}
            Some(WithoutVolumesState::Failed { reason, .. }) => {
                entry.processed = false;
                entry.errors.push(reason.clone());
            }
            None | Some(WithoutVolumesState::Recovered | WithoutVolumesState::Starting { .. }) => {
                entry.processed = false
            }
        }
    }
}

/// Whether the pod needs a supervisor although it wants no volume.
fn needs_only_a_supervisor(wanted: &DesiredPod) -> bool {
    let is_run_by_an_agent = matches!(wanted.pod.origin, PodOrigin::File(_) | PodOrigin::Api);
    is_run_by_an_agent && wanted.volumes.is_empty() && wanted.is_processed()
}
