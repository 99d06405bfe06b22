//! Publications to the supervisor of a pod that is served: its volumes come and go while it runs.
//!
//! 1. The answer to a publication and the statuses come on two connections. A status that arrives during a publication may be older
//!    than the publication, and show a mount that is gone meanwhile; or it may be newer, and be the last status for a long time. So
//!    the task opens a new connection for statuses after each publication with new volumes: every status on it is newer.
//! 2. Until that connection's first status, the task answers only mounts of volumes that the publication left as they were.
//! 3. The supervisor may have taken a publication that failed, or not. The task publishes again after a pause, or with the next
//!    operation on the pod.

use std::collections::BTreeSet;
use std::path::Path;

use tokio::time::Instant;
use tracing::{Instrument, debug, warn};

use super::super::control::{self, StatusWatch};
use super::super::life::{
    ConnectingSupervisor, PublicationChange, PublicationResult, RunningSupervisor, SupervisorLife,
};
use super::super::{FailureKind, OperationError};
use super::PodTask;
use crate::supervisor::control::AskError;

impl PodTask {
    /// Publishes the wanted volumes to the supervisor, and unpublishes those that are no longer wanted.
    pub(super) async fn publish(&mut self) {
        let Some(wanted) = self.wanted.clone() else { return };
        if let Err(reason) = self.write_checkpoint().await {
            self.publish_later(&reason);
            return self.fail_all(FailureKind::Transient, &reason);
        }
        let mut published = self.published.take().unwrap_or_else(|| wanted.clone());
        let gone: Vec<String> = published.volumes.difference(&wanted.volumes).cloned().collect();
        let added: BTreeSet<String> = match self.is_taken {
            true => wanted.volumes.difference(&published.volumes).cloned().collect(),
            false => wanted.volumes.clone(),
        };
        // Whatever the outcome is, the supervisor may serve these volumes.
        published.volumes.extend(wanted.volumes.iter().cloned());
        (self.published, self.is_taken) = (Some(published), false);
        let directory = self.directory.clone();
        let manifest = wanted.served_manifest();
        let has_new = !added.is_empty();
        let publication = async move {
            if !gone.is_empty() {
                control::unpublish(&directory, gone).await?;
            }
            control::publish(&directory, manifest).await?;
            Ok(match has_new {
                true => Some(follow(&directory).await),
                false => None,
            })
        };
        let task = tokio::spawn(publication.in_current_span());
        if let SupervisorLife::Up(up) = &mut self.life {
            up.change = Some(PublicationChange { wanted, added, task });
        }
    }

    /// Handles the end of a publication.
    pub(super) fn publication_ended(&mut self, change: PublicationChange, result: PublicationResult) {
        let PublicationChange { wanted, added, .. } = change;
        let outcome = result.as_ref().map(|_| ()).map_err(Clone::clone);
        self.waiting.unmounted(|volume| !wanted.volumes.contains(volume), &outcome);
        match result {
            Ok(watch) => {
                let is_as_before = |name: &String| wanted.volumes.contains(name) && !added.contains(name);
                let status = self.status.iter_mut();
                status.for_each(|status| status.volumes.retain(|volume| is_as_before(&volume.name)));
                (self.published, self.is_taken) = (Some(wanted), true);
                self.publish_pauses.reset();
                self.waiting.up();
                if let Some(watch) = watch {
                    self.follow_with(watch);
                }
                self.answer_mounts();
            }
            Err(reason) => {
                self.publish_later(&reason);
                self.waiting.fail_mounts(FailureKind::Uncertain, &reason.to_string());
            }
        }
    }

    /// Publishes again after a pause. Logs only the first of several failures in a row.
    fn publish_later(&mut self, reason: &OperationError) {
        let failures = self.publish_pauses.failures();
        let pause = self.publish_pauses.fail();
        self.publish_at = Some(Instant::now() + pause);
        if failures == 0 {
            warn!("the supervisor of pod {} has not taken a change of the pod; podfs tries again: {reason}", self.uid);
        }
    }

    /// Follows the pod on this connection from now on. If there is no connection, calls the supervisor again.
    fn follow_with(&mut self, new: Result<StatusWatch, AskError>) {
        match (std::mem::replace(&mut self.life, SupervisorLife::Absent), new) {
            (SupervisorLife::Up(up), Ok(watch)) => self.life = SupervisorLife::Up(RunningSupervisor { watch, ..up }),
            (SupervisorLife::Up(up), Err(error)) => {
                debug!("the supervisor of pod {} is called again: {error}", self.uid);
                self.life = SupervisorLife::Calling(ConnectingSupervisor::new(Some(up.process), false, None));
            }
            (other, _) => self.life = other,
        }
    }
}

/// Follows the pod from its status at this moment on.
async fn follow(directory: &Path) -> Result<StatusWatch, AskError> {
    StatusWatch::begin(control::connect(directory).await?).await
}
