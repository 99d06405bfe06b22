//! One direction of a connection: the bytes that the proxy has read and not written yet, and the faults that it applies
//! to them.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::records::{Records, joined};
use crate::nfs_rig::rpc::in_fragments;

/// Records that wait for more records, to be sent in another order, are released after this time without a new record:
/// no more may come.
const HELD: Duration = Duration::from_millis(50);

/// The time between pieces that are to arrive one by one.
const GAP: Duration = Duration::from_micros(100);

/// The faults of one direction of the connections. The default is no fault.
#[derive(Clone, Debug, Default)]
pub struct Disturbance {
    /// The delay of all bytes.
    pub delay: Duration,
    /// The faults below apply only to calls of this procedure, and to their replies.
    pub only: Option<u32>,
    /// The number of the next records that the proxy drops.
    pub lose: usize,
    /// The number of the next records that arrive twice.
    pub repeat: usize,
    /// The number of bytes of the next record that arrive, with its header; then the connection ends. With 0, the
    /// record is lost.
    pub truncate: Option<(usize, End)>,
    /// The number of records that the proxy collects and sends in the opposite order.
    pub reverse: usize,
    /// The most bytes of a fragment into which the proxy splits the records.
    pub fragments: Option<usize>,
    /// The number of bytes of a piece: the bytes arrive in pieces, with a short time between them.
    pub pieces: Option<usize>,
}

/// The end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The regular end of the stream.
    Fin,
    /// A reset.
    Rst,
}

/// An element of the queue.
pub enum Item {
    Bytes(Vec<u8>),
    /// The end of the whole connection.
    End(End),
}

/// The queued bytes of one direction, and the position of the next byte in its record.
#[derive(Default)]
pub struct Flow {
    records: Records,
    /// The bytes of the present record that have come, if a fault may change the record.
    partial: Option<Vec<u8>>,
    /// The records that wait for more records, to be sent in the opposite order.
    held: Vec<Vec<u8>>,
    held_since: Option<Instant>,
    /// Each item with the time at which it is due.
    queue: VecDeque<(Instant, Item)>,
    /// The number of bytes in `queue`.
    pub waiting: usize,
    /// Whether the sender has ended its stream.
    pub ended: bool,
}

impl Disturbance {
    fn changes_records(&self) -> bool {
        let Self { lose, repeat, truncate, reverse, fragments, .. } = self;
        *lose > 0 || *repeat > 0 || truncate.is_some() || *reverse > 1 || fragments.is_some()
    }
}

impl Flow {
    /// Adds bytes that the proxy has read. `procedure` gets the head of each complete record, and returns the called
    /// procedure.
    pub fn add(
        &mut self,
        mut bytes: &[u8],
        disturbance: &mut Disturbance,
        mut procedure: impl FnMut(&[u8]) -> Option<u32>,
    ) {
        while !bytes.is_empty() {
            if self.records.between() && self.partial.is_none() && disturbance.changes_records() {
                self.partial = Some(Vec::new());
            }
            let (length, head) = self.records.take(bytes);
            let (part, following) = bytes.split_at(length);
            bytes = following;
            match &mut self.partial {
                Some(partial) => partial.extend(part),
                None => self.enqueue(part.to_vec(), disturbance),
            }
            let Some(head) = head else { continue };
            let procedure = procedure(&head);
            if let Some(record) = self.partial.take() {
                if disturbance.only.is_none_or(|only| procedure == Some(only)) {
                    self.change(record, disturbance);
                } else {
                    self.enqueue(record, disturbance);
                }
            }
        }
    }

    /// Releases the held records if no further record has come within [`HELD`].
    pub fn release(&mut self, now: Instant, disturbance: &Disturbance) {
        if self.held_since.is_some_and(|since| now >= since + HELD) {
            self.release_all(disturbance);
        }
    }

    /// The first item of the queue, if it is due. It stays in the queue.
    pub fn due(&self, now: Instant) -> Option<&Item> {
        self.queue.front().filter(|(due, _)| *due <= now).map(|(_, item)| item)
    }

    /// The next time at which an item is due or held records are released.
    pub fn next(&self) -> Option<Instant> {
        let due = self.queue.front().map(|(due, _)| *due);
        due.into_iter().chain(self.held_since.map(|since| since + HELD)).min()
    }

    /// Removes bytes that the proxy has written from the first item.
    pub fn remove_written(&mut self, count: usize) {
        self.waiting -= count;
        if let Some((_, Item::Bytes(bytes))) = self.queue.front_mut() {
            bytes.drain(..count);
            if bytes.is_empty() {
                self.queue.pop_front();
            }
        }
    }

    /// Whether the stream has ended and the proxy has written all its bytes.
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
            self.enqueue(record, disturbance);
            self.queue.push_back((Instant::now() + disturbance.delay, Item::End(end)));
            return;
        }
        if let Some(size) = disturbance.fragments {
            record = in_fragments(&joined(&record), size);
        }
        if disturbance.repeat > 0 {
            disturbance.repeat -= 1;
            self.enqueue(record.clone(), disturbance);
        }
        if disturbance.reverse > 1 {
            self.held.push(record);
            self.held_since = Some(Instant::now());
            if self.held.len() >= disturbance.reverse {
                self.release_all(disturbance);
            }
        } else {
            self.enqueue(record, disturbance);
        }
    }

    fn release_all(&mut self, disturbance: &Disturbance) {
        self.held_since = None;
        for record in std::mem::take(&mut self.held).into_iter().rev() {
            self.enqueue(record, disturbance);
        }
    }

    fn enqueue(&mut self, bytes: Vec<u8>, disturbance: &Disturbance) {
        let mut due = Instant::now() + disturbance.delay;
        self.waiting += bytes.len();
        let Some(size) = disturbance.pieces else {
            if !bytes.is_empty() {
                self.queue.push_back((due, Item::Bytes(bytes)));
            }
            return;
        };
        // The pieces follow the queued bytes.
        due = self.queue.back().map_or(due, |(last, _)| due.max(*last + GAP));
        for piece in bytes.chunks(size) {
            self.queue.push_back((due, Item::Bytes(piece.to_vec())));
            due += GAP;
        }
    }
}
