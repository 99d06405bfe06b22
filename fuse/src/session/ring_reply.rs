//! Answers on their way to the thread that commits them.
//!
//! Only the thread of a ring may submit to it. Another thread that has an answer (of a slow request, or of a wait for a lock)
//! leaves the entry's number here, and wakes the thread of the ring by an eventfd that the ring polls.

use std::cell::Cell;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::{Arc, Mutex};

use nix::sys::eventfd::{EfdFlags, EventFd};

use super::ring_memory::{EntryId, RingMemory};

thread_local! {
    /// The inbox of the ring that the calling thread owns.
    static OWN: Cell<*const AnsweredEntries> = const { Cell::new(std::ptr::null()) };
}

/// Entries that have an answer. The lock is held for moments.
pub(super) struct AnsweredEntries {
    answered: Mutex<Vec<EntryId>>,
    event: EventFd,
}

impl AnsweredEntries {
    /// The inbox of the ring that the calling thread owns.
    ///
    /// # Errors
    /// When there are no descriptors left.
    pub(super) fn new() -> io::Result<Arc<Self>> {
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let inbox = Arc::new(Self { answered: Mutex::default(), event });
        OWN.set(Arc::as_ptr(&inbox));
        Ok(inbox)
    }

    /// A descriptor that becomes readable when another thread has left an answer.
    pub(super) fn event(&self) -> RawFd {
        self.event.as_fd().as_raw_fd()
    }

    /// The event was noticed.
    pub(super) fn clear_event(&self) {
        // The event may be cleared already.
        let _none = self.event.read();
    }

    /// Moves the answered entries to `into`.
    pub(super) fn take(&self, into: &mut Vec<EntryId>) {
        into.append(&mut self.answered.lock().expect("a thread that panics ends the process"));
    }

    fn leave(&self, entry: EntryId) {
        self.answered.lock().expect("a thread that panics ends the process").push(entry);
        if !std::ptr::eq(OWN.get(), self) {
            // The write fails only if the counter is at its maximum: then the event is readable already.
            let _full = self.event.write(1);
        }
    }
}

/// Takes the answer to the request of one entry.
#[derive(Clone)]
pub(super) struct RingReply {
    pub(super) memory: Arc<RingMemory>,
    pub(super) inbox: Arc<AnsweredEntries>,
    pub(super) entry: EntryId,
}

impl RingReply {
    /// Answers.
    ///
    /// # Errors
    /// When the answer is longer than the kernel takes.
    pub(super) fn write(&self, error: i32, body: &[u8], more: &[u8]) -> io::Result<()> {
        self.memory.answer(self.entry, error, [body, more])?;
        self.memory.slot(self.entry).clear();
        self.inbox.leave(self.entry);
        Ok(())
    }
}

impl fmt::Debug for RingReply {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("RingReply").field("entry", &self.entry).finish_non_exhaustive()
    }
}
