//! One direction of a connection: delayed bytes that were read and not written yet, and the faults applied to them.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::records::{Records, joined};
use crate::nfs_rig::rpc::in_fragments;

/// Records that are held to be put in another order go on when nothing has come for so long: there may be no more.
const HELD: Duration = Duration::from_millis(50);

/// Between pieces that are to arrive one by one.
const GAP: Duration = Duration::from_micros(100);

/// The faults of one direction of a connection; none at first.
#[derive(Clone, Debug, Default)]
pub struct Disturbance {
    /// The delay of all bytes.
    pub delay: Duration,
    /// The faults below apply only to calls of this procedure, and to their replies.
    pub only: Option<u32>,
    /// So many of the next records disappear.
    pub lose: usize,
    /// So many of the next records come twice.
    pub repeat: usize,
    /// So many bytes of the next record arrive, its header included, and the connection ends. With 0 it is lost.
    pub truncate: Option<(usize, End)>,
    /// So many records at a time arrive in the opposite order.
    pub reverse: usize,
    /// Records come in fragments of at most so many bytes.
    pub fragments: Option<usize>,
    /// Bytes come so many at a time, with a little time between.
    pub pieces: Option<usize>,
}

/// The end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// With an end of its stream.
    Fin,
    /// By a reset.
    Rst,
}

/// Something that waits.
pub enum Item {
    Bytes(Vec<u8>),
    /// The whole connection ends.
    End(End),
}

/// The bytes that wait in one direction, and the position of their end in a record.
#[derive(Default)]
pub struct Flow {
    records: Records,
    /// The present record, as far as it has come, if it may have to be changed.
    whole: Option<Vec<u8>>,
    held: Vec<Vec<u8>>,
    held_since: Option<Instant>,
    queue: VecDeque<(Instant, Item)>,
    /// Bytes that wait.
    pub waiting: usize,
    /// Nothing more is read.
    pub ended: bool,
}

impl Disturbance {
    fn changes_records(&self) -> bool {
        let Self { lose, repeat, truncate, reverse, fragments, .. } = self;
        *lose > 0 || *repeat > 0 || truncate.is_some() || *reverse > 1 || fragments.is_some()
    }
}

impl Flow {
    /// Takes bytes that were read. `procedure` gets the head of each complete record, and returns the called procedure.
    pub fn take(
        &mut self,
        mut bytes: &[u8],
        disturbance: &mut Disturbance,
        mut procedure: impl FnMut(&[u8]) -> Option<u32>,
    ) {
        while !bytes.is_empty() {
            if self.records.between() && self.whole.is_none() && disturbance.changes_records() {
                self.whole = Some(Vec::new());
            }
            let (taken, head) = self.records.take(bytes);
            let (part, rest) = bytes.split_at(taken);
            bytes = rest;
            match &mut self.whole {
                Some(whole) => whole.extend(part),
                None => self.wait(part.to_vec(), disturbance),
            }
            let Some(head) = head else { continue };
            let procedure = procedure(&head);
            if let Some(record) = self.whole.take() {
                if disturbance.only.is_none_or(|only| procedure == Some(only)) {
                    self.change(record, disturbance);
                } else {
                    self.wait(record, disturbance);
                }
            }
        }
    }

    /// Releases held bytes that wait for more bytes in vain.
    pub fn release(&mut self, now: Instant, disturbance: &Disturbance) {
        if self.held_since.is_some_and(|since| now >= since + HELD) {
            self.release_all(disturbance);
        }
    }

    /// The first thing whose time has come; it stays where it is.
    pub fn due(&self, now: Instant) -> Option<&Item> {
        self.queue.front().filter(|(due, _)| *due <= now).map(|(_, item)| item)
    }

    /// When there is something to do again without new bytes.
    pub fn next(&self) -> Option<Instant> {
        let due = self.queue.front().map(|(due, _)| *due);
        due.into_iter().chain(self.held_since.map(|since| since + HELD)).min()
    }

    /// So many bytes of the first thing have been written.
    pub fn written(&mut self, count: usize) {
        self.waiting -= count;
        if let Some((_, Item::Bytes(bytes))) = self.queue.front_mut() {
            bytes.drain(..count);
            if bytes.is_empty() {
                self.queue.pop_front();
            }
        }
    }

    /// All that was read has been written.
    pub fn is_done(&self) -> bool {
        self.ended && self.queue.is_empty() && self.held.is_empty()
    }

    fn change(&mut self, mut record: Vec<u8>, disturbance: &mut Disturbance) {
        if disturbance.lose > 0 {
            disturbance.lose -= 1;
            return;
        }
        if let Some((count, end)) = disturbance.truncate.take() {
            record.truncate(count);
            self.wait(record, disturbance);
            self.queue.push_back((Instant::now() + disturbance.delay, Item::End(end)));
            return;
        }
        if let Some(size) = disturbance.fragments {
            record = in_fragments(&joined(&record), size);
        }
        if disturbance.repeat > 0 {
            disturbance.repeat -= 1;
            self.wait(record.clone(), disturbance);
        }
        if disturbance.reverse > 1 {
            self.held.push(record);
            self.held_since = Some(Instant::now());
            if self.held.len() >= disturbance.reverse {
                self.release_all(disturbance);
            }
        } else {
            self.wait(record, disturbance);
        }
    }

    fn release_all(&mut self, disturbance: &Disturbance) {
        self.held_since = None;
        for record in std::mem::take(&mut self.held).into_iter().rev() {
            self.wait(record, disturbance);
        }
    }

    fn wait(&mut self, bytes: Vec<u8>, disturbance: &Disturbance) {
        let mut due = Instant::now() + disturbance.delay;
        self.waiting += bytes.len();
        let Some(size) = disturbance.pieces else {
            if !bytes.is_empty() {
                self.queue.push_back((due, Item::Bytes(bytes)));
            }
            return;
        };
        // They follow the waiting bytes.
        due = self.queue.back().map_or(due, |(last, _)| due.max(*last + GAP));
        for piece in bytes.chunks(size) {
            self.queue.push_back((due, Item::Bytes(piece.to_vec())));
            due += GAP;
        }
    }
}
