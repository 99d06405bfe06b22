//! Answering on the control socket. Clients cannot disturb the supervisor:
//!
//! 1. podfs listens only to processes of the user it runs as: by the mode of the socket, and by what the kernel says of the peer.
//! 2. The supervisor's task takes no part. One thread accepts; each client has a thread of its own, which reads the status store.
//! 3. A few clients are served at once. When others come, a client that is there longer than a question takes is disconnected.
//!    Programs that follow the pod, or keep a connection to push objects, become tasks on the supervisor's runtime.
//! 4. Only requests that change something go to the supervisor's task: an upgrade, one at a time, and changes of the volumes, a
//!    few at a time, which the task answers itself; and errands, for whose end the client's thread waits a moment only.
//! 5. `Questions` asks the server, and `capacity` the sources of the host, because either may not answer.

use std::io::{self, ErrorKind};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::socket::sockopt::PeerCredentials;
use nix::sys::socket::{Backlog, getsockopt, listen, shutdown};
use podfs_fuse::memory_lock;
use podfs_fuse::protocol::receive_at_most;
use serde_json::Value;
use tokio::sync::mpsc::Sender;
use tokio::sync::mpsc::error::TrySendError;

use super::errand::{self, Errand, Task};
use super::follow::Followers;
use super::protocol::{
    ControlAnswer, ControlQuestion, Envelope, LONGEST_PUSH, LONGEST_QUESTION, PROTOCOL, Publish, TIMEOUT, Upgrade,
    VolumeNames, put,
};
use super::pushes::PushTasks;
use super::questions::Questions;
use crate::manifest::pod::Pod;
use crate::manifest::{Document, ManifestError, Origin};
use crate::source::{Inbox, Push};
use crate::supervisor::exec_state;
use crate::supervisor::run_dir::claim::CONTROL;
use crate::supervisor::run_dir::socket;
use crate::supervisor::status::metrics;
use crate::supervisor::status::store::{StatusStore, VERSION};

/// How long the server may take to answer. A client that asks for a status waits two seconds.
const SERVER_TIMEOUT: Duration = Duration::from_millis(500);
/// Why the supervisor's task takes nothing any more.
const ENDING: &str = "podfs ends and unmounts the volumes";
/// Most clients at once.
const MAX_CLIENTS: usize = 8;

/// A client that the supervisor's task answers.
#[derive(Debug)]
pub struct Caller {
    connection: UnixStream,
}

/// A change that the supervisor's task has to make.
#[derive(Debug)]
pub(in crate::supervisor) enum RequestedChange {
    /// To serve the volumes of this manifest, too.
    Publish(Arc<Pod>),
    /// To serve these volumes no more.
    Unpublish(Vec<String>),
    /// To refresh these volumes now.
    Remount(Vec<String>),
}

impl Caller {
    /// The connection that the program before this one left open under this number, for this one to go on with.
    ///
    /// # Errors
    /// When there is none.
    ///
    /// # Safety
    /// Nothing else in this process may own the descriptor.
    pub unsafe fn inherited(number: RawFd) -> io::Result<Caller> {
        // SAFETY: the caller says that nothing else owns it.
        let connection = UnixStream::from(unsafe { exec_state::inherited(number) }?);
        getsockopt(&connection, PeerCredentials)?;
        Ok(Caller { connection })
    }

    /// Answers. The client may have gone; that changes nothing.
    pub fn answer(&self, answer: &ControlAnswer) {
        let _ = put(&self.connection, answer, None);
    }
}

/// The way to leave it open for the next program.
impl AsFd for Caller {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}

/// The ways to the supervisor's task.
pub(in crate::supervisor) struct Desks {
    /// One upgrade at a time.
    pub(in crate::supervisor) upgrades: Sender<Caller>,
    /// Changes, each with the client that is to be answered.
    pub(in crate::supervisor) changes: Sender<(RequestedChange, Caller)>,
    pub(in crate::supervisor) errands: Sender<Errand>,
}

/// The socket of a supervisor. Dropping it ends the answers; the file goes with the claim on the pod.
pub struct Control {
    listener: UnixListener,
    desk: Arc<Desk>,
}

impl Control {
    /// Answers in this directory, which the caller has claimed, from `store`; what is for the supervisor's
    /// task goes to `desks`. To be called on the supervisor's runtime. Objects can be pushed where there is an `inbox`. What a
    /// supervisor that was killed
    /// has left in the place of the socket is replaced.
    ///
    /// # Errors
    /// When the socket cannot be made, or no thread can be started.
    pub(in crate::supervisor) fn open(
        directory: &Path,
        store: StatusStore,
        inbox: Option<Inbox>,
        desks: Desks,
    ) -> io::Result<Control> {
        let (followers, push_tasks) = (Followers::new(), PushTasks::new());
        let desk = Arc::new(Desk { store, questions: Questions::default(), inbox, desks, followers, push_tasks });
        let listener = answer(directory, &desk)?;
        Ok(Control { listener, desk })
    }

    /// Answers there again, at a new socket, after another process has deleted the one before.
    ///
    /// # Errors
    /// When the socket cannot be made, or no thread can be started.
    pub(in crate::supervisor) fn open_again(&mut self, directory: &Path) -> io::Result<()> {
        let listener = answer(directory, &self.desk)?;
        let before = std::mem::replace(&mut self.listener, listener);
        let _ = shutdown(before.as_raw_fd(), nix::sys::socket::Shutdown::Both);
        Ok(())
    }

    /// Waits until a program that followed the pod hangs up. Cancel-safe.
    pub(in crate::supervisor) async fn follower_gone(&self) {
        self.desk.followers.gone().await;
    }
}

/// Starts the thread that accepts, at a new socket.
fn answer(directory: &Path, desk: &Arc<Desk>) -> io::Result<UnixListener> {
    let listener = socket::make(directory, CONTROL)?;
    listen(&listener, Backlog::new(MAX_CLIENTS as i32)?)?;
    let listener = UnixListener::from(listener);
    let accepting = listener.try_clone()?;
    let reception = Reception { desk: Arc::clone(desk), clients: Vec::new() };
    thread::Builder::new().name("control".to_owned()).spawn(move || reception.serve(&accepting))?;
    Ok(listener)
}

impl Drop for Control {
    fn drop(&mut self) {
        // Wakes the thread in accept(2), which then ends.
        let _ = shutdown(self.listener.as_raw_fd(), nix::sys::socket::Shutdown::Both);
    }
}

/// The thread that accepts connections.
struct Reception {
    desk: Arc<Desk>,
    clients: Vec<ControlClient>,
}

/// What all clients are answered from.
struct Desk {
    store: StatusStore,
    questions: Questions,
    inbox: Option<Inbox>,
    desks: Desks,
    followers: Followers,
    push_tasks: PushTasks,
}

/// A client that is being answered. Its thread holds the connection, too, until it is done.
struct ControlClient {
    since: Instant,
    connection: Arc<Connection>,
}

/// The connection of a client.
struct Connection {
    stream: UnixStream,
    is_handed_over: AtomicBool,
}

impl Connection {
    /// Whether its thread alone uses it, for too long.
    fn is_late(&self, since: Instant) -> bool {
        since.elapsed() > TIMEOUT + SERVER_TIMEOUT && !self.is_handed_over.load(Ordering::Acquire)
    }

    /// The stream for a task. It stays open from now on, also while the client's thread, on a busy machine, takes long to end.
    fn hand_over(&self) -> io::Result<UnixStream> {
        self.is_handed_over.store(true, Ordering::Release);
        self.stream.try_clone()
    }
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
        self.clients.retain(|client| Arc::strong_count(&client.connection) > 1);
        let (late, present): (Vec<_>, Vec<_>) =
            self.clients.iter().partition(|client| client.connection.is_late(client.since));
        late.iter().for_each(|client| drop(client.connection.stream.shutdown(Shutdown::Both)));
        if present.len() >= MAX_CLIENTS || !is_of_this_user(&stream) {
            return;
        }
        let connection = Arc::new(Connection { stream, is_handed_over: AtomicBool::new(false) });
        let client = ControlClient { since: Instant::now(), connection: Arc::clone(&connection) };
        let desk = Arc::clone(&self.desk);
        let thread = thread::Builder::new().name("control-client".to_owned());
        let started = thread.spawn(move || {
            // A client that is gone, or that sent no valid question, gets no answer.
            if serve(&connection, &desk).unwrap_or(Attention::Over) == Attention::Over {
                let _ = connection.stream.shutdown(Shutdown::Both);
            }
            drop(connection);
            memory_lock::return_own_stack();
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
    /// The supervisor's task answers it, or a task of its own.
    HandedOver,
}

fn serve(connection: &Connection, desk: &Desk) -> io::Result<Attention> {
    let stream = &connection.stream;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    let asked = receive_at_most::<Envelope<Value>>(stream, desk.longest_question())?;
    let Some((Envelope { version, message, stays }, mut descriptors)) = asked else { return Ok(Attention::Over) };
    let answer = match serde_json::from_value(message) {
        Ok(question) if version == PROTOCOL => match question {
            ControlQuestion::Status => ControlAnswer::Status(Box::new(desk.store.status())),
            ControlQuestion::Trace { volume } => desk.trace(&volume, descriptors.pop()),
            ControlQuestion::Push(push) => match desk.push(push) {
                taken @ ControlAnswer::Pushed(_) if stays => return desk.hand_over_pushes(connection, &taken),
                answer => answer,
            },
            ControlQuestion::Metrics => ControlAnswer::Metrics(Box::new(metrics::read(&desk.store))),
            ControlQuestion::PrepareContainer(request) => errand::ask(&desk.desks.errands, Task::Prepare(request)),
            ControlQuestion::ReleaseContainer { container } => {
                errand::ask(&desk.desks.errands, Task::Release(container))
            }
            ControlQuestion::Upgrade => match desk.hand_over_upgrade(connection)? {
                None => return Ok(Attention::HandedOver),
                Some(answer) => answer,
            },
            ControlQuestion::Follow => match desk.followers.add(connection.hand_over()?, &desk.store)? {
                None => return Ok(Attention::HandedOver),
                Some(answer) => answer,
            },
            ControlQuestion::Publish(Publish { manifest }) => match parse(manifest) {
                Ok(pod) => match desk.hand_over(RequestedChange::Publish(Arc::new(pod)), connection)? {
                    None => return Ok(Attention::HandedOver),
                    Some(answer) => answer,
                },
                Err(error) => ControlAnswer::Refused(error.to_string()),
            },
            ControlQuestion::Unpublish(VolumeNames { volumes }) => {
                match desk.hand_over(RequestedChange::Unpublish(volumes), connection)? {
                    None => return Ok(Attention::HandedOver),
                    Some(answer) => answer,
                }
            }
            ControlQuestion::Remount(VolumeNames { volumes }) => {
                match desk.hand_over(RequestedChange::Remount(volumes), connection)? {
                    None => return Ok(Attention::HandedOver),
                    Some(answer) => answer,
                }
            }
        },
        _ => ControlAnswer::Refused(format!(
            "podfs {VERSION} serves the pod and does not understand the question; use the same version to ask"
        )),
    };
    put(stream, &answer, None)?;
    Ok(Attention::Over)
}

/// The pod of a manifest that came on the socket.
fn parse(manifest: Value) -> Result<Pod, ManifestError> {
    Pod::parse(Document::of_server(Origin::file(Path::new("the manifest")), manifest)?)
}

impl Desk {
    fn longest_question(&self) -> usize {
        if self.inbox.is_some() { LONGEST_PUSH } else { LONGEST_QUESTION }
    }

    fn push(&self, push: Push) -> ControlAnswer {
        let Some(inbox) = &self.inbox else {
            return ControlAnswer::Refused("the pod takes no objects; start its podfs run with --push".to_owned());
        };
        inbox.take(push).map_or_else(|error| ControlAnswer::Refused(error.to_string()), ControlAnswer::Pushed)
    }

    /// Answers a push, and takes the next ones on the same connection without this thread.
    fn hand_over_pushes(&self, connection: &Connection, taken: &ControlAnswer) -> io::Result<Attention> {
        put(&connection.stream, taken, None)?;
        let Some(inbox) = &self.inbox else { return Ok(Attention::Over) };
        let stays = self.push_tasks.add(connection.hand_over()?, inbox);
        Ok(if stays { Attention::HandedOver } else { Attention::Over })
    }

    fn trace(&self, volume: &str, pipe: Option<OwnedFd>) -> ControlAnswer {
        let Some(pipe) = pipe else { return ControlAnswer::Refused("the question came without a pipe".to_owned()) };
        let watch = match self.store.watch(volume) {
            Ok(watch) => watch,
            Err(error) => return ControlAnswer::Refused(error.to_string()),
        };
        let attach = move || watch.trace(pipe.as_fd());
        match self.questions.ask(SERVER_TIMEOUT, attach) {
            Some(Ok(())) => ControlAnswer::Tracing,
            Some(Err(error)) => ControlAnswer::Refused(error.to_string()),
            None => ControlAnswer::Busy("the server does not answer".to_owned()),
        }
    }

    /// Gives the client to the supervisor's task, or an answer if that does not take it.
    fn hand_over_upgrade(&self, connection: &Connection) -> io::Result<Option<ControlAnswer>> {
        let caller = Caller { connection: connection.hand_over()? };
        let reason = |error| match error {
            TrySendError::Full(_) => "another upgrade has begun; wait for its end".to_owned(),
            TrySendError::Closed(_) => ENDING.to_owned(),
        };
        let refused = self.desks.upgrades.try_send(caller).err();
        Ok(refused.map(|error| ControlAnswer::Upgrade(Upgrade::Refused { reason: reason(error) })))
    }

    /// Gives a change and its client to the supervisor's task, or an answer if that does not take it.
    fn hand_over(&self, change: RequestedChange, connection: &Connection) -> io::Result<Option<ControlAnswer>> {
        let caller = Caller { connection: connection.hand_over()? };
        Ok(self.desks.changes.try_send((change, caller)).err().map(|error| match error {
            TrySendError::Full(_) => {
                ControlAnswer::Busy("other changes of the volumes wait for their turn; try again".to_owned())
            }
            TrySendError::Closed(_) => ControlAnswer::Refused(ENDING.to_owned()),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_that_a_task_uses_is_never_late() {
        let connection =
            Connection { stream: UnixStream::pair().expect("a socket pair").0, is_handed_over: AtomicBool::new(false) };
        let long_ago = Instant::now().checked_sub(Duration::from_secs(60)).expect("the machine has run for a minute");
        assert!(!connection.is_late(Instant::now()));
        assert!(connection.is_late(long_ago));
        let _of_the_task = connection.hand_over().expect("a descriptor");
        assert!(!connection.is_late(long_ago));
    }
}
