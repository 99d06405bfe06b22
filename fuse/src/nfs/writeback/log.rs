//! The log: data that podfs has accepted, in memory that outlives the process.
//!
//! The memory file has a header and then segments, each with room for a fixed number of records and for their bytes.
//! Records are added to one segment until it is full. A segment is used again when none of its records is in use, so
//! files need not be committed in the order in which they were written. It is not used again either while there is a piece of it:
//! a connection sends a WRITE whose sending has begun to its end, also if the call was given up and its record was freed.
//!
//! 1. A record's state is written last when it begins and first when it ends. *Killed between:* the data is not accepted yet, and
//!    the kernel sends it again; or it is not needed any more.
//! 2. When a record grows, podfs writes its bytes, and then its length. *Killed between, or before the answer:* the kernel sends
//!    the request again, and podfs adds the data once more behind the same data; that changes nothing.
//! 3. A segment has memory before podfs writes to it: on a host without memory, the write fails, and the kernel does not kill the
//!    server. The segment keeps its memory until the volume has no use for it ([`return_memory`](Log::return_memory)).

#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::io::Errno;

use crate::region::memory::{Memory, length_of, may_be_mapped};
use crate::region::shared::shared;
use crate::session::{HandleId, NodeId};

/// Most bytes of one record, and of all records of a segment.
pub const SEGMENT: usize = 1 << 20;
/// Records of a segment.
const RECORDS: usize = 256;
/// Bytes from one segment to the next.
const STRIDE: usize = SEGMENT + RECORDS * size_of::<RecordCell>();
/// Bytes before the first segment.
const HEADER: usize = 4096;
/// The first bytes of a log: `podfslog`.
const MAGIC: u64 = u64::from_le_bytes(*b"podfslog");
/// The layout that this program writes, and the only one it reads.
const LAYOUT: u32 = 1;
/// Segments that keep their memory when nothing is in the log.
const WARM: usize = 8;

const FREE: u32 = 0;
const DATA: u32 = 1;
const FAILED: u32 = 2;

shared! {
    pub(crate) struct LogHeader {
        magic: AtomicU64,
        layout: AtomicU32,
        /// Most segments.
        segments: AtomicU32,
    }
    pub(crate) struct RecordCell {
        /// [`FREE`], [`DATA`] or [`FAILED`].
        state: AtomicU32,
        length: AtomicU32,
        node: AtomicU64,
        /// The open file it was written through.
        open: AtomicU64,
        /// The offset of the data in the file, in bytes; in a failed record, the error.
        offset: AtomicU64,
        /// The record's number. Later records have larger numbers.
        sequence: AtomicU64,
        /// The offset of its bytes in the segment.
        place: AtomicU32,
        spare: [AtomicU32; 5],
    }
}

/// Why a memory file cannot be taken over as the log of a volume.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// It cannot be mapped.
    #[error("the log of data written to the volume cannot be mapped: {0}")]
    Memory(#[from] io::Error),
    /// Another program wrote it, or it is damaged.
    #[error("this version of podfs cannot read the log of data written to the volume; start the volume anew")]
    Foreign,
    /// Another version of podfs wrote it.
    #[error(
        "the log of data written to the volume has {what} {value}, which another version of podfs wrote; serve the volume with that \
         version, or start the volume anew, which loses the data"
    )]
    OtherVersion {
        /// The meaning of the number.
        what: &'static str,
        /// The number.
        value: u32,
    },
}

/// A place in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RecordId {
    segment: u32,
    index: u32,
}

/// The file that data is written to, and the offset in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteTarget {
    /// The file.
    pub node: NodeId,
    /// The open file it was written through.
    pub open: HandleId,
    /// The offset in the file, in bytes.
    pub offset: u64,
}

/// A record that a dead server left in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InheritedRecord {
    /// Its place in the log.
    pub id: RecordId,
    /// The file that it is written to, and the offset in it.
    pub target: WriteTarget,
    /// Its length in bytes, or the error if the write failed.
    pub length: Result<u32, Errno>,
    /// The record's number. Later records have larger numbers.
    pub sequence: u64,
}

/// Data that was accepted, and not committed yet.
pub struct Log {
    memory: Rc<Memory>,
    most: usize,
    segments: RefCell<Vec<Segment>>,
    /// The segment that is being filled.
    current: Cell<Option<usize>>,
    sequence: Cell<u64>,
}

/// The state of a segment in this process.
#[derive(Clone, Default)]
struct Segment {
    has_memory: bool,
    /// Records that are in use.
    used: usize,
    /// Records and bytes that were given out since it was last unused.
    records: usize,
    bytes: usize,
    /// Each piece of the segment has a clone of this.
    in_use: Rc<()>,
}

impl Segment {
    /// Whether none of its records is in use, and there is no piece of it.
    fn is_unused(&self) -> bool {
        self.used == 0 && Rc::strong_count(&self.in_use) == 1
    }
}

impl Log {
    /// An empty log of at most `segments` segments.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn create(segments: usize) -> io::Result<Log> {
        let memory = Memory::create(HEADER, HEADER + segments * STRIDE)?;
        let log = Self::over(memory, segments);
        let header = log.header();
        header.layout.store(LAYOUT, Relaxed);
        header.segments.store(segments as u32, Relaxed);
        header.magic.store(MAGIC, Release);
        Ok(log)
    }

    /// The log of a dead server, and its records in the order in which that server accepted them. A record that contradicts
    /// itself is lost.
    ///
    /// # Errors
    /// When this program cannot read it. The log is unchanged then.
    pub fn adopt(file: OwnedFd) -> Result<(Log, Vec<InheritedRecord>), LogError> {
        let length = length_of(&file)?;
        if length < HEADER || !may_be_mapped(&file) {
            return Err(LogError::Foreign);
        }
        let head = Memory::map(file.try_clone().map_err(LogError::Memory)?, HEADER, HEADER)?;
        let header: &LogHeader = head.at(0).ok_or(LogError::Foreign)?;
        let most = header.segments.load(Relaxed) as usize;
        if header.magic.load(Acquire) != MAGIC {
            return Err(LogError::Foreign);
        }
        match header.layout.load(Relaxed) {
            LAYOUT if most <= MOST_SEGMENTS => {}
            LAYOUT => return Err(LogError::Foreign),
            value => return Err(LogError::OtherVersion { what: "layout", value }),
        }
        let log = Self::over(Memory::map(file, length, HEADER + most * STRIDE)?, most);
        // Before `read` frees a record: data in an unknown state may be data that was accepted.
        if let Some(value) = log.unknown_state() {
            return Err(LogError::OtherVersion { what: "a record of state", value });
        }
        let inherited = log.read();
        Ok((log, inherited))
    }

    fn over(memory: Memory, most: usize) -> Log {
        let segments = RefCell::new((0..most).map(|_| Segment::default()).collect());
        Log { memory: Rc::new(memory), most, segments, current: Cell::new(None), sequence: Cell::new(1) }
    }

    /// The number of segments in the file.
    fn there(&self) -> usize {
        (self.memory.length() - HEADER) / STRIDE
    }

    /// A state of a record that this version of podfs does not know, if there is one.
    fn unknown_state(&self) -> Option<u32> {
        let segments = (0..self.there().min(self.most)).map(|segment| segment as u32);
        let records =
            segments.flat_map(|segment| (0..RECORDS).map(move |index| RecordId { segment, index: index as u32 }));
        let mut states = records.filter_map(|id| Some(self.cell(id)?.state.load(Acquire)));
        states.find(|state| !matches!(*state, FREE | DATA | FAILED))
    }

    fn read(&self) -> Vec<InheritedRecord> {
        let mut inherited = Vec::new();
        let there = self.there();
        for (number, segment) in self.segments.borrow_mut().iter_mut().enumerate().take(there) {
            for index in 0..RECORDS {
                let id = RecordId { segment: number as u32, index: index as u32 };
                let Some(cell) = self.cell(id) else { continue };
                match parse(id, cell) {
                    Some(one) => {
                        segment.used += 1;
                        inherited.push(one);
                    }
                    None => cell.state.store(FREE, Release),
                }
            }
            // The unused part of a segment with records is not used before the segment is empty.
            (segment.records, segment.bytes, segment.has_memory) = (RECORDS, SEGMENT, segment.used > 0);
            if segment.used == 0 {
                *segment = Segment::default();
            }
        }
        inherited.sort_unstable_by_key(|one| one.sequence);
        self.sequence.set(inherited.last().map_or(1, |last| last.sequence.saturating_add(1)));
        inherited
    }

    /// Accepts data of at most [`SEGMENT`] bytes. Returns the place and the number of the new record; none without room.
    pub fn append(&self, target: WriteTarget, data: &[u8]) -> Option<(RecordId, u64)> {
        let (segment, index, place) = self.allot(data.len())?;
        let id = RecordId { segment: segment as u32, index: index as u32 };
        self.fill(id, place, data);
        let sequence = self.sequence.replace(self.sequence.get() + 1);
        let cell = self.cell(id)?;
        cell.length.store(data.len() as u32, Relaxed);
        cell.node.store(target.node.0, Relaxed);
        cell.open.store(target.open.0, Relaxed);
        cell.offset.store(target.offset, Relaxed);
        cell.sequence.store(sequence, Relaxed);
        cell.place.store(place as u32, Relaxed);
        cell.state.store(DATA, Release);
        Some((id, sequence))
    }

    /// Adds data to a record, if it is the last record of its segment and there is room. Returns whether it has.
    pub fn extend(&self, id: RecordId, data: &[u8]) -> bool {
        let Some(cell) = self.cell(id) else { return false };
        let (place, length) = (cell.place.load(Relaxed) as usize, cell.length.load(Relaxed) as usize);
        {
            let mut segments = self.segments.borrow_mut();
            let segment = &mut segments[id.segment as usize];
            let is_last = segment.records == id.index as usize + 1 && segment.bytes == place + length;
            if !is_last || segment.bytes + data.len() > SEGMENT {
                return false;
            }
            segment.bytes += data.len();
        }
        self.fill(id, place + length, data);
        cell.length.store((length + data.len()) as u32, Release);
        true
    }

    /// The bytes of a record from `skip` on. Must not be called after the record is freed.
    pub fn piece(&self, id: RecordId, skip: usize) -> Piece {
        let cell = self.cell(id);
        let number = |word: &AtomicU32| word.load(Relaxed) as usize;
        let (place, length) = cell.map_or((0, 0), |cell| (number(&cell.place), number(&cell.length)));
        let skip = skip.min(length);
        let in_use = Rc::clone(&self.segments.borrow()[id.segment as usize].in_use);
        let at = bytes_of(id) + place + skip;
        Piece { memory: Rc::clone(&self.memory), at, length: length - skip, _in_use: in_use }
    }

    /// Records that writing the data has failed. The record keeps only the error.
    pub fn fail(&self, id: RecordId, error: Errno) {
        if let Some(cell) = self.cell(id) {
            cell.offset.store(error.raw_os_error().cast_unsigned().into(), Relaxed);
            cell.state.store(FAILED, Release);
        }
    }

    /// Frees a record whose data is not needed any more. Its bytes stay while there is a [`Piece`] of its segment.
    pub fn free(&self, id: RecordId) {
        let Some(cell) = self.cell(id) else { return };
        cell.state.store(FREE, Release);
        let mut segments = self.segments.borrow_mut();
        let segment = &mut segments[id.segment as usize];
        segment.used = segment.used.saturating_sub(1);
    }

    /// The number of the next accepted record.
    pub fn next_sequence(&self) -> u64 {
        self.sequence.get()
    }

    /// Gives memory back to the kernel, if the log is empty and there is no piece of it. Returns whether this is so.
    pub fn return_memory(&self) -> bool {
        let mut segments = self.segments.borrow_mut();
        let is_empty = segments.iter().all(Segment::is_unused);
        let warm = segments.iter_mut().enumerate().skip(WARM).filter(|(_, segment)| is_empty && segment.has_memory);
        for (number, segment) in warm {
            segment.has_memory = self.memory.give_back(HEADER + number * STRIDE, STRIDE).is_err();
        }
        is_empty
    }

    /// Bytes that the log can hold at most.
    pub fn capacity(&self) -> usize {
        self.most * SEGMENT
    }

    /// The place for a record of `length` bytes: its segment, its index, and the offset of its bytes.
    fn allot(&self, length: usize) -> Option<(usize, usize, usize)> {
        if length > SEGMENT {
            return None;
        }
        let mut segments = self.segments.borrow_mut();
        let fits = |segment: &Segment| segment.records < RECORDS && segment.bytes + length <= SEGMENT;
        let current = self.current.get().filter(|number| fits(&segments[*number]) || segments[*number].is_unused());
        // The first that is not used: few segments are used as long as few are needed.
        let number = current.or_else(|| segments.iter().position(Segment::is_unused))?;
        if !segments[number].has_memory {
            // Without memory there is no room.
            self.memory.allocate(HEADER + number * STRIDE, STRIDE).ok()?;
            segments[number].has_memory = true;
        }
        self.current.set(Some(number));
        let segment = &mut segments[number];
        if segment.is_unused() {
            (segment.records, segment.bytes) = (0, 0);
        }
        let (index, place) = (segment.records, segment.bytes);
        segment.records += 1;
        segment.bytes += length;
        segment.used += 1;
        Some((number, index, place))
    }

    fn fill(&self, id: RecordId, place: usize, data: &[u8]) {
        // SAFETY: the bytes were just allotted to this record, so no piece is of them.
        unsafe { self.memory.write(bytes_of(id) + place, data) };
    }

    fn header(&self) -> &LogHeader {
        self.memory.at(0).expect("a log has a header")
    }

    fn cell(&self, id: RecordId) -> Option<&RecordCell> {
        let index = id.index as usize * size_of::<RecordCell>();
        self.memory.at(HEADER + id.segment as usize * STRIDE + index)
    }
}

impl AsFd for Log {
    /// The memory file, to be handed to another process.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }
}

/// Bytes in the log, which stay also if their record is freed.
#[derive(Clone)]
pub struct Piece {
    memory: Rc<Memory>,
    at: usize,
    length: usize,
    /// Keeps the segment from being used again.
    _in_use: Rc<()>,
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: bytes of a record are written once, before there is a piece of them. Their segment is not used again, and keeps its
        // memory, while there is one.
        unsafe { self.memory.bytes(self.at, self.length) }
    }
}

/// Most segments of a log that this program reads. No version of podfs makes so many.
const MOST_SEGMENTS: usize = 4096;

/// The offset of the data of a record's segment in the log.
fn bytes_of(id: RecordId) -> usize {
    HEADER + id.segment as usize * STRIDE + RECORDS * size_of::<RecordCell>()
}

fn parse(id: RecordId, cell: &RecordCell) -> Option<InheritedRecord> {
    let state = cell.state.load(Acquire);
    let (length, place) = (cell.length.load(Relaxed), cell.place.load(Relaxed));
    let offset = cell.offset.load(Relaxed);
    let length = match state {
        DATA if u64::from(length) + u64::from(place) <= SEGMENT as u64 => Ok(length),
        FAILED => Err(Errno::from_raw_os_error(i32::try_from(offset).ok().filter(|error| (1..4096).contains(error))?)),
        _ => return None,
    };
    let target = WriteTarget {
        node: NodeId(cell.node.load(Relaxed)),
        open: HandleId(cell.open.load(Relaxed)),
        offset: if length.is_ok() { offset } else { 0 },
    };
    Some(InheritedRecord { id, target, length, sequence: cell.sequence.load(Relaxed) })
}

const _: () = assert!(size_of::<RecordCell>() == 64 && HEADER.is_multiple_of(64) && STRIDE.is_multiple_of(4096));
