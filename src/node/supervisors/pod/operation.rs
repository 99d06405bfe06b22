//! What the operations of the executor ask of the task of a pod.

use std::time::Duration;

use tokio::sync::oneshot;

use crate::node::pod::NodePod;
use crate::node::supervisors::{MountFailure, OperationError};

/// What an operation asks for.
pub(in crate::node::supervisors) enum PodOperation {
    /// A volume of the pod is to be served.
    Mount { pod: NodePod, volume: String, limit: Duration, answer: oneshot::Sender<Result<(), MountFailure>> },
    /// The pod is to have its supervisor, also without a volume.
    Serve { pod: NodePod, limit: Duration, answer: oneshot::Sender<Result<(), MountFailure>> },
    /// A volume is not to be served any more.
    Unmount { volume: String, answer: oneshot::Sender<Result<(), OperationError>> },
    /// Nothing of the pod is to be left.
    End(oneshot::Sender<Result<(), OperationError>>),
    /// The pod is described anew.
    Update(NodePod),
    /// To record whether an agent has released the pod.
    Released(bool, oneshot::Sender<Result<(), OperationError>>),
    /// To look whether there is a supervisor.
    Adopt,
    /// Files of the pod are missing in the run directory.
    Restore,
}
