//! A client of a supervisor's control socket. It waits a few seconds for a supervisor that does not answer.

use std::io::{self, ErrorKind};
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::socket::sockopt::{PeerCredentials, ReceiveTimeout, SendTimeout};
use nix::sys::socket::{getsockopt, setsockopt};
use nix::sys::time::TimeVal;
use podfs_fuse::protocol::receive_at_most;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::Value;

use super::protocol::{
    ControlAnswer, ControlQuestion, Envelope, LONGEST_ANSWER, PROTOCOL, TIMEOUT, Upgrade, send_message,
};
use crate::supervisor::run_dir::file_names::CONTROL;
use crate::supervisor::run_dir::record::PodLockRecord;
use crate::supervisor::run_dir::socket;

/// Why a supervisor gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// No process listens.
    #[error("no supervisor listens on {}", .0.display())]
    NotListening(PathBuf),
    /// A process listens, but does not answer in time, or closes the connection.
    #[error("the supervisor (pid {pid}) does not answer: {reason}")]
    Silent {
        /// The process that listens.
        pid: u32,
        /// What happened instead.
        reason: String,
    },
    /// The listening process is no supervisor, or a supervisor of another version.
    #[error("podfs does not understand the answer of pid {pid}: {reason}")]
    InvalidAnswer {
        /// The process that listens.
        pid: u32,
        /// The problem with the answer.
        reason: String,
    },
    /// The question is longer than a supervisor takes.
    #[error("the objects are {length} bytes long, and a supervisor takes at most {longest}; make them smaller")]
    TooLong {
        /// The length of the question in bytes.
        length: usize,
        /// The limit in bytes.
        longest: usize,
    },
    /// The listening process belongs to another user.
    #[error(
        "uid {uid} listens on {}, not podfs; nothing was sent to it; find out which process has made the socket, and remove it",
        .path.display()
    )]
    OtherUser {
        /// The socket.
        path: PathBuf,
        /// The user of the listening process.
        uid: u32,
    },
    /// The supervisor refuses the request.
    #[error("the supervisor (pid {pid}) refuses: {reason}")]
    Refused {
        /// The process that listens.
        pid: u32,
        /// The supervisor's reason.
        reason: String,
    },
    /// The socket cannot be used.
    #[error("cannot ask on {}: {cause}", .path.display())]
    Failed {
        /// The socket.
        path: PathBuf,
        /// The error of the system call.
        #[source]
        cause: io::Error,
    },
}

/// Asks the supervisor of the pod with this run directory, and sends it `pipe` with the question.
///
/// # Errors
/// When there is no answer within a few seconds.
pub fn ask(
    directory: &Path,
    question: &ControlQuestion,
    pipe: Option<BorrowedFd<'_>>,
) -> Result<ControlAnswer, AskError> {
    SupervisorConnection::ask(directory, question, pipe)?.answer(TIMEOUT)
}

/// Asks the supervisor of the pod with this run directory, and waits at most `limit`. Some answers take long, for
/// example when the supervisor has to delete the content of a large emptyDir.
///
/// # Errors
/// When there is no answer within `limit`.
pub fn ask_within(directory: &Path, question: &ControlQuestion, limit: Duration) -> Result<ControlAnswer, AskError> {
    SupervisorConnection::ask(directory, question, None)?.answer(limit)
}

/// Asks the supervisor of the pod with this run directory for an upgrade. Calls `started` when the upgrade begins, and once `waits`
/// with its process id if it is silent for a while. Returns the outcome, which is never [`Upgrade::Started`].
///
/// # Errors
/// When the supervisor gives no outcome within `limit`.
pub fn ask_for_upgrade(
    directory: &Path,
    limit: Duration,
    mut started: impl FnMut(),
    waits: impl FnOnce(u32),
) -> Result<Upgrade, AskError> {
    let until = Instant::now() + limit;
    let connection = SupervisorConnection::ask(directory, &ControlQuestion::Upgrade, None)?;
    let mut waits = Some(waits);
    loop {
        if !connection.has_answer_within(TIMEOUT)
            && let Some(waits) = waits.take()
        {
            waits(connection.pid);
        }
        match connection.answer_until(until, limit)? {
            ControlAnswer::Upgrade(Upgrade::Started) => started(),
            ControlAnswer::Upgrade(outcome) => return Ok(outcome),
            ControlAnswer::Refused(reason) | ControlAnswer::Busy(reason) => return Ok(Upgrade::Refused { reason }),
            other => return Err(connection.invalid_answer(format!("it is an answer to another question: {other:?}"))),
        }
    }
}

/// A client's connection to a supervisor.
pub(super) struct SupervisorConnection {
    pub(super) stream: UnixStream,
    /// The process that listens.
    pub(super) pid: u32,
}

impl SupervisorConnection {
    /// Connects to the supervisor of the pod with this run directory, and sends it a question, with `pipe` if there is
    /// one.
    pub(super) fn ask(
        directory: &Path,
        question: &ControlQuestion,
        pipe: Option<BorrowedFd<'_>>,
    ) -> Result<SupervisorConnection, AskError> {
        let connection = Self::connect(directory)?;
        send_message(&connection.stream, question, pipe).map_err(|cause| connection.silent(&cause, TIMEOUT))?;
        Ok(connection)
    }

    /// Connects to a supervisor that runs as root or as this user.
    pub(super) fn connect(directory: &Path) -> Result<SupervisorConnection, AskError> {
        let path = directory.join(CONTROL);
        let stream = match connect(directory, CONTROL) {
            Ok(stream) => stream,
            Err(cause) if matches!(cause.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => {
                return Err(AskError::NotListening(path));
            }
            // The queue of the socket is full: the supervisor accepts no connections.
            Err(cause) if cause.kind() == ErrorKind::WouldBlock => {
                let pid = PodLockRecord::read(directory).map_or(0, |record| record.pid);
                return Err(AskError::Silent { pid, reason: "it accepts no connections".to_owned() });
            }
            Err(cause) => return Err(AskError::Failed { path, cause }),
        };
        // A question may hold Secrets.
        if let Some(uid) = peer_user(&stream).filter(|uid| *uid != 0 && *uid != rustix::process::geteuid().as_raw()) {
            return Err(AskError::OtherUser { path, uid });
        }
        Ok(SupervisorConnection { pid: peer(&stream).unwrap_or_default(), stream })
    }

    /// Waits at most this long for the beginning of an answer, or the end of the connection.
    fn has_answer_within(&self, limit: Duration) -> bool {
        let mut readable = [PollFd::new(&self.stream, PollFlags::IN)];
        let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        poll(&mut readable, Some(&limit)) != Ok(0)
    }

    /// Waits at most `limit` for the next answer.
    fn answer(&self, limit: Duration) -> Result<ControlAnswer, AskError> {
        self.answer_until(Instant::now() + limit, limit)
    }

    /// Waits for the next answer until `until`, which is `limit` after the question.
    fn answer_until(&self, until: Instant, limit: Duration) -> Result<ControlAnswer, AskError> {
        let silent = |cause| self.silent(&cause, limit);
        let remaining = until.saturating_duration_since(Instant::now());
        // The kernel takes a timeout of zero as no timeout at all (`SO_RCVTIMEO`).
        self.stream.set_read_timeout(Some(remaining.max(Duration::from_millis(1)))).map_err(silent)?;
        let answer = receive_at_most::<Envelope<Value>>(&self.stream, LONGEST_ANSWER).map_err(silent)?;
        let Some((Envelope { version, message, .. }, _)) = answer else {
            let reason = "it closed the connection; it may be busy, try again".to_owned();
            return Err(AskError::Silent { pid: self.pid, reason });
        };
        understand(self.pid, version, message)
    }

    /// The error about an answer that did not come.
    fn silent(&self, cause: &io::Error, limit: Duration) -> AskError {
        let pid = self.pid;
        match cause.kind() {
            ErrorKind::InvalidData => self.invalid_answer(cause.to_string()),
            ErrorKind::WouldBlock => {
                AskError::Silent { pid, reason: format!("nothing came within {} s", limit.as_secs()) }
            }
            _ => AskError::Silent { pid, reason: cause.to_string() },
        }
    }

    fn invalid_answer(&self, reason: String) -> AskError {
        AskError::InvalidAnswer { pid: self.pid, reason }
    }
}

/// Parses the answer in an envelope.
///
/// # Errors
/// When the envelope is of another protocol version, or holds no answer.
pub(super) fn understand(pid: u32, version: u32, message: Value) -> Result<ControlAnswer, AskError> {
    if version != PROTOCOL {
        let reason = format!("it speaks version {version} of the control protocol, this podfs version {PROTOCOL}");
        return Err(AskError::InvalidAnswer { pid, reason });
    }
    serde_json::from_value(message).map_err(|error| AskError::InvalidAnswer { pid, reason: error.to_string() })
}

/// Connects to a socket in this directory. System calls on the connection fail after two seconds (`TIMEOUT`).
///
/// # Errors
/// When no process listens, or the socket cannot be used.
pub fn connect(directory: &Path, name: &str) -> io::Result<UnixStream> {
    let stream = socket::stream()?;
    // If the listening process does not accept, connect(2) waits for room in the listener's queue. This limits the
    // wait.
    let limit = TimeVal::new(TIMEOUT.as_secs() as i64, 0);
    setsockopt(&stream, SendTimeout, &limit)?;
    setsockopt(&stream, ReceiveTimeout, &limit)?;
    socket::connect_to(&stream, directory, name)?;
    Ok(UnixStream::from(stream))
}

/// The pid of the process that called listen(2) at the other end (`SO_PEERCRED`), whichever process has made the
/// socket's file.
pub fn peer(stream: &UnixStream) -> Option<u32> {
    getsockopt(stream, PeerCredentials).ok().and_then(|peer| u32::try_from(peer.pid()).ok())
}

/// The uid of the process that called listen(2) at the other end (`SO_PEERCRED`).
pub(crate) fn peer_user(stream: &UnixStream) -> Option<u32> {
    getsockopt(stream, PeerCredentials).ok().map(|peer| peer.uid())
}
