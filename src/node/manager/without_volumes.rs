//! The supervisors of pods that want no volume. Their containers have a hosts file, a termination log and images, which a
//! supervisor prepares.
//!
//! A pod of a kubelet or a container runtime gets none: these have such files themselves.

use std::collections::BTreeMap;
use std::time::Duration;

use podfs_fuse::Backoff;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::warn;

use super::Manager;
use super::operations::MOUNT;
use crate::manifest::pod::PodUid;
use crate::node::operation::PAUSE;
use crate::node::pod::{NodePod, PodOrigin};
use crate::node::state::PodEntry;
use crate::node::supervisors::{MountFailure, Supervisors};
use crate::node::world::desired::DesiredPod;

/// The pods without volumes, and the starts of their supervisors.
#[derive(Default)]
pub(super) struct WithoutVolumes {
    pods: BTreeMap<PodUid, Service>,
    starts: JoinSet<StartOutcome>,
}

/// The end of a start.
pub(super) struct StartOutcome {
    uid: PodUid,
    outcome: Result<(), MountFailure>,
}

/// Whether the supervisor of a pod without volumes is there.
enum Service {
    /// An earlier daemon has started it. It is started now if it is gone.
    Recovered,
    /// It is being started, after the failures that this knows.
    Starting { backoff: Backoff },
    /// It answers. When it ends by itself, it is started again.
    Up,
    /// It did not start.
    Failed { reason: String, backoff: Backoff, retry_at: Instant },
}

impl WithoutVolumes {
    /// An earlier daemon has given this pod a supervisor.
    pub(super) fn recover(&mut self, uid: PodUid) {
        self.pods.insert(uid, Service::Recovered);
    }

    /// The supervisor of the pod has ended by itself.
    pub(super) fn gone(&mut self, uid: &PodUid) {
        if matches!(self.pods.get(uid), Some(Service::Up)) {
            self.pods.remove(uid);
        }
    }

    /// Forgets the pod. Gives whether it may have a supervisor.
    pub(super) fn forget(&mut self, uid: &PodUid) -> bool {
        self.pods.remove(uid).is_some()
    }

    /// The next start that has ended; never, if there is none. Cancel-safe.
    pub(super) async fn next(&mut self) -> StartOutcome {
        match self.starts.join_next().await {
            Some(started) => started.expect("a task that panics ends the process"),
            None => std::future::pending().await,
        }
    }

    /// When the first pause ends that had not ended `before`.
    pub(super) fn next_retry(&self, before: Instant) -> Option<Instant> {
        let pauses = self.pods.values().filter_map(|service| match service {
            Service::Failed { retry_at, .. } => Some(*retry_at),
            _ => None,
        });
        pauses.filter(|retry_at| *retry_at > before).min()
    }

    /// The pauses after starts that failed, if the pod needs one now.
    fn due(&self, uid: &PodUid, now: Instant) -> Option<Backoff> {
        match self.pods.get(uid) {
            None | Some(Service::Recovered) => Some(PAUSE.backoff()),
            Some(Service::Failed { backoff, retry_at, .. }) if *retry_at <= now => Some(*backoff),
            Some(Service::Starting { .. } | Service::Up | Service::Failed { .. }) => None,
        }
    }

    fn start(&mut self, pod: NodePod, backoff: Backoff, supervisors: Supervisors) {
        let uid = pod.pod.identity.uid.clone();
        self.pods.insert(uid.clone(), Service::Starting { backoff });
        self.starts.spawn(async move { StartOutcome { uid, outcome: supervisors.serve(&pod, MOUNT).await } });
    }

    /// Takes the end of a start. Gives why it failed, and how long the pause is.
    fn take(&mut self, started: StartOutcome) -> Option<(String, Duration)> {
        let service = self.pods.get_mut(&started.uid)?;
        let Service::Starting { mut backoff } = *service else { return None };
        match started.outcome {
            Ok(()) => {
                *service = Service::Up;
                None
            }
            Err(MountFailure { reason, .. }) => {
                let pause = backoff.fail();
                *service = Service::Failed { reason: reason.clone(), backoff, retry_at: Instant::now() + pause };
                Some((reason, pause))
            }
        }
    }
}

impl Manager {
    /// Starts the supervisors that pods without volumes lack.
    pub(super) fn serve_pods_without_volumes(&mut self) {
        let now = Instant::now();
        let lacking = self
            .desired
            .pods()
            .filter(|(_, wanted)| needs_only_a_supervisor(wanted))
            .filter_map(|(uid, wanted)| Some((wanted.pod.clone(), self.without_volumes.due(uid, now)?)));
        let lacking: Vec<_> = lacking.collect();
        for (pod, backoff) in lacking {
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

    /// Adds to the published state of a pod without volumes whether it has its supervisor.
    pub(super) fn complete(&self, uid: &PodUid, entry: &mut PodEntry) {
        if !self.desired.pod(uid).is_some_and(needs_only_a_supervisor) {
            return;
        }
        match self.without_volumes.pods.get(uid) {
            Some(Service::Up) => {}
            Some(Service::Failed { reason, .. }) => {
                entry.processed = false;
                entry.errors.push(reason.clone());
            }
            None | Some(Service::Recovered | Service::Starting { .. }) => entry.processed = false,
        }
    }
}

/// Whether the pod needs its supervisor, and no volume of it does.
fn needs_only_a_supervisor(wanted: &DesiredPod) -> bool {
    let is_run_by_an_agent = matches!(wanted.pod.origin, PodOrigin::File(_) | PodOrigin::Api);
    is_run_by_an_agent && wanted.volumes.is_empty() && wanted.is_processed()
}
