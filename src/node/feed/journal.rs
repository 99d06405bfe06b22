//! The log lines about objects of the API server.

use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use crate::manifest::tokens::Token;
use crate::source::{AbortOnDrop, ObjectUpdate, ProblemLog};

/// One journal for all tasks that follow objects.
pub(super) struct SharedJournal {
    shared: Arc<JournalState>,
    _task: AbortOnDrop,
}

struct JournalState {
    /// The lock is held for moments.
    journal: Mutex<ProblemLog>,
    /// Wakes the task when the time of the next line has changed.
    changed: Notify,
}

impl SharedJournal {
    /// An empty journal. Must be called inside of a tokio runtime.
    pub(super) fn new() -> SharedJournal {
        let shared = Arc::new(JournalState { journal: Mutex::default(), changed: Notify::new() });
        let task = AbortOnDrop::spawn(log(Arc::clone(&shared)));
        SharedJournal { shared, _task: task }
    }

    /// Logs the problem of an object, or its end.
    pub(super) fn note<T>(&self, title: &str, update: &ObjectUpdate<T>) {
        self.write(|journal| journal.note(title, update));
    }

    /// Logs the problem of a token, or its end.
    pub(super) fn note_token(&self, title: &str, update: &ObjectUpdate<Token>) {
        self.write(|journal| journal.note_token(title, update));
    }

    fn write(&self, write: impl FnOnce(&mut ProblemLog)) {
        let mut journal = self.shared.lock();
        let before = journal.due();
        write(&mut journal);
        if journal.due() != before {
            self.shared.changed.notify_one();
        }
    }

    /// Forgets an object to which no pod refers any more.
    pub(super) fn forget(&self, title: &str) {
        self.shared.lock().forget(title);
    }
}

impl JournalState {
    fn lock(&self) -> MutexGuard<'_, ProblemLog> {
        self.journal.lock().expect("no code panics while it is locked")
    }
}

/// Logs each line when it is due.
async fn log(shared: Arc<JournalState>) {
    loop {
        let due = shared.lock().due();
        match due {
            Some(due) => {
                tokio::select! {
                    () = sleep_until(due) => shared.lock().log(Instant::now()),
                    () = shared.changed.notified() => {}
                }
            }
            None => shared.changed.notified().await,
        }
    }
}
