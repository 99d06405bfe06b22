//! Requests to the supervisor of a pod.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use tokio::time::timeout;

use super::{OperationError, blocking};
use crate::source::{Push, PushCounts};
use crate::supervisor::control::{
    self, AskError, ControlAnswer, ControlQuestion, Publish, PushConnection, StatusFollower, VolumeNames,
};
use crate::supervisor::run_dir::file_names::{CONTROL, LOCK, SERVER};
use crate::supervisor::status::PodStatus;

/// How long a supervisor may take to send its first status.
const FIRST_STATUS_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a supervisor may take to begin with a request.
const START_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a supervisor may take to unmount volumes: it also deletes the content of emptyDirs.
const UNPUBLISH_TIMEOUT: Duration = Duration::from_secs(300);

/// Follows the status of a pod.
pub(super) struct StatusWatch {
    follower: StatusFollower,
    first: Option<Box<PodStatus>>,
}

impl StatusWatch {
    /// Waits for the status at this moment. A supervisor that starts accepts objects before it sends its first status.
    ///
    /// # Errors
    /// When the supervisor sends no status.
    pub(super) async fn begin(mut follower: StatusFollower) -> Result<StatusWatch, AskError> {
        let silent = |reason: &str| AskError::Silent { pid: follower.pid(), reason: reason.to_owned() };
        let (no_status, closed) = (silent("it sent no status of the pod"), silent("it closed the connection"));
        match timeout(FIRST_STATUS_TIMEOUT, follower.next()).await {
            Ok(Ok(Some(status))) => Ok(StatusWatch { follower, first: Some(Box::new(status)) }),
            Ok(Ok(None)) => Err(closed),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(no_status),
        }
    }

    /// The status after its next change; `None` when the supervisor has ended. Cancel-safe.
    ///
    /// # Errors
    /// When the supervisor's message cannot be parsed.
    pub(super) async fn next(&mut self) -> Result<Option<Box<PodStatus>>, AskError> {
        match self.first.take() {
            Some(status) => Ok(Some(status)),
            None => self.follower.next().await.map(|status| status.map(Box::new)),
        }
    }
}

/// Whether a file is missing that the supervisor of the pod with this run directory makes.
pub(super) fn misses_files(directory: &Path) -> bool {
    [LOCK, CONTROL, SERVER].iter().any(|name| directory.join(name).symlink_metadata().is_err())
}

/// The connection for pushes of objects to the supervisor of a pod. The first push opens it.
pub struct PushPath {
    directory: PathBuf,
    connection: Option<PushConnection>,
}

/// Why a supervisor did not take objects.
pub struct PushFailure {
    /// The reason, a sentence.
    pub reason: String,
    /// Whether the supervisor had taken earlier pushes on the same connection, and the connection has ended since:
    /// another supervisor may listen already.
    pub is_replaced: bool,
}

impl PushPath {
    /// The connection to the supervisor of the pod with this run directory, not opened yet.
    pub(super) fn new(directory: PathBuf) -> Self {
        Self { directory, connection: None }
    }

    /// Sends objects to the supervisor.
    ///
    /// # Errors
    /// When it does not answer, or refuses them.
    pub async fn push(&mut self, push: Push) -> Result<PushCounts, PushFailure> {
        let before = self.connection.take();
        let was_connected = before.is_some();
        let failure = |error: AskError| PushFailure {
            is_replaced: was_connected && matches!(error, AskError::Silent { .. }),
            reason: error.to_string(),
        };
        let mut connection = match before {
            Some(connection) => connection,
            None => PushConnection::open(&self.directory).await.map_err(failure)?,
        };
        let taken = connection.push(push, START_TIMEOUT).await.map_err(failure)?;
        self.connection = Some(connection);
        Ok(taken)
    }
}

/// Connects to the supervisor that listens in the pod's run directory.
///
/// # Errors
/// When no supervisor listens.
pub(super) async fn connect(directory: &Path) -> Result<StatusFollower, AskError> {
    control::follow(directory).await
}

/// Publishes volumes to the supervisor, besides those that it serves.
///
/// # Errors
/// When it does not answer, or refuses.
pub(super) async fn publish(directory: &Path, manifest: Value) -> Result<(), OperationError> {
    match ask(directory, ControlQuestion::Publish(Publish { manifest }), START_TIMEOUT).await? {
        ControlAnswer::Published(_) => Ok(()),
        answer => Err(refusal(answer)),
    }
}

/// Makes the supervisor unmount volumes, and delete what ends with them. It may already have unmounted some of them.
///
/// # Errors
/// When it does not answer, or a part of the volumes stays.
pub(super) async fn unpublish(directory: &Path, mut volumes: Vec<String>) -> Result<(), OperationError> {
    match ask(directory, ControlQuestion::Status, START_TIMEOUT).await? {
        ControlAnswer::Status(status) => {
            volumes.retain(|name| status.volumes.iter().any(|volume| volume.name == *name))
        }
        answer => return Err(refusal(answer)),
    }
    if volumes.is_empty() {
        return Ok(());
    }
    match ask(directory, ControlQuestion::Unpublish(VolumeNames { volumes }), UNPUBLISH_TIMEOUT).await? {
        ControlAnswer::Unpublished(_) => Ok(()),
        answer => Err(refusal(answer)),
    }
}

/// Makes the supervisor refresh volumes.
///
/// # Errors
/// When it does not answer, or does not have them.
pub(super) async fn remount(directory: &Path, volumes: Vec<String>) -> Result<(), OperationError> {
    match ask(directory, ControlQuestion::Remount(VolumeNames { volumes }), START_TIMEOUT).await? {
        ControlAnswer::Remounting(_) => Ok(()),
        answer => Err(refusal(answer)),
    }
}

fn refusal(answer: ControlAnswer) -> OperationError {
    match answer {
        ControlAnswer::Refused(reason) | ControlAnswer::Busy(reason) => OperationError::Refused(reason),
        _ => OperationError::OtherAnswer,
    }
}

async fn ask(directory: &Path, question: ControlQuestion, limit: Duration) -> Result<ControlAnswer, OperationError> {
    let directory = directory.to_owned();
    Ok(blocking(move || control::ask_within(&directory, &question, limit)).await?)
}
