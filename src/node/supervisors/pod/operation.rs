//! The requests of the executor's operations to the task of a pod.

use std::time::Duration;

use tokio::sync::oneshot;

use crate::node::pod::NodePod;
use crate::node::supervisors::{MountFailure, OperationError};

/// A request to the task of a pod.
pub(in crate::node::supervisors) enum PodOperation {
    /// Serve a volume of the pod.
    Mount { pod: NodePod, volume: String, limit: Duration, answer: oneshot::Sender<Result<(), MountFailure>> },
    /// Keep the pod's supervisor running, even without a volume.
    Serve { pod: NodePod, limit: Duration, answer: oneshot::Sender<Result<(), MountFailure>> },
    /// Stop serving a volume.
    Unmount { volume: String, answer: oneshot::Sender<Result<(), OperationError>> },
    /// Remove everything of the pod.
    End(oneshot::Sender<Result<(), OperationError>>),
    /// Take the changed pod.
    Update(NodePod),
    /// Record whether an agent has released the pod.
    Released(bool, oneshot::Sender<Result<(), OperationError>>),
    /// Follow the supervisor, if there is one.
    Adopt,
    /// Make missing files of the pod in the run directory again.
    Restore,
}
