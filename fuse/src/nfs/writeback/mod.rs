//! Writeback: data that a volume has accepted, until the server has it on disk.
//!
//! podfs answers a write as soon as its data is in the [`log`], where the next server of the volume finds it. From there podfs
//! sends it, several writes at once, as `UNSTABLE` (RFC 1813, 3.3.7), and keeps it until a COMMIT with the same verifier says
//! that the NFS server has it on disk. Another verifier means that the NFS server has restarted and may have lost the data:
//! then podfs sends it again.
//!
//! 1. podfs does not send a record while an older one with some of the same bytes of the file is on its way. So the NFS server
//!    has the last written data in the end.
//! 2. When the verifier changes, podfs sends all records of the file that are not committed again, in their order, also those
//!    that the NFS server called stable: otherwise an old record would come after a newer one. When the verifier changes
//!    repeatedly, podfs sends them as `FILE_SYNC`: then none is older than the data on the server's disk, and each answer counts.
//! 3. A record leaves the log when it is committed, or when its error is recorded. The next write returns an error, and so does
//!    each close of a descriptor through which the data was written; the error stays in the log until an fsync has returned it, or
//!    the file is closed for the last time. A process may close a descriptor that it has inherited, and ignore the error, while
//!    another one relies on its fsync.
//! 4. Separate tasks send and commit. A caller that waits for them may be interrupted at any time.
//! 5. A flush waits for data that was accepted before it, and not for later data.
//! 6. podfs commits all files of a full log; a write waits until there is room. If the log has nothing but errors, podfs keeps
//!    them in memory alone.
//!
//! | module | owns |
//! |---|---|
//! | `log` | the records, in shared memory |
//! | `file` | the records of one file, their states, and which may be sent |

mod file;
pub mod log;
#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::Future;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::{Rc, Weak};
use std::time::Duration;

use rustix::io::Errno;
use tokio::sync::Notify;
use tokio::task::spawn_local;
use tokio::time::{sleep, timeout};

use crate::session::{HandleId, NodeId};
use file::{FileRecords, PendingWrite, WriteOutcome, WritebackStep};
use log::{InheritedRecord, Log, Piece, SEGMENT, WriteTarget};

/// The value that a server sends with each answer, and changes when it restarts (RFC 1813, `writeverf3`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verifier(pub [u8; 8]);

/// A file, and the open file whose credentials are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileKey {
    /// The node.
    pub node: NodeId,
    /// The handle of the open file.
    pub open: HandleId,
}

/// The server's answer to a WRITE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteResult {
    /// The number of bytes that the server took.
    pub count: u32,
    /// Whether the bytes are on disk.
    pub stable: bool,
    /// The server's verifier.
    pub verifier: Verifier,
}

/// The destination of accepted data.
pub trait Store: 'static {
    /// Writes at `offset`. With `stable`, the data is on disk before the server answers.
    ///
    /// # Errors
    /// The server's error, or an error if the server does not answer.
    fn write(
        &self,
        file: FileKey,
        offset: u64,
        data: Piece,
        stable: bool,
    ) -> impl Future<Output = Result<WriteResult, Errno>> + 'static;

    /// Makes the server write all data of a file to disk.
    ///
    /// # Errors
    /// As with `write`.
    fn commit(&self, file: FileKey) -> impl Future<Output = Result<Verifier, Errno>> + 'static;
}

/// The parameters of WRITE calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteParameters {
    /// Most bytes of one write.
    pub wsize: usize,
    /// Each write is on the server's disk before podfs answers it (`sync`, `noac`).
    pub stable: bool,
}

/// Most WRITEs in flight at once.
const IN_FLIGHT: usize = 16;
/// The longest time until a write checks again whether a full log has free space.
const SPACE_CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// The time for which the log must be empty before it gives memory back.
const MEMORY_RETURN_DELAY: Duration = Duration::from_secs(1);

/// Accepted data that the server has not committed yet.
pub struct Writeback<S: Store> {
    inner: Rc<Inner<S>>,
}

struct Inner<S: Store> {
    log: Log,
    store: S,
    parameters: WriteParameters,
    state: RefCell<WritebackState>,
    /// Notifies that the log has freed records.
    freed: Notify,
    /// A task waits for the log to have been empty for a while.
    returning_memory: Cell<bool>,
}

#[derive(Default)]
struct WritebackState {
    files: HashMap<NodeId, FileRecords>,
    /// WRITEs in flight.
    in_flight: usize,
}

impl<S: Store> Writeback<S> {
    /// Writes accepted data to `store`, through `log`. podfs sends the `inherited` records of the log again. Runs on the
    /// [`LocalSet`](tokio::task::LocalSet) of the caller.
    pub fn new(log: Log, inherited: Vec<InheritedRecord>, store: S, parameters: WriteParameters) -> Self {
        let wsize = parameters.wsize.clamp(1, SEGMENT);
        let state = RefCell::new(WritebackState::of(inherited));
        let inner = Inner {
            log,
            store,
            parameters: WriteParameters { wsize, ..parameters },
            state,
            freed: Notify::new(),
            returning_memory: Cell::default(),
        };
        let inner = Rc::new(inner);
        inner.pump_all();
        Self { inner }
    }

    /// Accepts data. Data that a dead server had accepted without an answer is accepted once more, which changes nothing.
    ///
    /// # Errors
    /// The error of an earlier write to the file, if no write has returned it yet. If the writes are stable, or an earlier one
    /// has failed, also the error of this one.
    pub async fn write(&self, file: FileKey, offset: u64, data: &[u8]) -> Result<(), Errno> {
        let inner = &self.inner;
        let mut waits_for_disk = inner.parameters.stable;
        if let Some(known) = inner.state.borrow_mut().files.get_mut(&file.node) {
            known.error_for_writer(file.open)?;
            waits_for_disk |= known.has_failure(file.open);
        }
        let mut done = 0;
        while done < data.len() {
            let part = &data[done..data.len().min(done + inner.parameters.wsize)];
            let target = WriteTarget { node: file.node, open: file.open, offset: offset + done as u64 };
            while !inner.accept(target, part) {
                inner.free_log_space().await;
            }
            done += part.len();
        }
        inner.pump(file.node);
        if waits_for_disk {
            self.wait(file.node, WaitGoal::Flushed).await;
            let mut state = inner.state.borrow_mut();
            state.files.get_mut(&file.node).map_or(Ok(()), |known| known.error_for_writer(file.open))?;
        }
        Ok(())
    }

    /// Waits until the server has all data that was accepted so far for a file, on disk or not. A later flush returns errors.
    pub async fn settle(&self, node: NodeId) {
        self.wait(node, WaitGoal::Settled).await;
    }

    /// Waits until all data that was accepted so far for a file is on disk. A later flush returns errors.
    pub async fn settle_on_disk(&self, node: NodeId) {
        self.wait(node, WaitGoal::Flushed).await;
    }

    /// Waits until all data that was accepted so far for a file is on disk, for fsync. Removes the error that it returns.
    ///
    /// # Errors
    /// The error of a write since the last call.
    pub async fn flush(&self, node: NodeId) -> Result<(), Errno> {
        self.wait(node, WaitGoal::Flushed).await;
        self.inner.take_failure(node)
    }

    /// Waits until all data that was accepted so far for a file is on disk, for a close. Keeps the error for [`Writeback::flush`].
    ///
    /// # Errors
    /// The error of a write since the last flush, if the data was written through this open file or no close has returned the error.
    pub async fn flush_for_close(&self, file: FileKey) -> Result<(), Errno> {
        self.wait(file.node, WaitGoal::Flushed).await;
        let mut state = self.inner.state.borrow_mut();
        state.files.get_mut(&file.node).map_or(Ok(()), |known| known.error_for_close(file.open))
    }

    /// Whether there is data of a file that is not committed, or an error that no flush has returned.
    pub fn is_dirty(&self, node: NodeId) -> bool {
        self.inner.state.borrow().files.contains_key(&node)
    }

    /// Whether there is data of a file that is not committed.
    pub fn has_data(&self, node: NodeId) -> bool {
        self.inner.state.borrow().files.get(&node).is_some_and(FileRecords::has_data)
    }

    /// Whether podfs has not sent some of these bytes of a file yet, or has them in flight.
    pub fn overlaps(&self, node: NodeId, range: Range<u64>) -> bool {
        self.inner.state.borrow().files.get(&node).is_some_and(|file| file.has_unsent(&range))
    }

    /// Bytes that are not committed.
    pub fn uncommitted(&self) -> u64 {
        self.inner.state.borrow().files.values().map(FileRecords::bytes).sum()
    }

    /// An open file is closed for good.
    pub fn close(&self, file: FileKey) {
        if let Some(known) = self.inner.state.borrow_mut().files.get_mut(&file.node) {
            known.close(file.open);
        }
    }

    /// Drops the error of a file that no process has open any more. podfs still sends data of the file that it has accepted.
    pub fn forget_failure(&self, node: NodeId) {
        // No process can get the error.
        let _ = self.inner.take_failure(node);
    }

    /// Waits until the goal is reached for all data that was accepted before the call.
    async fn wait(&self, node: NodeId, goal: WaitGoal) {
        let last = self.inner.state.borrow().files.get(&node).and_then(FileRecords::last_sequence);
        let Some(last) = last else { return };
        loop {
            let changed = match self.inner.state.borrow_mut().files.get_mut(&node) {
                Some(file) if !goal.is_reached(file, last) => {
                    if goal == WaitGoal::Flushed {
                        file.want(last);
                    }
                    file.changed().notified_owned()
                }
                _ => return,
            };
            self.inner.pump(node);
            changed.await;
        }
    }
}

impl<S: Store> AsFd for Writeback<S> {
    /// The log's memory file, to be handed to another process.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.log.as_fd()
    }
}

/// The goal of a wait.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WaitGoal {
    /// The server has taken the data.
    Settled,
    /// The data is on the server's disk.
    Flushed,
}

impl WaitGoal {
    fn is_reached(self, file: &FileRecords, last: u64) -> bool {
        match self {
            Self::Settled => file.is_settled(last),
            Self::Flushed => file.is_flushed(last),
        }
    }
}

impl<S: Store> Inner<S> {
    /// Puts data into the log. Returns `false` without free space.
    fn accept(&self, target: WriteTarget, data: &[u8]) -> bool {
        let mut state = self.state.borrow_mut();
        let file = state.files.entry(target.node).or_default();
        let (key, length) = (FileKey { node: target.node, open: target.open }, data.len() as u64);
        if let Some(record) = file.growing(key, target.offset, length, self.parameters.wsize as u64)
            && self.log.extend(record.id, data)
        {
            record.length += length;
            return true;
        }
        let Some((id, sequence)) = self.log.append(target, data) else {
            state.drop_if_empty(target.node);
            return false;
        };
        file.add(PendingWrite::new(id, sequence, key, target.offset, length));
        true
    }

    /// Starts all calls that can be started for a file.
    fn pump(self: &Rc<Self>, node: NodeId) {
        let full = self.parameters.wsize as u64;
        loop {
            let mut state = self.state.borrow_mut();
            let may_write = state.in_flight < IN_FLIGHT;
            let Some(next) = state.files.get_mut(&node).and_then(|file| file.next(may_write, full)) else {
                state.drop_if_empty(node);
                return;
            };
            state.in_flight += usize::from(matches!(next, WritebackStep::Write { .. }));
            drop(state);
            match next {
                WritebackStep::Write { record, skip, stable } => {
                    drop(spawn_local(Rc::clone(self).send(record, skip, stable)))
                }
                WritebackStep::Commit(key) => drop(spawn_local(Rc::clone(self).commit(key))),
                WritebackStep::Free(free) => self.settle(WriteOutcome { free, fail: None }),
            }
        }
    }

    /// Starts all calls that can be started for any file.
    fn pump_all(self: &Rc<Self>) {
        let nodes: Vec<_> = self.state.borrow().files.keys().copied().collect();
        nodes.into_iter().for_each(|node| self.pump(node));
    }

    /// Waits until there may be more free space in the log.
    async fn free_log_space(self: &Rc<Self>) {
        let freed = self.freed.notified();
        if !self.take_space_of_errors() {
            self.commit_all();
        }
        // A connection that ends does not notify this task when it drops the bytes of its calls.
        let _ = timeout(SPACE_CHECK_INTERVAL, freed).await;
    }

    /// If the log has no data that podfs has to send or to commit, frees its errors. Returns whether there were some.
    fn take_space_of_errors(self: &Rc<Self>) -> bool {
        let mut free = Vec::new();
        let mut state = self.state.borrow_mut();
        if !state.files.values().any(FileRecords::has_data) {
            free.extend(state.files.values_mut().filter_map(FileRecords::take_record_of_failure));
        }
        drop(state);
        let has_some = !free.is_empty();
        self.settle(WriteOutcome { free, fail: None });
        has_some
    }

    /// Starts to commit all files, to free space in the log.
    fn commit_all(self: &Rc<Self>) {
        for file in self.state.borrow_mut().files.values_mut() {
            let last = file.last_sequence();
            last.into_iter().for_each(|last| file.want(last));
        }
        self.pump_all();
    }

    async fn send(self: Rc<Self>, record: PendingWrite, skip: u64, stable: bool) {
        let piece = self.log.piece(record.id, skip as usize);
        let answer = self.store.write(record.key, record.offset + skip, piece, stable || self.parameters.stable).await;
        let node = record.key.node;
        let outcome = {
            let mut state = self.state.borrow_mut();
            state.in_flight -= 1;
            let enough = self.log.capacity() as u64 / 4;
            state.files.get_mut(&node).map(|file| {
                let outcome = file.sent(record.id, answer);
                file.want_if_more(enough);
                outcome
            })
        };
        self.settle(outcome.unwrap_or_default());
        // Another file may have waited because too many WRITEs were in flight.
        self.pump(node);
        self.pump_all();
    }

    async fn commit(self: Rc<Self>, key: FileKey) {
        let answer = self.store.commit(key).await;
        let outcome = self.state.borrow_mut().files.get_mut(&key.node).map(|file| file.committed(answer));
        self.settle(outcome.unwrap_or_default());
        self.pump(key.node);
    }

    /// Records the outcome of records in the log.
    fn settle(self: &Rc<Self>, outcome: WriteOutcome) {
        if let Some((record, error)) = outcome.fail {
            self.log.fail(record, error);
        }
        if !outcome.free.is_empty() {
            outcome.free.into_iter().for_each(|record| self.log.free(record));
            self.freed.notify_waiters();
            if !self.returning_memory.replace(true) {
                spawn_local(Self::return_memory(Rc::downgrade(self)));
            }
        }
    }

    /// Gives back memory of the log that will not be needed soon.
    async fn return_memory(inner: Weak<Self>) {
        let mut accepted = None;
        while let Some(inner) = inner.upgrade() {
            let now = Some(inner.log.next_sequence());
            if accepted == now && inner.log.return_memory() {
                return inner.returning_memory.set(false);
            }
            accepted = now;
            drop(inner);
            sleep(MEMORY_RETURN_DELAY).await;
        }
    }

    /// Returns the error of an earlier write to an fsync, once.
    fn take_failure(self: &Rc<Self>, node: NodeId) -> Result<(), Errno> {
        let mut state = self.state.borrow_mut();
        let failure = state.files.get_mut(&node).and_then(FileRecords::take_failure);
        state.drop_if_empty(node);
        drop(state);
        failure.map_or(Ok(()), |(record, error)| {
            self.settle(WriteOutcome { free: record.into_iter().collect(), fail: None });
            Err(error)
        })
    }
}

impl WritebackState {
    fn of(inherited: Vec<InheritedRecord>) -> Self {
        let mut state = Self::default();
        for one in inherited {
            state.files.entry(one.target.node).or_default().inherit(&one);
        }
        state
    }

    fn drop_if_empty(&mut self, node: NodeId) {
        if self.files.get(&node).is_some_and(FileRecords::is_empty) {
            self.files.remove(&node);
        }
    }
}
