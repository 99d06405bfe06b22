//! The state of a passthrough volume for a successor: one cell of its region for each node, open file, lock and
//! mount.
//!
//! The identity in a cell never changes. Each other change stores one word. A cell records a descriptor by its number: a successor
//! has the descriptors under the same numbers before it reads the cells. A cell has a number only while the descriptor is open, so
//! the server erases a cell before it closes the descriptor.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::fs::OFlags;
use rustix::io::{Errno, fcntl_dupfd_cloexec};

use crate::region::Region;
use crate::region::cell_id::CellId;
use crate::region::cells::CellContent;
use crate::region::shared::shared;

/// The lowest descriptor that a cell may record. The process uses the lower ones for its other files.
pub const FIRST_DESCRIPTOR: RawFd = 64;
/// Most words of a file handle.
pub const HANDLE_WORDS: usize = 9;
/// Bits of a node's `form` that hold the length of its handle in bytes.
pub const HANDLE_LENGTH: u32 = 0xfff;
/// Bit of a node's `form`: callers may store through a mapping of the file, without any request.
pub const MAPPABLE: u32 = 1 << 16;
/// The value of [`HANDLE_LENGTH`] for a node without a lasting handle. The words then hold the device, the file's inode number, and the
/// [`DirectoryNameCell`] at [`DIRECTORY_NAME`].
pub const NO_HANDLE: u32 = HANDLE_LENGTH;
/// Of a node without a lasting handle: the word that names the first [`DirectoryNameCell`], or is 0. An earlier podfs leaves any value there, but
/// has no such cells.
pub const DIRECTORY_NAME: usize = 2;
/// Words of a name in one [`DirectoryNameCell`].
pub const NAME_WORDS: usize = 12;

shared! {
    /// A node.
    pub(crate) struct NodeCell {
        tag: AtomicU32,
        /// `S_IFMT` of its mode, [`HANDLE_LENGTH`] and [`MAPPABLE`].
        form: AtomicU32,
        /// The number by which the kernel knows the node.
        id: AtomicU64,
        /// The mount that the file is on, as the volume numbers it.
        mount: AtomicU64,
        /// The kernel's lookup count: the number of answers that have given the node to the kernel.
        lookups: AtomicU64,
        /// Bytes that a limited volume charges for the file.
        charged: AtomicU64,
        /// The descriptor that the server keeps for the node; 0 for none.
        held: AtomicU32,
        /// 1 if the file has no name any more, and open files keep it.
        nameless: AtomicU32,
        /// The backing id of the file; 0 for none, or [`UNBACKED`]. The server adds [`CLOSING`] before it closes the backing file.
        backing: AtomicU32,
        handle_kind: AtomicU32,
        handle: [AtomicU64; HANDLE_WORDS],
    }
    /// An open file or directory.
    pub(crate) struct OpenCell {
        tag: AtomicU32,
        /// [`APPENDS`], [`WITH_ATTRIBUTES`], [`DIRECTORY`], [`WITH_FLAGS`], and `open(2)` flags from [`FLAGS_SHIFT`] on.
        flags: AtomicU32,
        /// The number that the server gave to the kernel for it (`fh`).
        handle: AtomicU64,
        /// The node that is open.
        node: AtomicU64,
        /// The number of the request that opened it.
        unique: AtomicU64,
        descriptor: AtomicU32,
    }
    /// A record that an owner may have taken a lock through an open file.
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
    /// A lock that an owner has, or the record that the owner's locks are [lost](LOCKS_LOST).
    pub(crate) struct HeldCell {
        tag: AtomicU32,
        /// `F_RDLCK` or `F_WRLCK`, with [`WHOLE`] for a lock of `flock(2)`; or [`LOCKS_LOST`].
        form: AtomicU32,
        node: AtomicU64,
        owner: AtomicU64,
        /// The first byte that is locked.
        start: AtomicU64,
        /// The last byte that is locked.
        end: AtomicU64,
    }
    /// A mount.
    pub(crate) struct MountCell {
        tag: AtomicU32,
        /// The descriptor with which the server opens handles; 0 where the file system has no handles.
        anchor: AtomicU32,
        /// The kernel's number for the mount.
        id: AtomicU64,
        /// The volume's number for the mount.
        index: AtomicU64,
        /// The mount of the directory in which the server found this mount, as the volume numbers it.
        parent: AtomicU64,
        /// The length in bytes of that directory's handle; 0 where it has none.
        length: AtomicU32,
        handle_kind: AtomicU32,
        handle: [AtomicU64; HANDLE_WORDS],
    }
    /// A device that files of a mount have.
    pub(crate) struct DeviceCell {
        tag: AtomicU32,
        spare: AtomicU32,
        /// The mount, as the volume numbers it.
        mount: AtomicU64,
        /// The device's `st_dev`: major number in the upper half, minor number in the lower half.
        device: AtomicU64,
        /// The volume's number for the device on that mount.
        index: AtomicU64,
    }
    /// The directory and the name by which a node can be found again, or a further part of the name.
    pub(crate) struct DirectoryNameCell {
        tag: AtomicU32,
        /// Bytes of the name in this cell and those behind it.
        length: AtomicU32,
        /// The node.
        node: AtomicU64,
        /// The directory's node.
        parent: AtomicU64,
        /// The cell with the next part of the name; 0 for none.
        next: AtomicU64,
        name: [AtomicU64; NAME_WORDS],
    }
}

/// Of an open file: it was opened with `O_APPEND`.
pub const APPENDS: u32 = 1 << 0;
/// Of an open directory: its entries come with their attributes.
pub const WITH_ATTRIBUTES: u32 = 1 << 1;
/// Of an open file: it is a directory.
pub const DIRECTORY: u32 = 1 << 2;
/// Of an open file: the bits from [`FLAGS_SHIFT`] on are the flags it was opened with (`open(2)`).
pub const WITH_FLAGS: u32 = 1 << 3;
/// The lowest bit of an open file's `open(2)` flags.
pub const FLAGS_SHIFT: u32 = 8;
/// Of a lock: `flock(2)` took it.
pub const WHOLE: u32 = 1 << 16;
/// In the place of a lock: its owner's locks are gone, and other processes may have locked the same ranges meanwhile.
pub const LOCKS_LOST: u32 = 1 << 17;
/// In the place of a descriptor's number: no process has the recorded descriptor any more.
const NO_DESCRIPTOR: u32 = 1;
/// Of a backing id: the server is closing the backing file, so the id may be invalid.
pub const CLOSING: u32 = 1 << 31;
/// In the place of a backing id: an open file was answered without one. An earlier server takes it for an id that is being closed.
pub const UNBACKED: u32 = CLOSING;

impl CellContent for NodeCell {
    const TAG: u32 = 1;
}

impl CellContent for OpenCell {
    const TAG: u32 = 2;
}

impl CellContent for LockCell {
    const TAG: u32 = 3;
}

impl CellContent for MountCell {
    const TAG: u32 = 4;
}

impl CellContent for HeldCell {
    const TAG: u32 = 5;
}

impl CellContent for DeviceCell {
    const TAG: u32 = 6;
}

impl CellContent for DirectoryNameCell {
    const TAG: u32 = 7;
}

/// The numbers of all descriptors that a successor needs, in order.
///
/// # Errors
/// When the region cannot be read.
pub fn descriptors(region: &Region) -> io::Result<Vec<RawFd>> {
    region.look_again()?;
    let mut numbers: Vec<RawFd> = named(region).filter_map(|word| number(word.load(Relaxed))).collect();
    numbers.sort_unstable();
    numbers.dedup();
    Ok(numbers)
}

/// The words of all cells that may name a descriptor.
fn named(region: &Region) -> impl Iterator<Item = &AtomicU32> {
    let cells = region.cells();
    cells.tagged().filter_map(move |(id, tag)| match tag {
        NodeCell::TAG => Some(&cells.content::<NodeCell>(id).held),
        OpenCell::TAG => Some(&cells.content::<OpenCell>(id).descriptor),
        LockCell::TAG => Some(&cells.content::<LockCell>(id).descriptor),
        MountCell::TAG => Some(&cells.content::<MountCell>(id).anchor),
        _ => None,
    })
}

/// Removes from all cells the descriptors `gone`, which no process has any more. They are in ascending order. From here on, their
/// numbers may be those of other descriptors.
pub fn forget_descriptors(region: &Region, gone: &[RawFd]) {
    let is_gone = |word: &&AtomicU32| number(word.load(Relaxed)).is_some_and(|one| gone.binary_search(&one).is_ok());
    named(region).filter(is_gone).for_each(|word| word.store(NO_DESCRIPTOR, Release));
}

/// Returns the bits of an open file's cell that record the `open(2)` flags.
pub fn with_flags(flags: OFlags) -> u32 {
    WITH_FLAGS | (flags.intersection(RECORDED).bits() << FLAGS_SHIFT)
}

/// The flags to open a file with once more. An earlier podfs recorded only that a file is appended to.
pub fn opened_with(cell: &OpenCell) -> OFlags {
    let flags = cell.flags.load(Relaxed);
    let given = match flags {
        flags if flags & WITH_FLAGS != 0 => OFlags::from_bits_retain(flags >> FLAGS_SHIFT).intersection(RECORDED),
        flags if flags & APPENDS != 0 => OFlags::RDWR | OFlags::APPEND,
        _ => OFlags::RDWR,
    };
    given | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC
}

/// The `open(2)` flags that an open file's cell records.
const RECORDED: OFlags = OFlags::RWMODE
    .union(OFlags::APPEND)
    .union(OFlags::SYNC)
    .union(OFlags::DSYNC)
    .union(OFlags::NOATIME)
    .union(OFlags::DIRECT);

/// Moves `file` to a number that a cell may record. Only a descriptor that got a low number needs the move.
pub fn recordable(file: OwnedFd) -> OwnedFd {
    if file.as_raw_fd() >= FIRST_DESCRIPTOR {
        return file;
    }
    // Without a free number the descriptor keeps its own, and a successor does not get it.
    fcntl_dupfd_cloexec(&file, FIRST_DESCRIPTOR).unwrap_or(file)
}

/// A descriptor's number as a cell has it, if it can be one.
pub fn number(word: u32) -> Option<RawFd> {
    RawFd::try_from(word).ok().filter(|number| *number >= FIRST_DESCRIPTOR)
}

/// Completes the change of the account of used space that a dead server had begun (`usage`).
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

/// The errno when there is no memory for a cell.
pub fn no_memory(_: io::Error) -> Errno {
    Errno::NOMEM
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::Arc;

    use super::*;
    use crate::region::VolumeKind;
    use crate::region::cells::CellRef;
    use crate::region::golden::{self, golden};
    use crate::region::shared::assert_layout;

    #[test]
    fn cells_have_the_layout_that_other_versions_read() {
        assert_layout::<NodeCell>(
            "tag 0, form 4, id 8, mount 16, lookups 24, charged 32, held 40, nameless 44, backing 48, handle_kind 52, handle 56; 128 bytes",
        );
        assert_layout::<OpenCell>("tag 0, flags 4, handle 8, node 16, unique 24, descriptor 32; 40 bytes");
        assert_layout::<LockCell>("tag 0, pid 4, node 8, owner 16, handle 24, descriptor 32; 40 bytes");
        assert_layout::<MountCell>(
            "tag 0, anchor 4, id 8, index 16, parent 24, length 32, handle_kind 36, handle 40; 112 bytes",
        );
        assert_layout::<HeldCell>("tag 0, form 4, node 8, owner 16, start 24, end 32; 40 bytes");
        let tags = [NodeCell::TAG, OpenCell::TAG, LockCell::TAG, MountCell::TAG, HeldCell::TAG];
        assert_eq!(tags, [1, 2, 3, 4, 5], "other versions know the cells by these tags");
    }

    /// Stores these values in these words.
    fn fill<const N: usize>(words: [&AtomicU64; N], values: [u64; N]) {
        words.into_iter().zip(values).for_each(|(word, value)| word.store(value, Relaxed));
    }

    /// A region with a cell of each kind, in which each field has a value.
    fn region() -> Arc<Region> {
        let region = golden::region(VolumeKind::Passthrough);
        let new = |made: io::Result<CellId>| made.expect("memory");
        let handle = |words: &[AtomicU64; HANDLE_WORDS]| {
            words.iter().zip(0x11..).for_each(|(word, value)| word.store(value, Relaxed));
        };
        new(CellRef::new(&region, |cell: &NodeCell| {
            cell.form.store(libc::S_IFREG | MAPPABLE | 72, Relaxed);
            fill([&cell.id, &cell.mount, &cell.lookups, &cell.charged], [2, 3, 4, 5]);
            cell.held.store(FIRST_DESCRIPTOR.cast_unsigned(), Relaxed);
            cell.nameless.store(1, Relaxed);
            cell.backing.store(6 | CLOSING, Relaxed);
            cell.handle_kind.store(7, Relaxed);
            handle(&cell.handle);
        })
        .map(|cell| cell.id()));
        new(CellRef::new(&region, |cell: &OpenCell| {
            let flags = APPENDS | WITH_ATTRIBUTES | DIRECTORY | with_flags(OFlags::RDWR | OFlags::APPEND);
            cell.flags.store(flags, Relaxed);
            fill([&cell.handle, &cell.node, &cell.unique], [8, 2, 9]);
            cell.descriptor.store(65, Relaxed);
        })
        .map(|cell| cell.id()));
        new(CellRef::new(&region, |cell: &LockCell| {
            cell.pid.store(10, Relaxed);
            fill([&cell.node, &cell.owner, &cell.handle], [2, 11, 8]);
            cell.descriptor.store(66, Relaxed);
        })
        .map(|cell| cell.id()));
        new(CellRef::new(&region, |cell: &MountCell| {
            cell.anchor.store(67, Relaxed);
            fill([&cell.id, &cell.index, &cell.parent], [12, 3, 13]);
            cell.length.store(72, Relaxed);
            cell.handle_kind.store(14, Relaxed);
            handle(&cell.handle);
        })
        .map(|cell| cell.id()));
        new(CellRef::new(&region, |cell: &HeldCell| {
            cell.form.store(libc::F_WRLCK as u32 | WHOLE, Relaxed);
            fill([&cell.node, &cell.owner, &cell.start, &cell.end], [2, 11, 15, 16]);
        })
        .map(|cell| cell.id()));
        region
    }

    #[test]
    fn a_region_has_the_bytes_that_other_versions_read() {
        let recorded = golden!("region-passthrough.bin");
        golden::assert_golden("region-passthrough.bin", recorded, &golden::content(region().as_fd()));
        let adopted = golden::adopted(recorded, VolumeKind::Passthrough);
        let tags: Vec<_> = adopted.cells().tagged().map(|(_, tag)| tag).collect();
        assert_eq!(tags, [NodeCell::TAG, OpenCell::TAG, LockCell::TAG, MountCell::TAG, HeldCell::TAG]);
        assert_eq!(descriptors(&adopted).expect("read"), [64, 65, 66, 67]);
        let cells: Vec<_> = adopted.cells().tagged().map(|(id, _)| id).collect();
        let open = adopted.cells().find::<OpenCell>(cells[1]).expect("an open file");
        assert!(opened_with(open).contains(OFlags::RDWR | OFlags::APPEND));
        let node = adopted.cells().find::<NodeCell>(cells[0]).expect("a node");
        assert_eq!((node.id.load(Relaxed), node.charged.load(Relaxed)), (2, 5));
        assert_eq!(node.handle.each_ref().map(|word| word.load(Relaxed)), std::array::from_fn(|n| 0x11 + n as u64));
        let held = adopted.cells().find::<HeldCell>(cells[4]).expect("a lock");
        assert_eq!((held.owner.load(Relaxed), held.end.load(Relaxed)), (11, 16));
        golden::assert_unknown_is_refused(recorded);
    }
}
