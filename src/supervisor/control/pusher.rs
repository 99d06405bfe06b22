//! The client's side of pushes: sends objects to a supervisor, on one connection.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use podfs_fuse::protocol::frame;
use serde_json::Value;
use tokio::io::AsyncWriteExt;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::client::{AskError, SupervisorConnection, understand};
use super::frames::Frames;
use super::protocol::{ControlAnswer, ControlQuestion, Envelope, LONGEST_ANSWER, LONGEST_PUSH, PROTOCOL};
use crate::source::{Push, PushCounts};
use crate::supervisor::run_dir::file_names::CONTROL;

/// A connection on which this process sends objects to a supervisor.
pub struct PushConnection {
    frames: Frames,
    path: PathBuf,
    /// The process id of the supervisor.
    pid: u32,
}

impl PushConnection {
    /// Connects to the supervisor of the pod with this run directory.
    ///
    /// # Errors
    /// When no supervisor listens.
    pub async fn open(directory: &Path) -> Result<PushConnection, AskError> {
        let (directory, path) = (directory.to_owned(), directory.join(CONTROL));
        let connected = spawn_blocking(move || SupervisorConnection::connect(&directory)).await;
        let SupervisorConnection { stream, pid } =
            connected.expect("a blocking thread that panics ends the process")?;
        let frames = Frames::new(stream).map_err(|cause| AskError::Failed { path: path.clone(), cause })?;
        Ok(PushConnection { frames, path, pid })
    }

    /// Sends objects to the supervisor. After an error, open another connection.
    ///
    /// # Errors
    /// When the objects are too long, or the supervisor refuses them, does not answer within `limit`, or has closed the connection. A
    /// supervisor of an older podfs closes the connection after one push, and an upgrade closes all connections.
    pub async fn push(&mut self, push: Push, limit: Duration) -> Result<PushCounts, AskError> {
        let pid = self.pid;
        let silent = |reason: &str| AskError::Silent { pid, reason: reason.to_owned() };
        let message = ControlQuestion::Push(push);
        let question = frame(&Envelope { version: PROTOCOL, message: &message, stays: true });
        let question = question.map_err(|error| silent(&error.to_string()))?;
        let length = question.len();
        if length > LONGEST_PUSH {
            return Err(AskError::TooLong { length, longest: LONGEST_PUSH });
        }
        let answered = timeout(limit, async {
            self.frames.stream.write_all(&question).await?;
            self.frames.next(LONGEST_ANSWER).await
        });
        let answer = match answered.await {
            Ok(Ok(Some(answer))) => answer,
            Ok(Ok(None)) => return Err(silent("it closed the connection")),
            Ok(Err(error)) => return Err(self.failure(error)),
            Err(_) => return Err(silent("nothing came in time")),
        };
        let invalid_answer = |reason: String| AskError::InvalidAnswer { pid, reason };
        let Envelope { version, message, .. }: Envelope<Value> =
            serde_json::from_slice(&answer).map_err(|error| invalid_answer(error.to_string()))?;
        match understand(pid, version, message)? {
            ControlAnswer::Pushed(taken) => Ok(taken),
            ControlAnswer::Refused(reason) | ControlAnswer::Busy(reason) => Err(AskError::Refused { pid, reason }),
            _ => Err(invalid_answer("it is an answer to another question".to_owned())),
        }
    }

    fn failure(&self, cause: io::Error) -> AskError {
        match cause.kind() {
            ErrorKind::InvalidData => AskError::InvalidAnswer { pid: self.pid, reason: cause.to_string() },
            ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => {
                AskError::Silent { pid: self.pid, reason: "it closed the connection".to_owned() }
            }
            _ => AskError::Failed { path: self.path.clone(), cause },
        }
    }
}
