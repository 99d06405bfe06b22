//! The handle of the manager for the service: it reads the published state and sends commands.

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot, watch};

use super::state::NodeState;
use crate::manifest::pod::PodUid;

/// Reads the manager's state and sends it commands. Cheap to clone.
#[derive(Clone, Debug)]
pub struct NodeHandle {
    state: watch::Receiver<Arc<NodeState>>,
    commands: mpsc::Sender<ManagerCommand>,
}

/// A command for the manager.
#[derive(Debug)]
pub enum ManagerCommand {
    /// Look at the pod's volumes again, as the kubelet's `ReprocessPod`.
    Reprocess(PodUid),
    /// Refresh all volumes of the pod now (`MarkRemountRequired`).
    RemountRequired(PodUid),
    /// The pod's containers have stopped and do not start again: the manager may unmount its volumes.
    Release(PodUid, oneshot::Sender<Result<(), CommandError>>),
}

/// Why the manager refused a command.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommandError {
    /// The node has no such pod.
    #[error("pod {0}: this node does not have it")]
    Unknown(String),
    /// The pod's source wants it to run.
    #[error(
        "pod {0} is to run on this node: delete it first, or wait until its phase is Succeeded or Failed; then release it"
    )]
    Wanted(String),
    /// The pod's source may want it to run.
    #[error(
        "pod {0}: its source has not listed its pods yet; release it when podfs node status does not show it as unknown"
    )]
    Unlisted(String),
    /// The daemon ends.
    #[error("podfs node ends; ask again when it has started")]
    Ending,
}

impl NodeHandle {
    /// A handle of the manager that publishes its state to `state`, and receives what is sent to `commands`.
    pub fn new(state: watch::Receiver<Arc<NodeState>>, commands: mpsc::Sender<ManagerCommand>) -> NodeHandle {
        NodeHandle { state, commands }
    }

    /// The state at this moment.
    pub fn state(&self) -> Arc<NodeState> {
        Arc::clone(&self.state.borrow())
    }

    /// A receiver of all later states. A slow reader gets only the last one.
    pub fn follow(&self) -> watch::Receiver<Arc<NodeState>> {
        self.state.clone()
    }

    /// Asks the manager to look at the pod's volumes again.
    ///
    /// # Errors
    /// When the daemon ends.
    pub async fn reprocess(&self, pod: PodUid) -> Result<(), CommandError> {
        self.send(ManagerCommand::Reprocess(pod)).await
    }

    /// Asks the manager to refresh all volumes of the pod now.
    ///
    /// # Errors
    /// When the daemon ends.
    pub async fn mark_remount_required(&self, pod: PodUid) -> Result<(), CommandError> {
        self.send(ManagerCommand::RemountRequired(pod)).await
    }

    /// Reports that the pod's containers have stopped.
    ///
    /// # Errors
    /// When the node does not have the pod, when its source wants it to run or has not listed its pods yet, and when the daemon
    /// ends.
    pub async fn release(&self, pod: PodUid) -> Result<(), CommandError> {
        let (answer, answered) = oneshot::channel();
        self.send(ManagerCommand::Release(pod, answer)).await?;
        answered.await.unwrap_or(Err(CommandError::Ending))
    }

    async fn send(&self, command: ManagerCommand) -> Result<(), CommandError> {
        self.commands.send(command).await.map_err(|_| CommandError::Ending)
    }
}
