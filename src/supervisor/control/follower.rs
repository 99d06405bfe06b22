//! Following a pod: its supervisor sends the status after each change.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::task::spawn_blocking;

use super::client::{AskError, Asked, understand};
use super::protocol::{Answer, Envelope, LONGEST_ANSWER, Question};
use crate::supervisor::run_dir::claim::CONTROL;
use crate::supervisor::status::PodStatus;

/// A connection on which a supervisor sends its pod's status. Closing it ends that.
pub struct Follower {
    stream: UnixStream,
    path: PathBuf,
    /// The supervisor.
    pid: u32,
    /// What has come of the next frame.
    received: Vec<u8>,
}

/// Follows the pod with this run directory. The first status comes at once.
///
/// # Errors
/// When no supervisor listens.
pub async fn follow(directory: &Path) -> Result<Follower, AskError> {
    let (directory, path) = (directory.to_owned(), directory.join(CONTROL));
    let asked = spawn_blocking(move || Asked::ask(&directory, &Question::Follow, None)).await;
    let Asked { stream, pid } = asked.expect("a blocking thread that panics ends the process")?;
    let stream = stream.set_nonblocking(true).and_then(|()| UnixStream::from_std(stream));
    let stream = stream.map_err(|cause| AskError::Failed { path: path.clone(), cause })?;
    Ok(Follower { stream, path, pid, received: Vec::new() })
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
        loop {
            if let Some(frame) = self.take_frame()? {
                let nonsense = |error: serde_json::Error| AskError::Nonsense { pid, reason: error.to_string() };
                let Envelope { version, message }: Envelope<Value> =
                    serde_json::from_slice(&frame).map_err(nonsense)?;
                return match understand(pid, version, message)? {
                    Answer::Status(status) => Ok(Some(*status)),
                    Answer::Refused(reason) | Answer::Busy(reason) => Err(AskError::Refused { pid, reason }),
                    _ => Err(AskError::Nonsense { pid, reason: "it is an answer to another question".to_owned() }),
                };
            }
            match self.stream.read_buf(&mut self.received).await {
                Ok(0) => return Ok(None),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(None),
                Err(cause) => return Err(AskError::Failed { path: self.path.clone(), cause }),
            }
        }
    }

    /// The next frame, once all of it has come.
    fn take_frame(&mut self) -> Result<Option<Vec<u8>>, AskError> {
        let Some((length, rest)) = self.received.split_first_chunk::<4>() else { return Ok(None) };
        let length = u32::from_ne_bytes(*length) as usize;
        if length > LONGEST_ANSWER {
            return Err(AskError::Nonsense { pid: self.pid, reason: "its answer is too long".to_owned() });
        }
        let Some(frame) = rest.get(..length).map(<[u8]>::to_vec) else { return Ok(None) };
        self.received.drain(..4 + length);
        if self.received.is_empty() {
            // Between two changes may lie hours.
            self.received = Vec::new();
        }
        Ok(Some(frame))
    }
}
