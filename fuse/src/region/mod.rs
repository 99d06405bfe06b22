//! Regions: the state of a volume that a successor needs, in memory that outlives the server.
//!
//! A region is one memory file for each volume. The server maps the file and writes to it. The supervisor has a descriptor of the
//! file, too, and gives it to the next server. The file has a header and, behind it, cells of one size.
//!
//! Takeover, step by step; a kill between any two of them loses nothing:
//!
//! 1. A thread reads a request from the device. From here on the kernel waits for its answer. *Killed here:* the
//!    request is in no slot. The kernel sends it again, and it was not begun, so it is executed like a new one.
//! 2. The thread writes the request's number into its slot, marked as not begun. *Killed here:* as before.
//! 3. The thread marks a request that is not idempotent as begun, with the time and a note, before its first system call. *Killed
//!    here or in the call:* the successor finds the mark and examines the outcome.
//! 4. The thread writes a node, an open file or a lock, on which the kernel will rely, into a cell before it writes the answer.
//!    *Killed here:* the cell names the request that made it, so the successor finds it and does not make it twice.
//! 5. The thread writes the answer. The kernel forgets the request, and never sends it again. *Killed here:* the slot still names
//!    the request; that costs a place in the list of requests to replay, and nothing else.
//! 6. The thread frees its slot.
//! 7. The server is dead, all its threads with it. The successor maps the region, and reads it without changing it.
//! 8. The successor moves the requests of the slots to the list of requests to replay. *Killed here:* `in_flight` says why nothing
//!    is lost.
//! 9. Before any thread reads, the successor makes the kernel send all requests again that were read and not answered
//!    (`FUSE_NOTIFY_RESEND`). A request that was read before that would come twice. *Killed here:* the kernel still sends them,
//!    marked as resent; the next successor makes the kernel send the requests once more that were read meanwhile.
//! 10. The successor answers a resent request that is kept as begun by its outcome, every other one like a new one. It drops the
//!     kept request after the answer: step 5 again.
//!
//! A kill may leave a count that is too high: FORGET has no answer, so the kernel does not send it again. The successor keeps such
//! a node for longer than it has to.
//!
//! | module | owns |
//! |---|---|
//! | `memory` | the file and its mapping |
//! | `shared` | structs that several processes share |
//! | `header` | the header of a region |
//! | `in_flight` | the request of each thread |
//! | `waits` | requests that are answered later |
//! | `opens` | the counters of an audited projection |
//! | `cell_id` | the numbers of cells, and where each cell is |
//! | `cells` | records of nodes, open files and locks |
//! | `free` | which cells are free, and giving their memory back |
//! | `counts` | counters for status and metrics |
//! | `silence` | whether the source answers, for the supervisor |

pub(crate) mod cell_id;
pub(crate) mod cells;
pub(crate) mod counts;
mod free;
pub(crate) mod header;
pub(crate) mod in_flight;
pub(crate) mod memory;
pub(crate) mod opens;
pub(crate) mod shared;
pub(crate) mod silence;
pub(crate) mod waits;

#[cfg(test)]
pub(crate) mod golden;

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use cell_id::{CELL, MOST};
use cells::Cells;
use counts::Counts;
pub use counts::Distribution;
use free::FreeCells;
use header::{Header, LAYOUT, LAYOUT_OF_RINGS, MAGIC};
use in_flight::InFlightSlots;
pub use in_flight::{BegunRequest, FileMark, SLOTS};
use memory::Memory;
pub use opens::OpenCount;
use opens::Opens;
pub use silence::Moment;
use silence::Silence;
use waits::Waits;

/// The kind of volume that a region belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VolumeKind {
    /// Generations of payloads.
    Projection = 1,
    /// A directory or file of the host.
    Passthrough = 2,
    /// An export of an NFS server.
    Nfs = 3,
    /// Single paths of payloads that change in place.
    Live = 4,
}

/// Why a memory file cannot be taken over as the state of a volume.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// It cannot be mapped.
    #[error("the state of the volume cannot be mapped: {0}")]
    Memory(#[from] io::Error),
    /// Its file could shrink while it is read.
    #[error(
        "the state of the volume is not sealed against shrinking, so podfs did not write it; start the volume anew"
    )]
    NotSealed,
    /// It has no whole header.
    #[error("the state of the volume ends after {0} bytes, within its header; start the volume anew")]
    Truncated(usize),
    /// It does not begin with the bytes of every region.
    #[error("the file with the state of the volume is not one of podfs; start the volume anew")]
    Foreign,
    /// A later program wrote it.
    #[error(
        "the state was written by a newer podfs (layout {0}; this one reads up to {LAYOUT_OF_RINGS}); serve the volume with that \
         version, or start the volume anew"
    )]
    Newer(u32),
    /// A number in the header is impossible.
    #[error("the state of the volume is damaged: its {what} is {value}; start the volume anew")]
    Damaged {
        /// The meaning of the number.
        what: &'static str,
        /// The number.
        value: u32,
    },
}

impl From<RegionError> for io::Error {
    /// The kind of the error says whether another version of podfs can read the region.
    fn from(error: RegionError) -> io::Error {
        let kind = match error {
            RegionError::Newer(_) => io::ErrorKind::Unsupported,
            _ => io::ErrorKind::Other,
        };
        io::Error::new(kind, error)
    }
}

/// The state of a volume that a successor needs.
pub struct Region {
    kind: VolumeKind,
    memory: Memory,
    free: FreeCells,
    /// The number of recorded locks, as this process has counted them.
    lock_records: AtomicUsize,
}

impl Region {
    /// The region of a new volume.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn create(kind: VolumeKind) -> io::Result<Region> {
        let memory = Memory::create(header::SIZE, reserved(kind))?;
        let region = Region { kind, memory, free: FreeCells::of_new(), lock_records: AtomicUsize::new(0) };
        let header = region.header();
        header.layout.store(LAYOUT, Relaxed);
        header.cell_size.store(CELL as u32, Relaxed);
        header.kind.store(kind as u32, Relaxed);
        header.magic.store(MAGIC, Release);
        Ok(region)
    }

    /// The region of a volume that another process has made, and may still write. This changes nothing in the region.
    ///
    /// # Errors
    /// When it is no state that this program can read.
    pub fn adopt(file: OwnedFd) -> Result<Region, RegionError> {
        if !memory::may_be_mapped(&file) {
            return Err(RegionError::NotSealed);
        }
        let length = memory::length_of(&file)?;
        if length < header::SIZE {
            return Err(RegionError::Truncated(length));
        }
        let kind = parse(Memory::map(file.try_clone()?, header::SIZE, header::SIZE)?.header())?;
        let memory = Memory::map(file, length, reserved(kind))?;
        Ok(Region { kind, memory, free: FreeCells::of_adopted(), lock_records: AtomicUsize::new(0) })
    }

    /// The kind of the volume.
    pub fn kind(&self) -> VolumeKind {
        self.kind
    }

    /// Number of requests served so far, by all servers of the volume.
    pub fn requests(&self) -> u64 {
        let by_opcode: u64 = self.counts().requests().map(|(_, count)| count).fold(0, u64::wrapping_add);
        self.header().requests.load(Relaxed).wrapping_add(by_opcode)
    }

    /// Number of requests that the server answers later, for example after a wait for a lock.
    pub fn unanswered(&self) -> usize {
        self.waits().all().count()
    }

    /// The moment of the NFS server's last answer, while a call to it is outstanding; `None` if no call is.
    pub fn silent_since(&self) -> Option<Moment> {
        self.silence().since()
    }

    /// The first thread of the session, once there is one.
    pub fn session_thread(&self) -> Option<i32> {
        let thread = self.header().session_thread.load(Relaxed).cast_signed();
        (thread != 0).then_some(thread)
    }

    /// The INIT flags in force; `None` before the handshake.
    pub fn accepted(&self) -> Option<u64> {
        Some(self.header().accepted.load(Acquire)).filter(|accepted| *accepted != 0)
    }

    /// The number of steps applied to the tree of the volume since its mount, over all commits.
    pub fn applied(&self) -> u64 {
        self.header().applied.load(Acquire)
    }

    /// Counts an applied step.
    pub fn apply(&self) {
        self.header().applied.fetch_add(1, Release);
    }

    pub(crate) fn header(&self) -> &Header {
        self.memory.header()
    }

    pub(crate) fn counts(&self) -> &Counts {
        &self.header().counts
    }

    pub(crate) fn in_flight(&self) -> &InFlightSlots {
        &self.header().slots
    }

    pub(crate) fn opens(&self) -> &Opens {
        &self.header().opens
    }

    pub(crate) fn silence(&self) -> &Silence {
        &self.header().silence
    }

    pub(crate) fn waits(&self) -> &Waits {
        &self.header().waits
    }

    pub(crate) fn lock_records(&self) -> &AtomicUsize {
        &self.lock_records
    }

    pub(crate) fn cells(&self) -> Cells<'_> {
        Cells { memory: &self.memory, free: &self.free }
    }

    /// Allows this process to change an adopted region of a volume that no server has served yet.
    pub(crate) fn begin(&self) {
        self.take_over();
        self.cells().keep_only(&[]);
    }

    /// Allows this process to change an adopted region. The server that wrote the region is dead.
    pub(crate) fn take_over(&self) {
        self.free.take_over();
    }

    /// Whether this process may change the region: it made the region, or has [taken it over](Self::take_over).
    pub(crate) fn is_ours(&self) -> bool {
        self.free.is_ours()
    }

    /// Reads the length of the file again, because another process may have added cells.
    ///
    /// # Errors
    /// When the file's length cannot be read.
    pub(crate) fn look_again(&self) -> io::Result<()> {
        self.memory.look_again().map(drop)
    }

    pub(crate) fn set_accepted(&self, accepted: u64) {
        self.header().accepted.store(accepted, Release);
    }

    /// Records that requests may come over io_uring from now on.
    pub(crate) fn expect_rings(&self) {
        self.header().layout.store(LAYOUT_OF_RINGS, Release);
    }

    pub(crate) fn set_session_thread(&self, thread: i32) {
        self.header().session_thread.store(thread.cast_unsigned(), Relaxed);
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Region").field("kind", &self.kind).finish_non_exhaustive()
    }
}

impl AsFd for Region {
    /// The memory file, to be handed to another process.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }
}

impl Memory {
    fn header(&self) -> &Header {
        self.at(0).expect("a region has a header")
    }
}

/// Checks the header of a region, and reads the kind of its volume.
fn parse(header: &Header) -> Result<VolumeKind, RegionError> {
    if header.magic.load(Acquire) != MAGIC {
        return Err(RegionError::Foreign);
    }
    match header.layout.load(Relaxed) {
        LAYOUT | LAYOUT_OF_RINGS => {}
        newer if newer > LAYOUT_OF_RINGS => return Err(RegionError::Newer(newer)),
        value => return Err(RegionError::Damaged { what: "layout", value }),
    }
    match header.cell_size.load(Relaxed) {
        size if size == CELL as u32 => {}
        value => return Err(RegionError::Damaged { what: "cell size", value }),
    }
    match header.kind.load(Relaxed) {
        1 => Ok(VolumeKind::Projection),
        2 => Ok(VolumeKind::Passthrough),
        3 => Ok(VolumeKind::Nfs),
        4 => Ok(VolumeKind::Live),
        value => Err(RegionError::Damaged { what: "kind", value }),
    }
}

/// The number of addresses that the mapping of a region reserves: the largest length of the region, in bytes.
fn reserved(kind: VolumeKind) -> usize {
    match kind {
        VolumeKind::Projection | VolumeKind::Live => header::SIZE,
        VolumeKind::Passthrough | VolumeKind::Nfs => header::SIZE + MOST * CELL,
    }
}

/// The offset of the first cell in the region.
#[cfg(test)]
pub(crate) fn cells_begin() -> usize {
    header::SIZE
}

#[cfg(test)]
mod tests;
