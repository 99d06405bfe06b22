//! The records of one file: those that podfs still has to send, those that the server has taken, and the next step.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use rustix::io::Errno;
use tokio::sync::Notify;

use super::log::{InheritedRecord, RecordId};
use super::{FileKey, Verifier, WriteResult};
use crate::session::HandleId;

/// Most records behind the first that are searched for one that may be sent.
const LOOK_AHEAD: usize = 64;
/// While this many WRITEs of a file are in flight, podfs does not send a record that may still grow.
const BEFORE_GROWING: usize = 2;
/// The number of losses of accepted data after which podfs makes the server write to disk before each answer (`FILE_SYNC`).
const MOST_LOSSES: u32 = 3;

/// The records of a file, and their states.
#[derive(Default)]
pub struct FileRecords {
    /// Records that the server has not taken, in the order in which podfs accepted them.
    unsent: VecDeque<PendingWrite>,
    /// Records that the server has taken, and may not have on disk.
    taken: Vec<PendingWrite>,
    /// The bytes of `taken`.
    taken_bytes: u64,
    /// The verifier of the server's answers about `taken`.
    verifier: Option<Verifier>,
    /// The number of times that the verifier changed and podfs sent all records again, since the last COMMIT that succeeded.
    losses: u32,
    /// The number of records of `taken` that the COMMIT in flight covers; none without one.
    committing: Option<usize>,
    /// The COMMIT in flight covers records that podfs has to send again by now, so its answer does not count.
    is_commit_void: bool,
    /// A flush waits until all records up to this number are on disk.
    wanted: u64,
    failure: Option<WriteFailure>,
    changed: Arc<Notify>,
}

/// Data in the log.
#[derive(Clone, Copy, Debug)]
pub struct PendingWrite {
    /// Its place in the log.
    pub id: RecordId,
    /// Its number.
    pub sequence: u64,
    /// The file that it is written to, and the open file whose credential is used.
    pub key: FileKey,
    /// Its offset in the file, in bytes.
    pub offset: u64,
    /// Its length, in bytes.
    pub length: u64,
    /// The bytes of it that the server has taken.
    done: u64,
    stable: bool,
    state: SendState,
}

/// The state of a record that the server has not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SendState {
    /// podfs has to send it.
    Waiting,
    /// It is in flight.
    Sending,
    /// It is in flight, and podfs has to send it again: the server restarted, and an older record has to be sent first.
    SendingOutdated,
}

/// A failed write.
struct WriteFailure {
    error: Errno,
    /// The record that keeps the error in the log; none if podfs has given its room to data.
    record: Option<RecordId>,
    /// The open files through which the lost data was written.
    opens: Vec<HandleId>,
    /// A write(2) has returned the error.
    writer_knows: bool,
    /// A close(2) has returned the error.
    closer_knows: bool,
}

impl WriteFailure {
    fn new(error: Errno) -> Self {
        Self { error, record: None, opens: Vec::new(), writer_knows: false, closer_knows: false }
    }

    /// Whether a write or a close of this open file has to return the error: the data was written through it, or no close has
    /// returned the error yet, for example because a process has changed the file through a mapping.
    fn concerns(&self, open: HandleId) -> bool {
        !self.closer_knows || self.opens.contains(&open)
    }
}

/// The next step for a file.
#[derive(Debug)]
pub enum WritebackStep {
    /// Send this record, from its byte number `skip` on.
    Write {
        /// The record.
        record: PendingWrite,
        /// The number of bytes of the record that the server has.
        skip: u64,
        /// The server must have it on disk before it answers, also if the volume's `WriteParameters` does not say so.
        stable: bool,
    },
    /// Send a COMMIT of the file.
    Commit(FileKey),
    /// Free these records: the server had them on disk when it answered.
    Free(Vec<RecordId>),
}

/// The outcome of a WRITE or COMMIT for records.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct WriteOutcome {
    /// Records that are not needed any more.
    pub free: Vec<RecordId>,
    /// The record that keeps an error in the log, and the error.
    pub fail: Option<(RecordId, Errno)>,
}

impl PendingWrite {
    /// A record that was just accepted.
    pub fn new(id: RecordId, sequence: u64, key: FileKey, offset: u64, length: u64) -> Self {
        Self { id, sequence, key, offset, length, done: 0, stable: false, state: SendState::Waiting }
    }

    /// Records that the server has taken `count` more bytes. Returns whether it has all of them.
    fn take(&mut self, count: u32) -> bool {
        self.done = self.length.min(self.done + u64::from(count));
        self.state = SendState::Waiting;
        self.done == self.length
    }

    fn range(&self) -> Range<u64> {
        self.offset..self.offset.saturating_add(self.length)
    }

    /// The record, to be sent from its first byte.
    fn reset(mut self) -> Self {
        (self.done, self.stable, self.state) = (0, false, SendState::Waiting);
        self
    }
}

impl FileRecords {
    /// Takes over a record of a dead server. Called for one record after the other, in their order.
    pub fn inherit(&mut self, one: &InheritedRecord) {
        let key = FileKey { node: one.target.node, open: one.target.open };
        match one.length {
            Ok(length) => {
                self.unsent.push_back(PendingWrite::new(one.id, one.sequence, key, one.target.offset, length.into()));
            }
            Err(error) => {
                let (record, opens) = (Some(one.id), vec![key.open]);
                self.failure = Some(WriteFailure { record, opens, ..WriteFailure::new(error) });
            }
        }
    }

    /// Adds an accepted record.
    pub fn add(&mut self, record: PendingWrite) {
        self.unsent.push_back(record);
    }

    /// The record that data for `offset` may be added to, if it gets no longer than `most`.
    pub fn growing(&mut self, key: FileKey, offset: u64, length: u64, most: u64) -> Option<&mut PendingWrite> {
        let last = self.unsent.back_mut()?;
        let grows = last.state == SendState::Waiting && last.done == 0 && last.key == key;
        (grows && last.range().end == offset && last.length + length <= most).then_some(last)
    }

    /// The next call to make; it counts as begun.
    pub fn next(&mut self, may_write: bool, full: u64) -> Option<WritebackStep> {
        if may_write && let Some(position) = self.sendable().filter(|position| !self.may_wait(*position, full)) {
            let record = &mut self.unsent[position];
            record.state = SendState::Sending;
            let (record, stable) = (*record, self.has_unstable_verifier());
            return Some(WritebackStep::Write { record, skip: record.done, stable });
        }
        self.next_commit()
    }

    fn sendable(&self) -> Option<usize> {
        let overlap = |a: &Range<u64>, b: &Range<u64>| a.start < b.end && b.start < a.end;
        let mut older: Vec<Range<u64>> = Vec::new();
        let first = self.unsent.iter().position(|record| record.state == SendState::Waiting)?;
        for (position, record) in self.unsent.iter().enumerate().take(first + LOOK_AHEAD) {
            let range = record.range();
            if record.state == SendState::Waiting && !older.iter().any(|older| overlap(older, &range)) {
                return Some(position);
            }
            older.push(range);
        }
        None
    }

    /// Whether a record should rather grow while others are on their way: few large writes cost the server less than many
    /// small ones.
    fn may_wait(&self, position: usize, full: u64) -> bool {
        let record = &self.unsent[position];
        let may_grow = position + 1 == self.unsent.len() && record.done == 0 && record.length < full;
        let sending = self.unsent.iter().filter(|record| record.state != SendState::Waiting).count();
        may_grow && record.sequence > self.wanted && sending >= BEFORE_GROWING
    }

    fn next_commit(&mut self) -> Option<WritebackStep> {
        let is_sent = self.unsent.front().is_none_or(|record| record.sequence > self.wanted);
        let key = self.taken.iter().find(|record| record.sequence <= self.wanted)?.key;
        if self.committing.is_some() || !is_sent {
            return None;
        }
        if self.taken.iter().all(|record| record.stable) {
            let free = ids_of(&self.remove_taken(self.taken.len()));
            self.changed.notify_waiters();
            return Some(WritebackStep::Free(free));
        }
        (self.committing, self.is_commit_void) = (Some(self.taken.len()), false);
        Some(WritebackStep::Commit(key))
    }

    /// Takes the server's answer about a record that was sent.
    pub fn sent(&mut self, id: RecordId, answer: Result<WriteResult, Errno>) -> WriteOutcome {
        self.changed.notify_waiters();
        let Some(position) = self.unsent.iter().position(|record| record.id == id) else {
            return WriteOutcome::default();
        };
        let written = match answer {
            // podfs would send the record for ever.
            Ok(WriteResult { count: 0, .. }) if self.unsent[position].length > 0 => Err(Errno::IO),
            answer => answer,
        };
        let WriteResult { count, stable, verifier } = match written {
            Ok(written) => written,
            Err(error) => {
                let lost = self.unsent.remove(position);
                return self.fail(error, lost.as_slice());
            }
        };
        if self.has_unstable_verifier() && self.unsent[position].state == SendState::Sending {
            return self.sent_stable(position, count, stable);
        }
        let is_other = self.verifier.is_some_and(|known| known != verifier);
        let is_outdated = self.unsent[position].state == SendState::SendingOutdated;
        let may_be_lost = is_other && (!self.taken.is_empty() || self.unsent.iter().any(|record| record.done > 0));
        self.verifier = Some(verifier);
        if may_be_lost || is_outdated {
            self.unsent[position].state = SendState::Waiting;
            self.unsent[position].done = 0;
            if may_be_lost {
                self.send_again();
            }
            return WriteOutcome::default();
        }
        let record = &mut self.unsent[position];
        // The server answers each part of a record, and may have only some parts on disk.
        record.stable = stable && (record.done == 0 || record.stable);
        if record.take(count) {
            self.taken_bytes += record.length;
            let record = self.unsent.remove(position);
            self.taken.extend(record);
        }
        WriteOutcome::default()
    }

    /// Takes the answer about a record that was sent as `FILE_SYNC`. Its verifier does not matter, and podfs sends no older record
    /// over it later.
    fn sent_stable(&mut self, position: usize, count: u32, stable: bool) -> WriteOutcome {
        let is_whole = self.unsent[position].take(count);
        let record = if is_whole || !stable { self.unsent.remove(position) } else { None };
        if !stable {
            // The server did not write to disk as requested, so podfs does not know which data it has.
            return self.fail(Errno::IO, record.as_slice());
        }
        WriteOutcome { free: record.map(|record| record.id).into_iter().collect(), fail: None }
    }

    /// Takes the server's answer to a COMMIT.
    pub fn committed(&mut self, answer: Result<Verifier, Errno>) -> WriteOutcome {
        self.changed.notify_waiters();
        let count = self.committing.take().unwrap_or(0).min(self.taken.len());
        if self.is_commit_void {
            return WriteOutcome::default();
        }
        match answer {
            Ok(verifier) if self.verifier == Some(verifier) => {
                self.losses = 0;
                WriteOutcome { free: ids_of(&self.remove_taken(count)), fail: None }
            }
            Ok(verifier) => {
                self.verifier = Some(verifier);
                self.send_again();
                WriteOutcome::default()
            }
            Err(error) => {
                let lost = self.remove_taken(count);
                self.fail(error, &lost)
            }
        }
    }

    /// Removes and returns the first `count` records that the server has taken.
    fn remove_taken(&mut self, count: usize) -> Vec<PendingWrite> {
        let gone: Vec<_> = self.taken.drain(..count).collect();
        self.taken_bytes -= gone.iter().map(|record| record.length).sum::<u64>();
        gone
    }

    /// Prepares to send all records again, because the server may have lost data that was not on its disk.
    fn send_again(&mut self) {
        (self.is_commit_void, self.taken_bytes) = (true, 0);
        self.losses = self.losses.saturating_add(1);
        for record in &mut self.unsent {
            if record.state == SendState::Sending {
                record.state = SendState::SendingOutdated;
            }
            record.done = 0;
        }
        self.unsent.extend(self.taken.drain(..).map(PendingWrite::reset));
        self.unsent.make_contiguous().sort_unstable_by_key(|record| record.sequence);
    }

    /// Whether the server's verifier changes so often that a COMMIT proves nothing.
    fn has_unstable_verifier(&self) -> bool {
        self.losses >= MOST_LOSSES
    }

    /// Keeps the error of lost records. One of them keeps it in the log.
    fn fail(&mut self, error: Errno, lost: &[PendingWrite]) -> WriteOutcome {
        let mut outcome = WriteOutcome { free: ids_of(lost), fail: None };
        if lost.is_empty() {
            return outcome;
        }
        let failure = self.failure.get_or_insert_with(|| WriteFailure::new(error));
        if failure.record.is_none() {
            failure.record = outcome.free.pop();
            outcome.fail = failure.record.map(|record| (record, failure.error));
        }
        (failure.writer_knows, failure.closer_knows) = (false, false);
        failure.opens.extend(lost.iter().map(|record| record.key.open));
        failure.opens.sort_unstable();
        failure.opens.dedup();
        outcome
    }

    /// From now on, a flush waits until all records up to `sequence` are on disk.
    pub fn want(&mut self, sequence: u64) {
        self.wanted = self.wanted.max(sequence);
    }

    /// Returns an error to a writer, once.
    ///
    /// # Errors
    /// The error of an earlier write, if it [concerns](WriteFailure::concerns) this open file and no write has returned it yet.
    pub fn error_for_writer(&mut self, open: HandleId) -> Result<(), Errno> {
        match &mut self.failure {
            Some(failure) if !failure.writer_knows && failure.concerns(open) => {
                failure.writer_knows = true;
                Err(failure.error)
            }
            _ => Ok(()),
        }
    }

    /// Returns an error to each close of an open file that it [concerns](WriteFailure::concerns).
    ///
    /// # Errors
    /// The error of a write that no fsync has returned yet.
    pub fn error_for_close(&mut self, open: HandleId) -> Result<(), Errno> {
        match &mut self.failure {
            Some(failure) if failure.concerns(open) => {
                failure.closer_knows = true;
                Err(failure.error)
            }
            _ => Ok(()),
        }
    }

    /// Removes and returns the error for fsync, and the record that keeps the error in the log.
    pub fn take_failure(&mut self) -> Option<(Option<RecordId>, Errno)> {
        self.failure.take().map(|failure| (failure.record, failure.error))
    }

    /// Removes and returns the record that keeps the error in the log. The error stays in memory alone.
    pub fn take_record_of_failure(&mut self) -> Option<RecordId> {
        self.failure.as_mut().and_then(|failure| failure.record.take())
    }

    /// An open file is closed for good. The error does not concern it any more, unless data of it is still to be sent.
    pub fn close(&mut self, open: HandleId) {
        let has_data = self.unsent.iter().chain(&self.taken).any(|record| record.key.open == open);
        if let Some(failure) = self.failure.as_mut().filter(|_| !has_data) {
            failure.opens.retain(|other| *other != open);
        }
    }

    /// Whether a write has failed, and the error [concerns](WriteFailure::concerns) this open file. Then each write through it waits
    /// for its own outcome.
    pub fn has_failure(&self, open: HandleId) -> bool {
        self.failure.as_ref().is_some_and(|failure| failure.concerns(open))
    }

    /// Whether the file has no record, no failure and no COMMIT in flight.
    pub fn is_empty(&self) -> bool {
        self.unsent.is_empty() && self.taken.is_empty() && self.failure.is_none() && self.committing.is_none()
    }

    /// Whether the server has taken all records up to this number.
    pub fn is_settled(&self, last: u64) -> bool {
        self.unsent.front().is_none_or(|record| record.sequence > last)
    }

    /// Whether all records up to this number are on disk.
    pub fn is_flushed(&self, last: u64) -> bool {
        self.is_settled(last) && self.taken.iter().all(|record| record.sequence > last)
    }

    /// Whether the server has not taken some of these bytes.
    pub fn has_unsent(&self, range: &Range<u64>) -> bool {
        self.unsent.iter().any(|record| record.offset < range.end && range.start < record.range().end)
    }

    /// Whether there is data that is not committed.
    pub fn has_data(&self) -> bool {
        !self.unsent.is_empty() || !self.taken.is_empty()
    }

    /// The number of the last accepted record.
    pub fn last_sequence(&self) -> Option<u64> {
        self.unsent.iter().chain(&self.taken).map(|record| record.sequence).max()
    }

    /// The bytes of the file in the log.
    pub fn bytes(&self) -> u64 {
        self.unsent.iter().chain(&self.taken).map(|record| record.length).sum()
    }

    /// Requests a COMMIT of all that the server has taken, if it is more than `enough` bytes.
    pub fn want_if_more(&mut self, enough: u64) {
        if self.taken_bytes > enough {
            self.want(self.taken.iter().map(|record| record.sequence).max().unwrap_or(0));
        }
    }

    /// Notifies of changes.
    pub fn changed(&self) -> Arc<Notify> {
        Arc::clone(&self.changed)
    }
}

/// The places of records in the log.
fn ids_of(records: &[PendingWrite]) -> Vec<RecordId> {
    records.iter().map(|record| record.id).collect()
}
