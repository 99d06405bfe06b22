//! The supervisor's side of the control socket. Clients cannot disturb the supervisor:
//!
//! 1. The supervisor serves only processes of the user that it runs as. The mode of the socket keeps other users out, and the
//!    supervisor checks the uid of each client (`SO_PEERCRED`).
//! 2. The supervisor's task does not read questions. One thread accepts connections. Each client has a thread of its own, which
//!    reads the status store.
//! 3. The supervisor serves a few clients at once. When another client comes, the supervisor disconnects the clients that have
//!    been connected for longer than a question takes. A connection of a program that follows the pod, or that keeps the
//!    connection open to push objects, moves from its thread to a task on the supervisor's runtime.
//! 4. Only requests that change something go to the supervisor's task. The task itself answers upgrades, one at a time, and
//!    changes of the volumes, a few at a time. For an operation, the client's thread waits a moment for the task's answer.
//! 5. `Questions` asks the server, and `capacity` asks the sources of the node, on other threads, because either may not answer.

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

use super::container_operation::{self, ContainerOperation, ContainerTask};
use super::follow::Followers;
use super::protocol::{
    ControlAnswer, ControlQuestion, Envelope, LONGEST_PUSH, LONGEST_QUESTION, PROTOCOL, Publish, TIMEOUT, Upgrade,
    VolumeNames, not_understood, send_message,
};
use super::pushes::PushTasks;
use super::questions::Questions;
use crate::manifest::pod::Pod;
use crate::manifest::{Document, ManifestError, Origin};
use crate::source::{Push, PushReceiver};
use crate::supervisor::exec_state;
use crate::supervisor::run_dir::file_names::CONTROL;
use crate::supervisor::run_dir::socket;
use crate::supervisor::status::metrics;
use crate::supervisor::status::store::StatusStore;

/// How long the server may take to answer a client's thread. The client itself waits two seconds.
const SERVER_TIMEOUT: Duration = Duration::from_millis(500);
/// The refusal while the supervisor ends, when its task accepts nothing more.
const ENDING: &str = "podfs ends and unmounts the volumes";
/// Most clients at once.
const MAX_CLIENTS: usize = 8;

/// A client that the supervisor's task answers.
#[derive(Debug)]
pub struct PendingClient {
    connection: UnixStream,
}

/// A change that the supervisor's task has to make.
#[derive(Debug)]
pub(in crate::supervisor) enum RequestedChange {
    /// Serve the volumes of this manifest, too.
    Publish(Arc<Pod>),
    /// Stop serving these volumes.
    Unpublish(Vec<String>),
    /// Refresh these volumes now.
    Remount(Vec<String>),
}

impl PendingClient {
    /// The connection of a client that waits for an upgrade. The program that has executed this one left it open, with this
    /// descriptor number.
    ///
    /// # Errors
    /// When the number is not that of an open socket.
    ///
    /// # Safety
    /// No other code in this process may own the descriptor.
    pub unsafe fn inherited(number: RawFd) -> io::Result<PendingClient> {
        // SAFETY: the caller promises that no other code owns the descriptor.
        let connection = UnixStream::from(unsafe { exec_state::inherited(number) }?);
        getsockopt(&connection, PeerCredentials)?;
        Ok(PendingClient { connection })
    }

    /// Sends the answer, unless the client has disconnected.
    pub fn answer(&self, answer: &ControlAnswer) {
        let _ = send_message(&self.connection, answer, None);
    }
}

/// For an upgrade, which leaves the connection open for the next program.
impl AsFd for PendingClient {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}

/// The channels to the supervisor's task.
pub(in crate::supervisor) struct TaskQueues {
    /// Clients that ask for an upgrade, one at a time.
    pub(in crate::supervisor) upgrades: Sender<PendingClient>,
    /// Changes, each with the client that waits for the answer.
    pub(in crate::supervisor) changes: Sender<(RequestedChange, PendingClient)>,
    pub(in crate::supervisor) operations: Sender<ContainerOperation>,
}

/// The socket of a supervisor. Dropping it ends the answers; dropping the pod's claim deletes the file.
pub struct Control {
    listener: UnixListener,
    context: Arc<ClientContext>,
}

impl Control {
    /// Answers on a socket in this directory, which the caller has claimed, with the status in `store`. Sends the work
    /// for the supervisor's task to `task_queues`. Accepts pushed objects if there is an `inbox`. Replaces the socket of a
    /// supervisor that was killed. Call it on the supervisor's runtime.
    ///
    /// # Errors
    /// When the socket cannot be made, or no thread can be started.
    pub(in crate::supervisor) fn open(
        directory: &Path,
        store: StatusStore,
        inbox: Option<PushReceiver>,
        task_queues: TaskQueues,
    ) -> io::Result<Control> {
        let (followers, push_tasks) = (Followers::new(), PushTasks::new());
        let context = Arc::new(ClientContext {
            store,
            questions: Questions::default(),
            inbox,
            task_queues,
            followers,
            push_tasks,
        });
        let listener = answer(directory, &context)?;
        Ok(Control { listener, context })
    }

    /// Answers on a new socket, after another process has deleted the file of the old one.
    ///
    /// # Errors
    /// When the socket cannot be made, or no thread can be started.
    pub(in crate::supervisor) fn open_again(&mut self, directory: &Path) -> io::Result<()> {
        let listener = answer(directory, &self.context)?;
        let before = std::mem::replace(&mut self.listener, listener);
        let _ = shutdown(before.as_raw_fd(), nix::sys::socket::Shutdown::Both);
        Ok(())
    }

    /// Whether a program follows the pod.
    pub(in crate::supervisor) fn has_follower(&self) -> bool {
        !self.context.followers.is_empty()
    }

    /// Waits until a program that follows the pod disconnects. Cancel-safe.
    pub(in crate::supervisor) async fn follower_gone(&self) {
        self.context.followers.wait_for_disconnect().await;
    }
}

/// Makes the socket, and starts the thread that accepts connections on it.
fn answer(directory: &Path, context: &Arc<ClientContext>) -> io::Result<UnixListener> {
    let listener = socket::make(directory, CONTROL)?;
    listen(&listener, Backlog::new(MAX_CLIENTS as i32)?)?;
    let listener = UnixListener::from(listener);
    let accepting = listener.try_clone()?;
    let acceptor = Acceptor { context: Arc::clone(context), clients: Vec::new() };
    thread::Builder::new().name("control".to_owned()).spawn(move || acceptor.serve(&accepting))?;
    Ok(listener)
}

impl Drop for Control {
    fn drop(&mut self) {
        // Wakes the thread in accept(2), which then ends.
        let _ = shutdown(self.listener.as_raw_fd(), nix::sys::socket::Shutdown::Both);
    }
}

/// The thread that accepts connections.
struct Acceptor {
    context: Arc<ClientContext>,
    clients: Vec<ControlClient>,
}

/// The data that the threads of all clients share.
struct ClientContext {
    store: StatusStore,
    questions: Questions,
    inbox: Option<PushReceiver>,
    task_queues: TaskQueues,
    followers: Followers,
    push_tasks: PushTasks,
}

/// A client whose thread has not ended. The thread holds another reference to the connection until it has sent the answer.
struct ControlClient {
    since: Instant,
    connection: Arc<ControlConnection>,
}

/// The connection of a client.
struct ControlConnection {
    stream: UnixStream,
    /// Whether a task uses the connection, too.
    is_handed_over: AtomicBool,
}

impl ControlConnection {
    /// Whether only the client's thread uses the connection, and for longer than an answer takes.
    fn is_late(&self, since: Instant) -> bool {
        since.elapsed() > TIMEOUT + SERVER_TIMEOUT && !self.is_handed_over.load(Ordering::Acquire)
    }

    /// The stream, for a task. From now on the connection is never late, however long the client's thread takes to end.
    fn hand_over(&self) -> io::Result<UnixStream> {
        self.is_handed_over.store(true, Ordering::Release);
        self.stream.try_clone()
    }
}

impl Acceptor {
    fn serve(mut self, listener: &UnixListener) {
        loop {
            match listener.accept() {
                Ok((stream, _)) => self.receive(stream),
                // `Control` has shut the listener down.
                Err(error) if error.kind() == ErrorKind::InvalidInput => return,
                // Perhaps this process has too many open files: the client waits in the listener's queue.
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
        let connection = Arc::new(ControlConnection { stream, is_handed_over: AtomicBool::new(false) });
        let client = ControlClient { since: Instant::now(), connection: Arc::clone(&connection) };
        let context = Arc::clone(&self.context);
        let thread = thread::Builder::new().name("control-client".to_owned());
        let started = thread.spawn(move || {
            // A client that has disconnected, or has sent no valid question, gets no answer.
            if serve(&connection, &context).unwrap_or(ClientOutcome::Done) == ClientOutcome::Done {
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

/// Whether the client runs as the user of this process.
fn is_of_this_user(stream: &UnixStream) -> bool {
    getsockopt(stream, PeerCredentials).is_ok_and(|peer| peer.uid() == rustix::process::geteuid().as_raw())
}

/// Whether a client's thread has to close the connection.
#[derive(PartialEq, Eq)]
enum ClientOutcome {
    /// The client has its answer.
    Done,
    /// A task has the connection, and closes it.
    HandedOver,
}

/// Reads the question of a client, and answers it or hands it over to a task.
fn serve(connection: &ControlConnection, context: &ClientContext) -> io::Result<ClientOutcome> {
    let stream = &connection.stream;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    let received = receive_at_most::<Envelope<Value>>(stream, context.longest_question())?;
    let Some((Envelope { version, message, stays }, mut descriptors)) = received else {
        return Ok(ClientOutcome::Done);
    };
    let answer = match serde_json::from_value(message) {
        Ok(question) if version == PROTOCOL => match question {
            ControlQuestion::Status => ControlAnswer::Status(Box::new(context.store.status())),
            ControlQuestion::Trace { volume } => context.trace(&volume, descriptors.pop()),
            ControlQuestion::Push(push) => match context.push(push) {
                accepted @ ControlAnswer::Pushed(_) if stays => {
                    return context.hand_over_pushes(connection, &accepted);
                }
                answer => answer,
            },
            ControlQuestion::Metrics => ControlAnswer::Metrics(Box::new(metrics::read(&context.store))),
            ControlQuestion::PrepareContainer(request) => {
                container_operation::ask(&context.task_queues.operations, ContainerTask::Prepare(request))
            }
            ControlQuestion::ReleaseContainer { container } => {
                container_operation::ask(&context.task_queues.operations, ContainerTask::Release(container))
            }
            ControlQuestion::Upgrade => match context.hand_over_upgrade(connection)? {
                None => return Ok(ClientOutcome::HandedOver),
                Some(answer) => answer,
            },
            ControlQuestion::Follow => match context.followers.add(connection.hand_over()?, &context.store)? {
                None => return Ok(ClientOutcome::HandedOver),
                Some(answer) => answer,
            },
            ControlQuestion::Publish(Publish { manifest }) => match parse(manifest) {
                Ok(pod) => match context.hand_over(RequestedChange::Publish(Arc::new(pod)), connection)? {
                    None => return Ok(ClientOutcome::HandedOver),
                    Some(answer) => answer,
                },
                Err(error) => ControlAnswer::Refused(error.to_string()),
            },
            ControlQuestion::Unpublish(VolumeNames { volumes }) => {
                match context.hand_over(RequestedChange::Unpublish(volumes), connection)? {
                    None => return Ok(ClientOutcome::HandedOver),
                    Some(answer) => answer,
                }
            }
            ControlQuestion::Remount(VolumeNames { volumes }) => {
                match context.hand_over(RequestedChange::Remount(volumes), connection)? {
                    None => return Ok(ClientOutcome::HandedOver),
                    Some(answer) => answer,
                }
            }
        },
        _ => not_understood(),
    };
    send_message(stream, &answer, None)?;
    Ok(ClientOutcome::Done)
}

/// The pod of a manifest that came on the socket.
fn parse(manifest: Value) -> Result<Pod, ManifestError> {
    Pod::parse(Document::of_server(Origin::file(Path::new("the manifest")), manifest)?)
}

impl ClientContext {
    fn longest_question(&self) -> usize {
        if self.inbox.is_some() { LONGEST_PUSH } else { LONGEST_QUESTION }
    }

    fn push(&self, push: Push) -> ControlAnswer {
        let Some(inbox) = &self.inbox else {
            return ControlAnswer::Refused("the pod takes no objects; start its podfs run with --push".to_owned());
        };
        inbox.take(push).map_or_else(|error| ControlAnswer::Refused(error.to_string()), ControlAnswer::Pushed)
    }

    /// Sends the answer to a push, and gives the connection to a task, which receives the next pushes.
    fn hand_over_pushes(&self, connection: &ControlConnection, answer: &ControlAnswer) -> io::Result<ClientOutcome> {
        send_message(&connection.stream, answer, None)?;
        let Some(inbox) = &self.inbox else { return Ok(ClientOutcome::Done) };
        let is_handed_over = self.push_tasks.add(connection.hand_over()?, inbox);
        Ok(if is_handed_over { ClientOutcome::HandedOver } else { ClientOutcome::Done })
    }

    /// Makes the server write a line for each request of this volume to the pipe.
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

    /// Gives the client to the supervisor's task. Returns an answer for the client if the task does not accept it.
    fn hand_over_upgrade(&self, connection: &ControlConnection) -> io::Result<Option<ControlAnswer>> {
        let caller = PendingClient { connection: connection.hand_over()? };
        let reason = |error| match error {
            TrySendError::Full(_) => "another upgrade has begun; wait for its end".to_owned(),
            TrySendError::Closed(_) => ENDING.to_owned(),
        };
        let refused = self.task_queues.upgrades.try_send(caller).err();
        Ok(refused.map(|error| ControlAnswer::Upgrade(Upgrade::Refused { reason: reason(error) })))
    }

    /// Gives a change and its client to the supervisor's task. Returns an answer for the client if the task does not
    /// accept it.
    fn hand_over(&self, change: RequestedChange, connection: &ControlConnection) -> io::Result<Option<ControlAnswer>> {
        let caller = PendingClient { connection: connection.hand_over()? };
        Ok(self.task_queues.changes.try_send((change, caller)).err().map(|error| match error {
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
        let connection = ControlConnection {
            stream: UnixStream::pair().expect("a socket pair").0,
            is_handed_over: AtomicBool::new(false),
        };
        let long_ago = Instant::now().checked_sub(Duration::from_secs(60)).expect("the machine has run for a minute");
        assert!(!connection.is_late(Instant::now()));
        assert!(connection.is_late(long_ago));
        let _of_the_task = connection.hand_over().expect("a descriptor");
        assert!(!connection.is_late(long_ago));
    }
}
