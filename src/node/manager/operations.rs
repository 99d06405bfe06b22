//! The operations of the manager: each runs on a task of its own, which sends its end to the manager.

use std::fmt;
use std::time::Duration;

use tokio::time::Instant;
use tracing::{Instrument, Level, Span, debug, enabled, warn};

use super::Manager;
use crate::node::reconciler::{Action, Operation, reconcile};
use crate::node::state::MountState;
use crate::node::supervisors::{FailureKind, MountFailure, OperationError};
use crate::node::world::VolumeId;
use crate::node::world::actual::OperationOutcome;

/// How long an operation waits for a volume. The supervisor continues after that, and reports when the volume is
/// mounted.
pub(super) const MOUNT_TIMEOUT: Duration = Duration::from_secs(10);

/// The end of an operation.
#[derive(Debug)]
pub(super) struct EndedOperation {
    operation: Operation,
    span: Span,
    started: Instant,
    outcome: OperationOutcome,
    error: Option<ActionError>,
}

/// Why an operation failed.
#[derive(Debug, thiserror::Error)]
enum ActionError {
    #[error(transparent)]
    Mount(#[from] MountFailure),
    #[error(transparent)]
    Supervisor(#[from] OperationError),
}

impl Manager {
    /// Starts the operations of the reconciler, except those that have to pause.
    pub(super) fn start_operations(&mut self) {
        let ready = self.pods.sources_ready();
        let operations = reconcile(&self.desired, &self.actual, &self.executor.running(), ready);
        for operation in operations {
            if let Err(not_now) = self.executor.begin(&operation.id, operation.action.name()) {
                self.log_detail(&operation.id, &not_now);
                continue;
            }
            self.log_detail(&operation.id, &format_args!("{} begins", operation.action.name()));
            self.start(operation);
        }
        self.serve_pods_without_volumes();
        if ready {
            self.forget_ended_pods();
            self.retire_lost_pods();
        }
    }

    fn start(&mut self, operation: Operation) {
        self.touch(&operation.id.pod);
        if operation.action == Action::Mount {
            self.wanted_since.entry(operation.id.clone()).or_insert_with(Instant::now);
        }
        let (supervisors, end_sender) = (self.supervisors.clone(), self.end_sender.clone());
        let pod = self.desired.pod(&operation.id.pod).map(|wanted| wanted.pod.clone());
        let is_served = self.pids.contains_key(&operation.id.pod);
        let span = self.volume_span(&operation.id);
        let task_span = span.clone();
        let run = async move {
            let started = Instant::now();
            let VolumeId { pod: uid, volume } = &operation.id;
            let result = match (operation.action, pod) {
                // If the supervisor of the volume is gone, the branch after this one starts another supervisor.
                (Action::Remount, Some(_)) if is_served => {
                    let remounted = supervisors.remount(uid, vec![volume.clone()]).await;
                    remounted.map_err(|error| (OperationOutcome::Transient, ActionError::from(error)))
                }
                (Action::Mount | Action::Remount, Some(pod)) => {
                    let mounted = supervisors.mount(&pod, volume, MOUNT_TIMEOUT).await;
                    mounted.map_err(|failure| (outcome(failure.kind), failure.into()))
                }
                (Action::Unmount, _) => {
                    let unmounted = supervisors.unmount(uid, volume).await;
                    unmounted.map_err(|error| (OperationOutcome::Uncertain, error.into()))
                }
                (Action::Mount | Action::Remount, None) => Ok(()),
            };
            let (outcome, error) = match result {
                Ok(()) => (OperationOutcome::Done, None),
                Err((outcome, error)) => (outcome, Some(error)),
            };
            // Fails only while the daemon ends.
            let _ = end_sender.send(EndedOperation { operation, span, started, outcome, error });
        };
        tokio::spawn(run.instrument(task_span));
    }

    pub(super) fn take_end(&mut self, EndedOperation { operation, span, started, outcome, error }: EndedOperation) {
        let _span = span.entered();
        let Operation { id, action } = operation;
        let error = error.map(|error| error.to_string());
        self.touch(&id.pod);
        if let Some(error) = &error {
            warn!("{}", self.event(&id, action, error));
        }
        self.executor.end(&id, error.clone());
        debug!("{id}: {} ends", action.name());
        let plugin = self.plugin(&id);
        self.recorder.operation(&plugin, action.name(), started, error.is_none());
        match action {
            Action::Unmount => {
                self.wanted_since.remove(&id);
                self.actual.unmounted(&id, outcome, error);
            }
            Action::Mount | Action::Remount => self.actual.mounted(&id, outcome, error),
        }
        self.count_mounted(&id);
        self.forget_unmounted();
    }

    /// Records how long the mount of a wanted volume took, once it is mounted.
    pub(super) fn count_mounted(&mut self, id: &VolumeId) {
        let is_mounted = self.actual.volume(id).is_some_and(|volume| volume.mount == MountState::Mounted);
        if is_mounted && let Some(since) = self.wanted_since.remove(id) {
            self.recorder.mounted(&self.plugin(id), since);
        }
    }

    /// Logs a line for debugging. Makes no span if the log does not show it: thousands of volumes may pause at a time.
    pub(super) fn log_detail(&self, id: &VolumeId, detail: &dyn fmt::Display) {
        if enabled!(Level::DEBUG) {
            let _span = self.volume_span(id).entered();
            debug!("{id}: {detail}");
        }
    }

    /// The plugin that serves the volume.
    pub(super) fn plugin(&self, id: &VolumeId) -> String {
        let observed = self.actual.volume(id).and_then(|volume| volume.observed.plugin.clone());
        let wanted = || self.desired.volume(id).map(|volume| volume.plugin.to_owned());
        observed.or_else(wanted).unwrap_or_else(|| "unknown".to_owned())
    }

    /// The failure of an operation, in the kubelet's words.
    fn event(&self, id: &VolumeId, action: Action, error: &str) -> String {
        let operation = match action {
            Action::Mount | Action::Remount => "MountVolume.SetUp",
            Action::Unmount => "UnmountVolume.TearDown",
        };
        let pod = self.pods.get(&id.pod).map(|known| known.pod.pod.identity.to_string());
        let pod = pod.unwrap_or_else(|| id.pod.to_string());
        format!("pod {pod}: {operation} failed for volume {:?} : {error}", id.volume)
    }
}

fn outcome(kind: FailureKind) -> OperationOutcome {
    match kind {
        FailureKind::Final => OperationOutcome::Final,
        FailureKind::Uncertain => OperationOutcome::Uncertain,
        FailureKind::Transient => OperationOutcome::Transient,
    }
}
