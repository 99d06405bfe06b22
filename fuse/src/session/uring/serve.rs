//! The thread of one ring: it serves the callers of one CPU, on that CPU.
//!
//! A new thread first handles the entries that a dead server has left in its queues: it commits answers, and registers every other
//! entry with the kernel again. Then it answers the requests of the dead server, like later ones.
//!
//! An entry that waits for its answer takes no request. So before a request may wait, its queue gets another entry.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::Instant;

use rustix::thread::{CpuSet, sched_setaffinity};

use super::ring::{Completion, FuseCommand, Ring};
use super::volume::{ExecutingRequest, RingVolume};
use super::workers::Workers;
use crate::session::abi::{URING_COMMIT_AND_FETCH, URING_REGISTER};
use crate::session::request::{FuseOperation, Request};
use crate::session::ring_memory::{EntryId, EntryState};
use crate::session::ring_reply::{AnsweredEntries, RingReply};

/// The user data of polls. Entries have smaller numbers.
const THREAD_ENDS: u64 = u64::MAX;
const ANSWERS: u64 = u64::MAX - 1;
/// The number of entries of a queue that must be able to take requests while one waits: for the request that wakes the queue, and
/// for another one.
const ENOUGH: usize = 2;

/// The volume of the rings, and the other threads that execute its requests.
#[derive(Clone)]
pub(super) struct RingShares {
    pub(super) volume: Arc<RingVolume>,
    pub(super) workers: Arc<Workers>,
}

/// The CPU and the queues of a thread.
pub(super) struct ThreadAssignment {
    /// The CPU that it runs on, if it is one of those that this process may use.
    pub(super) cpu: Option<usize>,
    /// The queue of its CPU, and queues of CPUs that this process does not use.
    pub(super) queues: Vec<usize>,
}

/// The first work of a thread.
struct InitialWork {
    /// Entries in which a dead server has left a request.
    inherited: Vec<EntryId>,
    /// The completions that the kernel has sent already.
    completions: Vec<Completion>,
}

/// A thread with a ring that no volume uses yet.
pub(super) struct IdleRing {
    assignment: ThreadAssignment,
    ring: Ring,
    inbox: Arc<AnsweredEntries>,
}

impl IdleRing {
    /// Creates the ring of the calling thread.
    ///
    /// # Errors
    /// When this process may not create a ring.
    pub(super) fn new(assignment: ThreadAssignment) -> io::Result<Self> {
        if let Some(cpu) = assignment.cpu {
            let mut own = CpuSet::new();
            own.set(cpu);
            // On another CPU the thread is slower, not wrong.
            let _elsewhere = sched_setaffinity(None, &own);
        }
        let mut ring = Ring::new()?;
        ring.end_with_thread(THREAD_ENDS)?;
        let inbox = AnsweredEntries::new()?;
        ring.poll(inbox.event(), ANSWERS)?;
        Ok(Self { assignment, ring, inbox })
    }

    /// Waits for a volume, registers its entries, and serves it. Sends to `begun` whether the kernel accepts the entries.
    pub(super) fn serve(self, volume: &Receiver<RingShares>, begun: &Sender<io::Result<()>>) {
        let Ok(RingShares { volume: served, workers }) = volume.recv() else { return };
        served.service.begin_thread();
        let Self { assignment, ring, inbox } = self;
        let mut thread = RingThread {
            thread: rustix::thread::gettid().as_raw_nonzero().get(),
            armed: vec![0; served.memory.queues()],
            served,
            workers,
            ring,
            inbox,
            buffer: Vec::new(),
            answered: Vec::new(),
        };
        let first = thread.begin(&assignment);
        let (first, outcome) = match first {
            Ok(first) => (Some(first), Ok(())),
            Err(error) => (None, Err(error)),
        };
        let _session_is_gone = begun.send(outcome);
        if let Some(first) = first {
            thread.run(first);
            thread.workers.end();
        }
    }
}

/// The thread of a ring.
struct RingThread {
    thread: i32,
    served: Arc<RingVolume>,
    workers: Arc<Workers>,
    ring: Ring,
    inbox: Arc<AnsweredEntries>,
    /// For each queue, how many of its entries can take a request.
    armed: Vec<usize>,
    buffer: Vec<u8>,
    answered: Vec<EntryId>,
}

impl RingThread {
    /// Gives the kernel the entries of the thread's queues, except where a dead server has left a request.
    fn begin(&mut self, assignment: &ThreadAssignment) -> io::Result<InitialWork> {
        let memory = Arc::clone(&self.served.memory);
        let mut inherited = Vec::new();
        for queue in &assignment.queues {
            // An entry for a CPU that this process may not use gets the rest of its memory when a caller runs there.
            let mut whole = assignment.cpu == Some(*queue);
            let mut entries: Vec<_> = memory.in_use().filter(|(_, of)| of == queue).map(|(entry, _)| entry).collect();
            if entries.is_empty() {
                entries.push(memory.add(*queue, whole)?);
                if whole {
                    // With a second entry, the first request that waits does not delay others.
                    entries.push(memory.add(*queue, false)?);
                }
            }
            for entry in entries {
                memory.back(entry, std::mem::take(&mut whole))?;
                match memory.entry_state(entry) {
                    EntryState::Nothing => self.register(entry)?,
                    EntryState::Answer => self.commit(entry)?,
                    EntryState::Request(_) => inherited.push(entry),
                }
            }
        }
        self.ring.submit()?;
        // If the kernel refuses an entry, its completion is here now. An entry whose answer a dead server had committed is
        // registered now, too, before the request that wakes the queue: without an entry, that request would also wait.
        let mut completions = Vec::new();
        while let Some(completion) = self.ring.completion() {
            match completion.result {
                result if result == -libc::ENOENT && completion.user_data < ANSWERS => self.completed(completion)?,
                result if result < 0 && completion.user_data < ANSWERS => {
                    return Err(io::Error::from_raw_os_error(-result));
                }
                _ => completions.push(completion),
            }
        }
        Ok(InitialWork { inherited, completions })
    }

    /// Serves until the volume is unmounted.
    fn run(&mut self, InitialWork { inherited, completions }: InitialWork) {
        let ended = completions
            .into_iter()
            .try_for_each(|completion| self.completed(completion).and_then(|()| self.ring.submit()))
            .and_then(|()| {
                inherited.into_iter().try_for_each(|entry| self.arrived(entry, true).and_then(|()| self.ring.submit()))
            })
            .and_then(|()| self.serve());
        match ended.map_err(|error| error.raw_os_error().unwrap_or(0)) {
            Ok(never) => match never {},
            // The volume is unmounted.
            Err(libc::ENOTCONN | libc::ECONNABORTED | libc::ENODEV) => {}
            Err(error) => {
                // No thread answers the callers of this CPU any more, so the server ends, and its successor does.
                let error = io::Error::from_raw_os_error(error);
                let volume = self.served.memory.volume();
                tracing::error!(
                    volume,
                    "the kernel refuses a ring that it accepted before: {error}; this server ends, and the supervisor starts another one"
                );
                std::process::abort()
            }
        }
    }

    fn serve(&mut self) -> io::Result<std::convert::Infallible> {
        loop {
            self.ring.submit_and_wait()?;
            while let Some(completion) = self.ring.completion() {
                self.completed(completion)?;
                // The next request must not keep the caller of this one waiting. Without a next request, the loop submits the
                // answer when it waits.
                self.submit_if_more()?;
            }
        }
    }

    fn submit_if_more(&mut self) -> io::Result<()> {
        if self.ring.has_completion() { self.ring.submit() } else { Ok(()) }
    }

    fn completed(&mut self, Completion { user_data, result }: Completion) -> io::Result<()> {
        match (user_data, result) {
            (THREAD_ENDS, _) => Ok(()),
            (ANSWERS, _) => {
                self.inbox.clear_event();
                self.ring.poll(self.inbox.event(), ANSWERS)?;
                self.commit_answered()
            }
            (entry, 0..) => {
                let entry = entry as EntryId;
                self.count(entry, |armed| armed.saturating_sub(1));
                self.arrived(entry, false)
            }
            // A predecessor had committed the answer already.
            (entry, result) if result == -libc::ENOENT => {
                let entry = entry as EntryId;
                self.count(entry, |armed| armed.saturating_sub(1));
                self.register(entry)
            }
            (_, result) => Err(io::Error::from_raw_os_error(-result)),
        }
    }

    /// Answers the request in `entry`, or hands it over. `is_inherited` says whether a dead server left it unanswered.
    fn arrived(&mut self, entry: EntryId, is_inherited: bool) -> io::Result<()> {
        let reply = RingReply { memory: Arc::clone(&self.served.memory), inbox: Arc::clone(&self.inbox), entry };
        let memory = &reply.memory;
        let earlier = match memory.entry_state(entry) {
            EntryState::Request(earlier) if is_inherited => earlier,
            _ => None,
        };
        if !memory.take(entry) {
            // The kernel broke its own protocol. The caller must not wait for ever.
            reply.write(-libc::EIO, &[], &[])?;
            return self.commit_answered();
        }
        memory.slot(entry).set_thread(self.thread);
        let (waits_for_lock, may_wait) = {
            // SAFETY: the request is not answered yet.
            let request = Request::parse(unsafe { memory.request(entry) });
            let operation = request.as_ref().map(|request| &request.operation);
            let waits_for_lock = matches!(operation, Some(FuseOperation::SetLock { wait: true, .. }));
            (waits_for_lock, operation.is_some_and(|operation| self.served.service.may_wait(operation)))
        };
        let hands_over = may_wait && self.workers.are_needed();
        // Without memory for another entry, a slow request delays the callers of this CPU. A wait for a lock fails instead.
        let has_free_entry = if waits_for_lock || hands_over { self.has_free_entry(entry)? } else { true };
        if waits_for_lock && !has_free_entry {
            reply.write(-libc::ENOLCK, &[], &[])?;
            return self.commit_answered();
        }
        let mut job = ExecutingRequest { reply, is_inherited, earlier, may_wait };
        if hands_over {
            match Workers::take(&self.workers, &self.served, job) {
                Ok(()) => return Ok(()),
                Err(back) => job = back,
            }
        }
        let since = job.may_wait.then(Instant::now);
        job.execute(&self.served, &mut self.buffer);
        if let Some(since) = since {
            self.workers.note(since);
        }
        self.commit_answered()
    }

    /// Registers more entries for the queue of `entry`, whose request is going to wait. Returns whether one can take requests.
    fn has_free_entry(&mut self, entry: EntryId) -> io::Result<bool> {
        let queue = self.served.memory.queue(entry);
        while self.armed[queue] < ENOUGH {
            let Ok(other) = self.served.memory.add(queue, false) else { break };
            self.register(other)?;
        }
        // Requests may have come while no entry could take them. The kernel looks for them when it gets an answer in this queue.
        // The answer to this request comes late, and may even depend on one of those requests.
        self.served.wake(&[queue]);
        Ok(self.armed[queue] > 0)
    }

    fn commit_answered(&mut self) -> io::Result<()> {
        let mut answered = std::mem::take(&mut self.answered);
        self.inbox.take(&mut answered);
        let committed = answered.drain(..).try_for_each(|entry| self.commit(entry));
        self.answered = answered;
        committed
    }

    /// Gives the kernel an answer, and room for another request.
    fn commit(&mut self, entry: EntryId) -> io::Result<()> {
        let memory = &self.served.memory;
        let unique = memory.finish(entry);
        let fuse = FuseCommand::new(memory.queue(entry) as u16, unique);
        self.ring.command(self.served.device.as_fd(), URING_COMMIT_AND_FETCH, fuse, None, entry.into())?;
        self.count(entry, |armed| armed + 1);
        Ok(())
    }

    /// Gives the kernel an entry for a request.
    fn register(&mut self, entry: EntryId) -> io::Result<()> {
        let memory = &self.served.memory;
        let fuse = FuseCommand::new(memory.queue(entry) as u16, 0);
        let buffers = memory.buffers(entry);
        self.ring.command(self.served.device.as_fd(), URING_REGISTER, fuse, Some(&buffers), entry.into())?;
        self.count(entry, |armed| armed + 1);
        // The kernel reads `buffers` until the entry is submitted.
        self.ring.submit()
    }

    fn count(&mut self, entry: EntryId, change: impl FnOnce(usize) -> usize) {
        let armed = &mut self.armed[self.served.memory.queue(entry)];
        *armed = change(*armed);
    }
}
