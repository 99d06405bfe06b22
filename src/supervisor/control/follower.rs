//! Following a pod: its supervisor sends the status after each change.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tokio::task::spawn_blocking;

use super::client::{AskError, Asked, understand};
use super::frames::Frames;
use super::protocol::{ControlAnswer, ControlQuestion, Envelope, LONGEST_ANSWER};
use crate::supervisor::run_dir::claim::CONTROL;
use crate::supervisor::status::PodStatus;

/// A connection on which a supervisor sends its pod's status. Closing it ends that.
pub struct Follower {
    frames: Frames,
    path: PathBuf,
    /// The supervisor.
    pid: u32,
}

/// Follows the pod with this run directory. The first status comes at once.
///
/// # Errors
/// When no supervisor listens.
pub async fn follow(directory: &Path) -> Result<Follower, AskError> {
    let (directory, path) = (directory.to_owned(), directory.join(CONTROL));
    let asked = spawn_blocking(move || Asked::ask(&directory, &ControlQuestion::Follow, None)).await;
    let Asked { stream, pid } = asked.expect("a blocking thread that panics ends the process")?;
    let frames = Frames::new(stream).map_err(|cause| AskError::Failed { path: path.clone(), cause })?;
    Ok(Follower { frames, path, pid })
}

impl Follower {
    /// The supervisor.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// How the pod is after its next change; `None` when the supervisor has ended, or becomes another version of podfs: then
    /// follow the pod again. Cancel-safe.
    ///
    /// # Errors
    /// When the supervisor does not let the pod be followed, or what it says cannot be understood.
    pub async fn next(&mut self) -> Result<Option<PodStatus>, AskError> {
        let pid = self.pid;
        let message = match self.frames.next(LONGEST_ANSWER).await {
            Ok(Some(message)) => message,
            Ok(None) => return Ok(None),
            Err(error) if error.kind() == ErrorKind::InvalidData => {
                return Err(AskError::Nonsense { pid, reason: error.to_string() });
            }
            Err(cause) => return Err(AskError::Failed { path: self.path.clone(), cause }),
        };
        let nonsense = |error: serde_json::Error| AskError::Nonsense { pid, reason: error.to_string() };
        let Envelope { version, message, .. }: Envelope<Value> = serde_json::from_slice(&message).map_err(nonsense)?;
        match understand(pid, version, message)? {
            ControlAnswer::Status(status) => Ok(Some(*status)),
            ControlAnswer::Refused(reason) | ControlAnswer::Busy(reason) => Err(AskError::Refused { pid, reason }),
            _ => Err(AskError::Nonsense { pid, reason: "it is an answer to another question".to_owned() }),
        }
    }
}
