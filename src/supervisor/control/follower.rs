//! The client's side of following a pod: receives the status that the pod's supervisor sends after each change.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tokio::task::spawn_blocking;

use super::client::{AskError, SupervisorConnection, understand};
use super::frames::Frames;
use super::protocol::{ControlAnswer, ControlQuestion, Envelope, LONGEST_ANSWER};
use crate::supervisor::run_dir::file_names::CONTROL;
use crate::supervisor::status::PodStatus;

/// A connection on which a supervisor sends its pod's status. Dropping it ends the subscription.
pub struct StatusFollower {
    frames: Frames,
    path: PathBuf,
    /// The process id of the supervisor.
    pid: u32,
}

/// Follows the pod with this run directory. The supervisor sends the first status at once.
///
/// # Errors
/// When no supervisor listens.
pub async fn follow(directory: &Path) -> Result<StatusFollower, AskError> {
    let (directory, path) = (directory.to_owned(), directory.join(CONTROL));
    let asked = spawn_blocking(move || SupervisorConnection::ask(&directory, &ControlQuestion::Follow, None)).await;
    let SupervisorConnection { stream, pid } = asked.expect("a blocking thread that panics ends the process")?;
    let frames = Frames::new(stream).map_err(|cause| AskError::Failed { path: path.clone(), cause })?;
    Ok(StatusFollower { frames, path, pid })
}

impl StatusFollower {
    /// The process id of the supervisor.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Waits for the pod's status after its next change. `None` when the supervisor has ended, or has executed another
    /// version of podfs: then follow the pod again. Cancel-safe.
    ///
    /// # Errors
    /// When the supervisor refuses, or podfs does not understand its message.
    pub async fn next(&mut self) -> Result<Option<PodStatus>, AskError> {
        let pid = self.pid;
        let message = match self.frames.next(LONGEST_ANSWER).await {
            Ok(Some(message)) => message,
            Ok(None) => return Ok(None),
            Err(error) if error.kind() == ErrorKind::InvalidData => {
                return Err(AskError::InvalidAnswer { pid, reason: error.to_string() });
            }
            Err(cause) => return Err(AskError::Failed { path: self.path.clone(), cause }),
        };
        let invalid_answer = |error: serde_json::Error| AskError::InvalidAnswer { pid, reason: error.to_string() };
        let Envelope { version, message, .. }: Envelope<Value> =
            serde_json::from_slice(&message).map_err(invalid_answer)?;
        match understand(pid, version, message)? {
            ControlAnswer::Status(status) => Ok(Some(*status)),
            ControlAnswer::Refused(reason) | ControlAnswer::Busy(reason) => Err(AskError::Refused { pid, reason }),
            _ => Err(AskError::InvalidAnswer { pid, reason: "it is an answer to another question".to_owned() }),
        }
    }
}
