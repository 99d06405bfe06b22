//! Questions that take work on volumes. The supervisor's task does it and gives the answer to the client's thread, which
//! waits for a moment: a volume that hangs delays its client by that moment, and no other client.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::Sender;
use tokio::sync::mpsc::error::TrySendError;

use super::protocol::{ContainerRequest, ControlAnswer};

/// How long the volumes may take. A client waits two seconds for an answer.
const TIMEOUT: Duration = Duration::from_millis(1500);

/// The work that the supervisor's task has to do.
#[derive(Debug)]
pub(in crate::supervisor) enum Task {
    /// To make ready what a container mounts.
    Prepare(ContainerRequest),
    /// To take away what was made for a container, or for all.
    Release(Option<String>),
}

/// A task, and the thread that waits for its end.
#[derive(Debug)]
pub(in crate::supervisor) struct Errand {
    /// What is to be done.
    pub(in crate::supervisor) task: Task,
    answer: SyncSender<ControlAnswer>,
    until: Instant,
}

impl Errand {
    fn new(task: Task) -> (Errand, Receiver<ControlAnswer>) {
        let (answer, answered) = sync_channel(1);
        (Errand { task, answer, until: Instant::now() + TIMEOUT }, answered)
    }

    /// Whether the client waits no more. Work that is done stays done: the client finds it when it asks again.
    pub(in crate::supervisor) fn is_late(&self) -> bool {
        self.until <= Instant::now()
    }

    /// Gives the answer. The client may have gone.
    pub(in crate::supervisor) fn answer(self, answer: ControlAnswer) {
        let _ = self.answer.try_send(answer);
    }
}

/// Lets the supervisor's task do this.
pub(super) fn ask(desk: &Sender<Errand>, task: Task) -> ControlAnswer {
    let (errand, answered) = Errand::new(task);
    match desk.try_send(errand) {
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
