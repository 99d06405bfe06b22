//! Why an operation on a pod does not succeed. Several operations can wait for one result, so its error can be cloned.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use tokio::task::JoinError;

use super::launch::LaunchError;
use crate::manifest::pod::PodUid;
use crate::supervisor::control::AskError;

/// Why the supervisor of a pod does not do what it should, or why leftovers of it stay.
#[derive(Clone, Debug, thiserror::Error)]
pub enum OperationError {
    /// The daemon ends, and answers nothing any more.
    #[error("podfs node ends")]
    DaemonEnds,
    /// The supervisor cannot be started.
    #[error(transparent)]
    Launch(#[from] Arc<LaunchError>),
    /// The pod has a supervisor that the daemon did not start.
    #[error("the pod is served by podfs run (pid {0}), which podfs node did not start; stop that one first")]
    OfPodfsRun(u32),
    /// The supervisor has ended.
    #[error("the supervisor of the pod ended ({end}){}", reason(.failure.as_deref()))]
    Ended {
        /// How it has ended.
        end: String,
        /// Why, in the words of the supervisor.
        failure: Option<String>,
    },
    /// The supervisor has closed the connection.
    #[error("it closed the connection")]
    Closed,
    /// The supervisor does not answer.
    #[error(transparent)]
    Ask(#[from] Arc<AskError>),
    /// The supervisor refuses the request, with this reason.
    #[error("{0}")]
    Refused(String),
    /// The supervisor answers another question.
    #[error("the supervisor answered another question")]
    OtherAnswer,
    /// The task that sent the request to the supervisor has failed.
    #[error(transparent)]
    Task(#[from] Arc<JoinError>),
    /// The volumes of the pod cannot be recorded.
    #[error("cannot record below {} what podfs mounts: {cause}", .directory.display())]
    Write {
        /// The run directory.
        directory: PathBuf,
        /// The error of the system call.
        #[source]
        cause: Arc<io::Error>,
    },
    /// Some leftovers of the supervisor stay.
    #[error("cannot remove all that remains of pod {pod}: {left}")]
    Left {
        /// The pod.
        pod: PodUid,
        /// The leftovers, each with the reason.
        left: String,
    },
    /// podfs cannot look for the leftovers of the supervisor.
    #[error("cannot look for what remains of pod {pod}: {cause}")]
    Clean {
        /// The pod.
        pod: PodUid,
        /// The error of the system call.
        #[source]
        cause: Arc<io::Error>,
    },
    /// The record of the pod stays.
    #[error("cannot remove the checkpoint of pod {pod}: {cause}")]
    Remove {
        /// The pod.
        pod: PodUid,
        /// The error of the system call.
        #[source]
        cause: Arc<io::Error>,
    },
}

fn reason(failure: Option<&str>) -> String {
    failure.map_or_else(|| "; its last log line says why".to_owned(), |words| format!(": {words}"))
}

impl From<LaunchError> for OperationError {
    fn from(error: LaunchError) -> OperationError {
        OperationError::Launch(Arc::new(error))
    }
}

impl From<AskError> for OperationError {
    fn from(error: AskError) -> OperationError {
        OperationError::Ask(Arc::new(error))
    }
}

impl From<JoinError> for OperationError {
    fn from(error: JoinError) -> OperationError {
        OperationError::Task(Arc::new(error))
    }
}
