//! What a successor has to know of a passthrough volume: one cell of its region for each node, open file, lock and
//! mount.
//!
//! What identifies a thing never changes; what changes is one word each. Descriptors are recorded by number: a
//! successor has them under the same numbers before it reads this. A number stands in a cell only while the descriptor
//! is open, so cells are erased before descriptors are closed.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::io::{Errno, fcntl_dupfd_cloexec};

use crate::region::Region;
use crate::region::cells::{CellId, Content};
use crate::region::shared::shared;

/// Descriptors below are the process's own business.
pub const FIRST_DESCRIPTOR: RawFd = 64;
/// Words that a file handle may take.
pub const HANDLE_WORDS: usize = 9;
/// Bits of a node's `form` that tell the length of its handle in bytes.
pub const HANDLE_LENGTH: u32 = 0xfff;
/// Bit of a node's `form`: callers may store through a mapping of the file, of which nobody hears.
pub const MAPPABLE: u32 = 1 << 16;
/// That length for a node without a handle: the words are the device and the file's number.
pub const NO_HANDLE: u32 = HANDLE_LENGTH;

shared! {
    /// A node.
    pub(crate) struct NodeCell {
        tag: AtomicU32,
        /// `S_IFMT` of its mode, [`HANDLE_LENGTH`] and [`MAPPABLE`].
        form: AtomicU32,
        /// Its number.
        id: AtomicU64,
        /// The number of the mount it is on.
        mount: AtomicU64,
        /// How often the kernel was told of it.
        lookups: AtomicU64,
        /// Bytes that it is charged with.
        charged: AtomicU64,
        /// The descriptor that is kept for it; 0 for none.
        held: AtomicU32,
        /// 1 if the file has no name any more, and open files keep it.
        nameless: AtomicU32,
        /// Its backing id; 0 for none. [`GOING`] is added before it is given back.
        backing: AtomicU32,
        handle_kind: AtomicU32,
        handle: [AtomicU64; HANDLE_WORDS],
    }
    /// An open file or directory.
    pub(crate) struct OpenCell {
        tag: AtomicU32,
        /// [`APPENDS`] and others.
        flags: AtomicU32,
        /// The kernel's number for it.
        handle: AtomicU64,
        /// The node it is open on.
        node: AtomicU64,
        /// The request that opened it.
        unique: AtomicU64,
        descriptor: AtomicU32,
    }
    /// That an owner may have locked something through an open file.
    pub(crate) struct LockCell {
        tag: AtomicU32,
        /// The process that locked last.
        pid: AtomicU32,
        node: AtomicU64,
        owner: AtomicU64,
        /// The open file.
        handle: AtomicU64,
        descriptor: AtomicU32,
    }
    /// A mount.
    pub(crate) struct MountCell {
        tag: AtomicU32,
        /// Its descriptor for handles; 0 for none.
        anchor: AtomicU32,
        /// The kernel's number for it.
        id: AtomicU64,
        /// The volume's number for it.
        index: AtomicU64,
    }
}

/// Of an open file: it was opened with `O_APPEND`.
pub const APPENDS: u32 = 1 << 0;
/// Of an open directory: its entries come with their attributes.
pub const WITH_ATTRIBUTES: u32 = 1 << 1;
/// Of an open file: it is a directory.
pub const DIRECTORY: u32 = 1 << 2;
/// Of a backing id: it is being given back, and may be gone.
pub const GOING: u32 = 1 << 31;

impl Content for NodeCell {
    const TAG: u32 = 1;
}

impl Content for OpenCell {
    const TAG: u32 = 2;
}

impl Content for LockCell {
    const TAG: u32 = 3;
}

impl Content for MountCell {
    const TAG: u32 = 4;
}

/// The numbers of all descriptors that a successor needs, in order.
///
/// # Errors
/// When the region cannot be looked at.
pub fn descriptors(region: &Region) -> io::Result<Vec<RawFd>> {
    region.look_again()?;
    let cells = region.cells();
    let mut numbers: Vec<RawFd> = cells
        .tagged()
        .filter_map(|(id, _)| {
            let held = || cells.find::<NodeCell>(id).map(|node| &node.held);
            let open = || cells.find::<OpenCell>(id).map(|open| &open.descriptor);
            let lock = || cells.find::<LockCell>(id).map(|lock| &lock.descriptor);
            let anchor = || cells.find::<MountCell>(id).map(|mount| &mount.anchor);
            number(held().or_else(open).or_else(lock).or_else(anchor)?.load(Relaxed))
        })
        .collect();
    numbers.sort_unstable();
    numbers.dedup();
    Ok(numbers)
}

/// `file` under a number that may be recorded. It has one already unless a number below has just become free.
pub fn recordable(file: OwnedFd) -> OwnedFd {
    if file.as_raw_fd() >= FIRST_DESCRIPTOR {
        return file;
    }
    // Without a free number it stays what it is, and is lost to a successor.
    fcntl_dupfd_cloexec(&file, FIRST_DESCRIPTOR).unwrap_or(file)
}

/// A descriptor's number as a cell has it, if it can be one.
pub fn number(word: u32) -> Option<RawFd> {
    RawFd::try_from(word).ok().filter(|number| *number >= FIRST_DESCRIPTOR)
}

/// The descriptor that a cell names is not there any more.
pub fn without_descriptor(region: &Region, cell: CellId) {
    if let Some(node) = region.cells().find::<NodeCell>(cell) {
        node.held.store(0, Release);
    }
    if let Some(mount) = region.cells().find::<MountCell>(cell) {
        mount.anchor.store(0, Release);
    }
}

/// A change of the account that a dead server was making is made.
pub fn finish_change(region: &Region) {
    let counters = &region.header().counters;
    let redo = &counters.redo;
    if let Some(cell) = CellId::from_word(redo.cell.load(Relaxed)) {
        if let Some(node) = region.cells().find::<NodeCell>(cell) {
            node.charged.store(redo.charged.load(Relaxed), Release);
        }
        counters.used.store(redo.used.load(Relaxed), Release);
        redo.cell.store(0, Release);
    }
}

/// No memory for a cell.
pub fn no_memory(_: io::Error) -> Errno {
    Errno::NOMEM
}
