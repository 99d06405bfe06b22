//! The retirements of pods: each ends the supervisor of a pod that nothing needs any more, and removes what it left.
//!
//! The manager forgets a pod only after its retirement. A retirement that fails is tried again after a pause.

use std::collections::BTreeMap;

use podfs_fuse::Backoff;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::{Instrument, info, warn};

use super::Manager;
use crate::manifest::pod::PodUid;
use crate::node::operation::PAUSE;
use crate::node::state::PodEntry;
use crate::node::supervisors::{OperationError, Supervisors};

/// The retirements that run, and those that have failed.
#[derive(Default)]
pub(super) struct Retirements {
    pods: BTreeMap<PodUid, Retirement>,
    running: JoinSet<RetirementOutcome>,
}

/// The end of a retirement.
pub(super) struct RetirementOutcome {
    uid: PodUid,
    outcome: Result<(), OperationError>,
}

/// The retirement of a pod.
enum Retirement {
    /// It runs; `backoff` has the failures so far.
    Running { backoff: Backoff },
    /// Something of the pod stayed.
    Failed { error: OperationError, backoff: Backoff, retry_at: Instant },
}

impl Retirements {
    /// Starts the retirement of a pod, unless it runs, or the pause after its failure is not over.
    fn start<Ended>(&mut self, uid: &PodUid, now: Instant, retire: impl FnOnce() -> Ended)
    where
        Ended: Future<Output = Result<(), OperationError>> + Send + 'static,
    {
        let backoff = match self.pods.get(uid) {
            None => PAUSE.backoff(),
            Some(Retirement::Failed { backoff, retry_at, .. }) if *retry_at <= now => *backoff,
            Some(Retirement::Running { .. } | Retirement::Failed { .. }) => return,
        };
        self.pods.insert(uid.clone(), Retirement::Running { backoff });
        let (uid, retire) = (uid.clone(), retire());
        self.running.spawn(async move { RetirementOutcome { uid, outcome: retire.await } });
    }

    /// Takes the end of a retirement. Returns whether nothing of the pod is left.
    fn take(&mut self, ended: RetirementOutcome) -> bool {
        let RetirementOutcome { uid, outcome } = ended;
        let Some(Retirement::Running { mut backoff }) = self.pods.remove(&uid) else { return false };
        let Err(error) = outcome else { return true };
        let pause = backoff.fail();
        warn!("pod {uid}: podfs cannot remove all of it: {error}; podfs tries again in {pause:?}");
        self.pods.insert(uid, Retirement::Failed { error, backoff, retry_at: Instant::now() + pause });
        false
    }

    /// Forgets the failure of a pod, whose volumes are needed again.
    pub(super) fn forget_failure(&mut self, uid: &PodUid) {
        if matches!(self.pods.get(uid), Some(Retirement::Failed { .. })) {
            self.pods.remove(uid);
        }
    }

    /// Waits for the end of the next retirement. Cancel-safe.
    pub(super) async fn next(&mut self) -> RetirementOutcome {
        match self.running.join_next().await {
            Some(ended) => ended.expect("a task that panics ends the process"),
            None => std::future::pending().await,
        }
    }

    /// When the next pause ends, of those that end after `before`.
    pub(super) fn next_retry(&self, before: Instant) -> Option<Instant> {
        let pauses = self.pods.values().filter_map(|retirement| match retirement {
            Retirement::Failed { retry_at, .. } => Some(*retry_at),
            Retirement::Running { .. } => None,
        });
        pauses.filter(|retry_at| *retry_at > before).min()
    }
}

impl Manager {
    /// Retires a pod that no source has any more and that needs no volumes.
    pub(super) fn retire_ended_pod(&mut self, uid: &PodUid) {
        let (supervisors, span) = (self.supervisors.clone(), self.pod_span(uid));
        self.retirements.start(uid, Instant::now(), || retirement(supervisors, uid.clone()).instrument(span));
    }

    /// Retires a pod of an earlier daemon that this daemon cannot reconstruct.
    pub(super) fn retire_lost_pod(&mut self, uid: &PodUid) {
        let (supervisors, span) = (self.supervisors.clone(), self.pod_span(uid));
        self.retirements.start(uid, Instant::now(), || {
            span.in_scope(|| {
                info!("pod {uid}: no source describes it, and podfs removes what an earlier daemon left of it")
            });
            retirement(supervisors, uid.clone()).instrument(span)
        });
    }

    /// Takes the end of a retirement: forgets the pod if nothing of it is left, and no source has it meanwhile.
    pub(super) fn take_retirement(&mut self, ended: RetirementOutcome) {
        let uid = ended.uid.clone();
        let _span = self.pod_span(&uid).entered();
        self.touch(&uid);
        let is_over = self.pods.get(&uid).is_some_and(|known| !known.is_described && !known.needs_volumes());
        if self.retirements.take(ended) {
            self.lost.remove(&uid);
            if is_over {
                self.executor.forget_pod(&uid);
                self.pods.forget(&uid);
            }
        }
    }

    /// Adds the reason why the last retirement of a pod failed to its published state.
    pub(super) fn add_failed_retirement(&self, uid: &PodUid, entry: &mut PodEntry) {
        if let Some(Retirement::Failed { error, .. }) = self.retirements.pods.get(uid) {
            entry.errors.push(error.to_string());
        }
    }
}

async fn retirement(supervisors: Supervisors, uid: PodUid) -> Result<(), OperationError> {
    supervisors.retire(&uid).await
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::node::sample::uid;

    #[tokio::test]
    async fn a_retirement_that_fails_is_tried_again_after_a_pause() {
        let (mut retirements, now, pod) = (Retirements::default(), Instant::now(), uid("u"));
        retirements.start(&pod, now, || async { Err(OperationError::Refused("a file stays".to_owned())) });
        retirements.start(&pod, now, || async { panic!("it runs already") });
        let ended = retirements.next().await;
        assert!(!retirements.take(ended));
        assert!(retirements.next_retry(now).is_some());
        retirements.start(&pod, now, || async { panic!("the pause is not over") });
        retirements.start(&pod, now + Duration::from_secs(60), || async { Ok(()) });
        let ended = retirements.next().await;
        assert!(retirements.take(ended) && retirements.next_retry(now).is_none());
    }
}
