//! The control socket: `control.sock` in the pod's run directory, on which a person's commands ask the supervisor.
//!
//! A connection is one question and its answer, framed as the messages to the server are
//! ([`podfs_fuse::protocol`]), each in an `Envelope` with the version of this protocol.
//!
//! Whoever connects cannot disturb the supervisor:
//! 1. Only the user it runs as is listened to: by the mode of the socket, and by what the kernel says of the peer.
//! 2. The supervisor's task takes no part. One thread accepts; each client has a thread of its own, which reads the status store.
//! 3. A few clients are served at once. One that is there longer than a question takes is cut off when others come.
//! 4. Only who wishes for an upgrade is handed over to the supervisor's task, one at a time.
//! 5. What the server has to be asked is asked by `Questions`, and sources of the host are looked at by `capacity`. They may not
//!    answer.

use std::io::{self, ErrorKind};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::socket::sockopt::{PeerCredentials, ReceiveTimeout, SendTimeout};
use nix::sys::socket::{Backlog, getsockopt, listen, setsockopt, shutdown};
use nix::sys::time::TimeVal;
use podfs_fuse::protocol::{receive_at_most, send};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::mpsc::Sender;
use tokio::sync::mpsc::error::TrySendError;

use super::claim::CONTROL;
use super::metrics;
use super::questions::Questions;
use super::socket;
use super::status::PodStatus;
use super::status_store::{StatusStore, VERSION};
use crate::metrics::Reading;
use crate::source::{Inbox, Push, Taken};

/// The version of this protocol. Another one is not understood, and says so.
const PROTOCOL: u32 = 1;
/// How long a question may take to arrive, and how long an answer may take to be taken.
const TIMEOUT: Duration = Duration::from_secs(2);
/// How long the server may take to answer. Whoever asks for a status waits two seconds.
const SERVER_TIMEOUT: Duration = Duration::from_millis(500);
/// Most clients at once.
const MAX_CLIENTS: usize = 8;
/// Most bytes of a question.
const LONGEST_QUESTION: usize = 16 << 10;
/// Most bytes of a question with objects.
pub const LONGEST_PUSH: usize = 16 << 20;
/// Most bytes of an answer: a few hundred for each volume.
const LONGEST_ANSWER: usize = 16 << 20;

/// What the supervisor is asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Question {
    /// How the pod is.
    Status,
    /// A line per FUSE request on the pipe that comes with this question, until nobody reads it.
    Trace {
        /// The volume's name.
        volume: String,
    },
    /// To go on as the podfs that is on disk now.
    Upgrade,
    /// To take objects.
    Push(Push),
    /// Its metrics.
    Metrics,
}

/// What it answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Answer {
    /// How the pod is.
    Status(Box<PodStatus>),
    /// The lines are written from now on.
    Tracing,
    /// How far an upgrade is.
    Upgrade(Upgrade),
    /// The objects were taken, all of them; this is what is known now.
    Pushed(Taken),
    /// Its metrics at this moment.
    Metrics(Box<Reading>),
    /// It cannot be done, for this reason.
    Refused(String),
    /// It cannot be done at this moment, for this reason.
    Busy(String),
}

/// How far an upgrade is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Upgrade {
    /// The new processes are starting; another answer follows.
    Started,
    /// The pod is served by this version.
    Done {
        /// Its version.
        version: String,
    },
    /// Nothing was tried.
    Refused {
        /// Why.
        reason: String,
    },
    /// The new podfs did not come up; the one before goes on.
    RolledBack {
        /// What went wrong.
        reason: String,
    },
}

#[derive(Serialize, Deserialize)]
struct Envelope<T> {
    version: u32,
    message: T,
}

/// Why a supervisor gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// Nobody listens.
    #[error("no supervisor listens on {}", .0.display())]
    NobodyListens(PathBuf),
    /// Somebody listens, but does not answer in time, or closes the connection.
    #[error("the supervisor (pid {pid}) does not answer: {reason}")]
    Silent {
        /// Who listens.
        pid: u32,
        /// What happened instead.
        reason: String,
    },
    /// What listens is no supervisor, or one of another version.
    #[error("what pid {pid} answers is not understood: {reason}")]
    Nonsense {
        /// Who listens.
        pid: u32,
        /// What is wrong.
        reason: String,
    },
    /// A process that is not root's listens.
    #[error(
        "uid {uid} listens on {}, not podfs; nothing was sent to it; find out who has made the socket, and remove it",
        .path.display()
    )]
    OtherUser {
        /// The socket.
        path: PathBuf,
        /// Whose process it is.
        uid: u32,
    },
    /// The socket cannot be used.
    #[error("cannot ask on {}: {cause}", .path.display())]
    Failed {
        /// The socket.
        path: PathBuf,
        /// What the kernel said.
        cause: io::Error,
    },
}

/// Asks the supervisor of the pod with this run directory. `pipe` goes along with the question.
///
/// # Errors
/// When there is no answer within a few seconds.
pub fn ask(directory: &Path, question: &Question, pipe: Option<BorrowedFd<'_>>) -> Result<Answer, AskError> {
    Asked::ask(directory, question, pipe)?.answer(TIMEOUT)
}

/// Asks the supervisor of the pod with this run directory for an upgrade; `started` is called when it begins. Gives what it
/// came to, which is never [`Upgrade::Started`].
///
/// # Errors
/// When that is not known within `patience`.
pub fn ask_for_upgrade(directory: &Path, patience: Duration, mut started: impl FnMut()) -> Result<Upgrade, AskError> {
    let until = Instant::now() + patience;
    let asked = Asked::ask(directory, &Question::Upgrade, None)?;
    loop {
        match asked.answer(until.saturating_duration_since(Instant::now()))? {
            Answer::Upgrade(Upgrade::Started) => started(),
            Answer::Upgrade(outcome) => return Ok(outcome),
            Answer::Refused(reason) | Answer::Busy(reason) => return Ok(Upgrade::Refused { reason }),
            other => return Err(asked.nonsense(format!("it is an answer to another question: {other:?}"))),
        }
    }
}

/// A question that was asked.
struct Asked {
    stream: UnixStream,
    /// Who listens.
    pid: u32,
}

impl Asked {
    fn ask(directory: &Path, question: &Question, pipe: Option<BorrowedFd<'_>>) -> Result<Asked, AskError> {
        let path = directory.join(CONTROL);
        let stream = match call(directory, CONTROL) {
            Ok(stream) => stream,
            Err(cause) if matches!(cause.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => {
                return Err(AskError::NobodyListens(path));
            }
            Err(cause) => return Err(AskError::Failed { path, cause }),
        };
        // A question may hold Secrets.
        if let Some(uid) = peer_user(&stream).filter(|uid| *uid != 0 && *uid != rustix::process::geteuid().as_raw()) {
            return Err(AskError::OtherUser { path, uid });
        }
        let asked = Asked { pid: peer(&stream).unwrap_or_default(), stream };
        put(&asked.stream, question, pipe).map_err(|cause| asked.silent(&cause, TIMEOUT))?;
        Ok(asked)
    }

    /// The next answer.
    fn answer(&self, patience: Duration) -> Result<Answer, AskError> {
        let silent = |cause| self.silent(&cause, patience);
        // No time at all would mean that there is no limit.
        self.stream.set_read_timeout(Some(patience.max(Duration::from_millis(1)))).map_err(silent)?;
        let answer = receive_at_most::<Envelope<Value>>(&self.stream, LONGEST_ANSWER).map_err(silent)?;
        let Some((Envelope { version, message }, _)) = answer else {
            let reason = "it closed the connection; it may be busy, try again".to_owned();
            return Err(AskError::Silent { pid: self.pid, reason });
        };
        if version != PROTOCOL {
            return Err(self.nonsense(format!(
                "it speaks version {version} of the control protocol, this podfs version {PROTOCOL}"
            )));
        }
        serde_json::from_value(message).map_err(|error| self.nonsense(error.to_string()))
    }

    fn silent(&self, cause: &io::Error, patience: Duration) -> AskError {
        let pid = self.pid;
        match cause.kind() {
            ErrorKind::InvalidData => self.nonsense(cause.to_string()),
            ErrorKind::WouldBlock => {
                AskError::Silent { pid, reason: format!("nothing came within {} s", patience.as_secs()) }
            }
            _ => AskError::Silent { pid, reason: cause.to_string() },
        }
    }

    fn nonsense(&self, reason: String) -> AskError {
        AskError::Nonsense { pid: self.pid, reason }
    }
}

/// Connects to a socket in this directory; calls on it end after a few seconds.
///
/// # Errors
/// When nobody listens, or the socket cannot be used.
pub fn call(directory: &Path, name: &str) -> io::Result<UnixStream> {
    let stream = socket::stream()?;
    // Connecting waits for room in the queue of one that does not accept.
    let patience = TimeVal::new(TIMEOUT.as_secs() as i64, 0);
    setsockopt(&stream, SendTimeout, &patience)?;
    setsockopt(&stream, ReceiveTimeout, &patience)?;
    socket::connect_to(&stream, directory, name)?;
    Ok(UnixStream::from(stream))
}

/// The process that began to listen at the other end, whatever the file system says of it.
pub fn peer(stream: &UnixStream) -> Option<u32> {
    getsockopt(stream, PeerCredentials).ok().and_then(|peer| u32::try_from(peer.pid()).ok())
}

/// The user whose process began to listen at the other end.
fn peer_user(stream: &UnixStream) -> Option<u32> {
    getsockopt(stream, PeerCredentials).ok().map(|peer| peer.uid())
}

/// Somebody who wishes for an upgrade, and waits to hear how it goes.
#[derive(Debug)]
pub struct Upgrading {
    connection: UnixStream,
}

impl Upgrading {
    /// The connection that the program before this one left open under this number, for this one to go on with.
    ///
    /// # Errors
    /// When there is none.
    ///
    /// # Safety
    /// Nothing else in this process may own the descriptor.
    pub unsafe fn inherited(number: RawFd) -> io::Result<Upgrading> {
        // SAFETY: it is nobody else's, says the caller.
        let connection = UnixStream::from(unsafe { super::upgrade::inherited(number) }?);
        getsockopt(&connection, PeerCredentials)?;
        Ok(Upgrading { connection })
    }

    /// Tells how far the upgrade is. Whoever asked may have gone; that changes nothing.
    pub fn answer(&self, upgrade: &Upgrade) {
        let _ = put(&self.connection, &Answer::Upgrade(upgrade.clone()), None);
    }
}

/// The way to leave it open for the next program.
impl AsFd for Upgrading {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}

/// The socket of a supervisor. Dropping it ends the answers; the file goes with the claim on the pod.
pub struct Control {
    listener: UnixListener,
}

impl Control {
    /// Answers in this directory, which the caller has claimed, from `store`; those who wish for an upgrade
    /// are handed over to `upgrades`. Objects can be pushed where there is an `inbox`. What a supervisor that was killed
    /// has left in the place of the socket is replaced.
    ///
    /// # Errors
    /// When the socket cannot be made, or no thread can be started.
    pub(super) fn open(
        directory: &Path,
        store: StatusStore,
        inbox: Option<Inbox>,
        upgrades: Sender<Upgrading>,
    ) -> io::Result<Control> {
        let listener = socket::make(directory, CONTROL)?;
        listen(&listener, Backlog::new(MAX_CLIENTS as i32)?)?;
        let listener = UnixListener::from(listener);
        let accepting = listener.try_clone()?;
        let reception = Reception {
            desk: Arc::new(Desk { store, questions: Questions::default(), inbox, upgrades }),
            clients: Vec::new(),
        };
        thread::Builder::new().name("control".to_owned()).spawn(move || reception.serve(&accepting))?;
        Ok(Control { listener })
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        // Whoever waits in accept(2) wakes and ends.
        let _ = shutdown(self.listener.as_raw_fd(), nix::sys::socket::Shutdown::Both);
    }
}

/// Who accepts.
struct Reception {
    desk: Arc<Desk>,
    clients: Vec<Client>,
}

/// What all clients are answered from.
struct Desk {
    store: StatusStore,
    questions: Questions,
    inbox: Option<Inbox>,
    upgrades: Sender<Upgrading>,
}

/// Somebody who is being answered. Their thread holds the stream, too, until it is done.
struct Client {
    since: Instant,
    stream: Arc<UnixStream>,
}

impl Reception {
    fn serve(mut self, listener: &UnixListener) {
        loop {
            match listener.accept() {
                Ok((stream, _)) => self.receive(stream),
                // The listener was shut down.
                Err(error) if error.kind() == ErrorKind::InvalidInput => return,
                // Too many open files, perhaps: the client waits in the queue.
                Err(_) => thread::sleep(Duration::from_millis(100)),
            }
        }
    }

    fn receive(&mut self, stream: UnixStream) {
        self.clients.retain(|client| Arc::strong_count(&client.stream) > 1);
        let (late, present): (Vec<_>, Vec<_>) =
            self.clients.iter().partition(|client| client.since.elapsed() > TIMEOUT + SERVER_TIMEOUT);
        late.iter().for_each(|client| drop(client.stream.shutdown(Shutdown::Both)));
        if present.len() >= MAX_CLIENTS || !is_of_this_user(&stream) {
            return;
        }
        let client = Client { since: Instant::now(), stream: Arc::new(stream) };
        let (desk, stream) = (Arc::clone(&self.desk), Arc::clone(&client.stream));
        let thread = thread::Builder::new().name("control-client".to_owned());
        let started = thread.spawn(move || {
            // A client who went away, or whose question is none, is not told.
            if serve(&stream, &desk).unwrap_or(Attention::Over) == Attention::Over {
                let _ = stream.shutdown(Shutdown::Both);
            }
        });
        if started.is_ok() {
            self.clients.push(client);
        }
    }
}

fn is_of_this_user(stream: &UnixStream) -> bool {
    getsockopt(stream, PeerCredentials).is_ok_and(|peer| peer.uid() == rustix::process::geteuid().as_raw())
}

/// Whether a client has what it came for.
#[derive(PartialEq, Eq)]
enum Attention {
    /// It has.
    Over,
    /// The supervisor's task answers it.
    HandedOver,
}

fn serve(stream: &UnixStream, desk: &Desk) -> io::Result<Attention> {
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    let asked = receive_at_most::<Envelope<Value>>(stream, desk.longest_question())?;
    let Some((Envelope { version, message }, mut descriptors)) = asked else { return Ok(Attention::Over) };
    let answer = match serde_json::from_value(message) {
        Ok(question) if version == PROTOCOL => match question {
            Question::Status => Answer::Status(Box::new(desk.store.status())),
            Question::Trace { volume } => desk.trace(&volume, descriptors.pop()),
            Question::Push(push) => desk.push(push),
            Question::Metrics => Answer::Metrics(Box::new(metrics::read(&desk.store))),
            Question::Upgrade => match desk.hand_over(stream)? {
                Ok(()) => return Ok(Attention::HandedOver),
                Err(reason) => Answer::Upgrade(Upgrade::Refused { reason }),
            },
        },
        _ => Answer::Refused(format!(
            "podfs {VERSION} serves the pod and does not understand the question; use the same version to ask"
        )),
    };
    put(stream, &answer, None)?;
    Ok(Attention::Over)
}

impl Desk {
    fn longest_question(&self) -> usize {
        if self.inbox.is_some() { LONGEST_PUSH } else { LONGEST_QUESTION }
    }

    fn push(&self, push: Push) -> Answer {
        let Some(inbox) = &self.inbox else {
            return Answer::Refused("the pod takes no objects; start its podfs run with --push".to_owned());
        };
        inbox.take(push).map_or_else(|error| Answer::Refused(error.to_string()), Answer::Pushed)
    }

    fn trace(&self, volume: &str, pipe: Option<OwnedFd>) -> Answer {
        let Some(pipe) = pipe else { return Answer::Refused("the question came without a pipe".to_owned()) };
        let watch = match self.store.watch(volume) {
            Ok(watch) => watch,
            Err(reason) => return Answer::Refused(reason),
        };
        let attach = move || watch.trace(pipe.as_fd()).map_err(|error| error.to_string());
        match self.questions.ask(SERVER_TIMEOUT, attach) {
            Some(Ok(())) => Answer::Tracing,
            Some(Err(reason)) => Answer::Refused(reason),
            None => Answer::Busy("the server does not answer".to_owned()),
        }
    }

    /// Gives the client to the supervisor's task, or the reason why that does not take it.
    fn hand_over(&self, stream: &UnixStream) -> io::Result<Result<(), String>> {
        let upgrading = Upgrading { connection: stream.try_clone()? };
        Ok(self.upgrades.try_send(upgrading).map_err(|error| match error {
            TrySendError::Full(_) => "another upgrade has begun; wait for its end".to_owned(),
            TrySendError::Closed(_) => "podfs ends and unmounts the volumes".to_owned(),
        }))
    }
}

fn put(stream: &UnixStream, message: &impl Serialize, descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
    send(stream, &Envelope { version: PROTOCOL, message }, descriptor.as_slice())
}
