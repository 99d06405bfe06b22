//! Questions whose answer needs work on volumes. The supervisor's task starts the work, and sends the answer to the
//! client's thread, the thread that serves the client. That thread waits at most 1.5 s for it, so a volume that hangs
//! delays only the client that asked for it.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::Sender;
use tokio::sync::mpsc::error::TrySendError;

use super::protocol::{ContainerRequest, ControlAnswer};

/// How long a client's thread waits for the volumes. The client itself waits two seconds for its answer.
const TIMEOUT: Duration = Duration::from_millis(1500);

/// The work that the supervisor's task has to do.
#[derive(Debug)]
pub(in crate::supervisor) enum ContainerTask {
    /// Prepare the sources of a container's mounts.
    Prepare(ContainerRequest),
    /// Remove the files of one container, or of all of them (`None`).
    Release(Option<String>),
}

/// A task, and the channel to the client's thread, which waits for the answer.
#[derive(Debug)]
pub(in crate::supervisor) struct ContainerOperation {
    /// The work to do.
    pub(in crate::supervisor) task: ContainerTask,
    answer: SyncSender<ControlAnswer>,
    until: Instant,
}

impl ContainerOperation {
    fn new(task: ContainerTask) -> (ContainerOperation, Receiver<ControlAnswer>) {
        let (answer, answered) = sync_channel(1);
        (ContainerOperation { task, answer, until: Instant::now() + TIMEOUT }, answered)
    }

    /// Whether the client's thread no longer waits. What the supervisor has prepared stays, and serves the client when
    /// it asks again.
    pub(in crate::supervisor) fn is_late(&self) -> bool {
        self.until <= Instant::now()
    }

    /// Sends the answer. The client may have disconnected.
    pub(in crate::supervisor) fn answer(self, answer: ControlAnswer) {
        let _ = self.answer.try_send(answer);
    }
}

/// Sends `task` to the supervisor's task, and waits for the answer.
pub(super) fn ask(queue: &Sender<ContainerOperation>, task: ContainerTask) -> ControlAnswer {
    let (operation, answered) = ContainerOperation::new(task);
    match queue.try_send(operation) {
        Ok(()) => {}
        Err(TrySendError::Full(_)) => {
            return ControlAnswer::Busy("other containers are being prepared; try again".to_owned());
        }
        Err(TrySendError::Closed(_)) => return ending(),
    }
    match answered.recv_timeout(TIMEOUT) {
        Ok(answer) => answer,
        Err(RecvTimeoutError::Timeout) => {
            ControlAnswer::Busy("a volume does not answer; podfs status says which one; try again".to_owned())
        }
        Err(RecvTimeoutError::Disconnected) => ending(),
    }
}

fn ending() -> ControlAnswer {
    ControlAnswer::Refused("podfs ends and unmounts the volumes".to_owned())
}
