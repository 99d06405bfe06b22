//! Questions to a server that may not answer. One thread asks them, one after another, so that only this thread waits for the
//! server without a limit: neither the supervisor's task does, nor the threads that commit, nor those of clients.

use std::sync::OnceLock;
use std::sync::mpsc::{SyncSender, channel, sync_channel};
use std::thread;
use std::time::Duration;

/// Most questions in the queue. A further one fails at once.
const MAX_WAITING: usize = 8;

type QueuedQuestion = Box<dyn FnOnce() + Send>;

/// The thread that asks. The first question starts it.
#[derive(Default)]
pub(super) struct Questions(OnceLock<SyncSender<QueuedQuestion>>);

impl Questions {
    /// Lets the thread call `question`, and returns the result. `None` if that takes longer than `limit`, or if too many
    /// questions wait already.
    pub(super) fn ask<T: Send + 'static>(
        &self,
        limit: Duration,
        question: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let (answer, answered) = channel();
        let queue = self.0.get_or_init(start);
        // The caller may have stopped waiting by then, and dropped its end of the channel.
        queue.try_send(Box::new(move || drop(answer.send(question())))).ok()?;
        answered.recv_timeout(limit).ok()
    }
}

fn start() -> SyncSender<QueuedQuestion> {
    let (queue, questions) = sync_channel::<QueuedQuestion>(MAX_WAITING);
    let thread = thread::Builder::new().name("questions".to_owned());
    // If the kernel starts no thread, the channel closes, and each question fails at once.
    let _none = thread.spawn(move || questions.into_iter().for_each(|question| question()));
    queue
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_that_hangs_delays_no_other_caller() {
        let questions = Questions::default();
        assert_eq!(questions.ask(Duration::from_secs(20), || 7), Some(7));
        let (go_on, hangs) = channel::<()>();
        let moment = Duration::from_millis(1);
        assert_eq!(questions.ask(moment, move || hangs.recv().is_ok()), None);
        assert!((0..2 * MAX_WAITING).all(|_| questions.ask(moment, || 7).is_none()));
        drop(go_on);
        while questions.ask(Duration::from_secs(20), || 7).is_none() {}
    }
}
