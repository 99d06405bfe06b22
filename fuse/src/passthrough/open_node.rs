//! State that the open files of one node share: their backing file, and the locks taken through them.
//!
//! The kernel's rules (Linux 6.9 and newer): while a file is open, all its open descriptions read and write either through the
//! kernel or through the server, and all have the same backing id. Another id, even of the same file, makes the open fail with
//! `EIO`. So the first open makes the id, and the last release closes it. Both hold the lock on the node's open files:
//!
//! 1. The server counts an open before it answers, so a release of another open file that it handles later is not the last one.
//! 2. The kernel has given up the backing file of an open file before it sends RELEASE. So when the server counts the last
//!    release, no open file uses the id, and the next open may have another id.
//!
//! An id belongs to the connection, so it outlives the server. The server records an id in the node's cell before it sends it to
//! the kernel, and marks it there before it closes the backing file:
//!
//! 3. An id that is recorded without the mark is open, so a successor may go on using it.
//! 4. An id with the mark may be open or not. The successor closes it, perhaps for the second time; the kernel does not use a
//!    number again before it has used all others.
//! 5. An id that was opened and not recorded is near the last recorded one, because the kernel gives numbers in order. The
//!    successor closes the ids that are near and not recorded.
//! 6. The server also records that an open is answered without a backing file, before it answers. A successor cannot tell an open that
//!    was answered just before the kill from one that was not, and the kernel refuses a backing file beside an open file without one.

use std::collections::HashSet;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, Release};

use rustix::io::Errno;

use super::handle::last_errno;
use super::locks::NodeLocks;
use super::node::Node;
use super::open_files::OpenFile;
use super::state::{CLOSING, NodeCell, UNBACKED};
use crate::region::Region;
use crate::session::abi::BackingMap;

/// Shared by the open files of a node.
#[derive(Debug, Default)]
pub struct OpenNode {
    /// The open files, at least one. Each of them leads to the file, even when the file has no name any more.
    pub files: Vec<Arc<OpenFile>>,
    /// The backing file, if the kernel reads and writes the file by itself.
    pub backing: Option<BackingId>,
    /// An open file was answered without a backing file, so all others are, too.
    pub is_unbacked: bool,
    /// The locks taken through the open files.
    pub locks: NodeLocks,
}

impl OpenNode {
    /// A descriptor of the file.
    ///
    /// # Errors
    /// Those of [`OpenFile::file`].
    pub fn file(&self) -> Result<Arc<OwnedFd>, Errno> {
        self.files.first().expect("the last open file takes this with it").file()
    }

    /// Takes the locks again that were on open file descriptions which no process has any more; `open` makes new descriptions.
    /// Returns the number of open files whose locks are lost.
    pub fn restore_locks(&mut self, open: impl FnMut() -> Result<OwnedFd, Errno>) -> usize {
        let lost = self.locks.restore(open);
        let losers = self.files.iter().filter(|file| lost.contains(&file.handle));
        losers.map(|file| file.lose_locks()).count()
    }
}

/// A backing file of a connection. When it is closed, files that are open through it stay usable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BackingId(u32);

impl BackingId {
    /// Lets the kernel read and write `file` by itself, with the credentials of the calling thread.
    ///
    /// # Errors
    /// `EPERM` without `CAP_SYS_ADMIN` or on a kernel before 6.9, `ELOOP` where file systems are stacked too deep, and
    /// others where the file cannot be a backing file.
    pub fn open(device: &OwnedFd, file: BorrowedFd<'_>) -> Result<BackingId, Errno> {
        let map = BackingMap { fd: file.as_raw_fd(), flags: 0, padding: 0 };
        // SAFETY: the request takes a `fuse_backing_map`, which outlives the call.
        let id = unsafe { libc::ioctl(device.as_raw_fd(), BACKING_OPEN, &raw const map) };
        if id <= 0 { Err(last_errno()) } else { Ok(BackingId(id.cast_unsigned())) }
    }

    /// As [`open`](Self::open), and records the id in the node's cell. `None` if the kernel refuses.
    pub fn open_for(device: &OwnedFd, file: BorrowedFd<'_>, node: &Node, region: &Region) -> Option<BackingId> {
        let id = Self::open(device, file).ok()?;
        node.record.backing.store(id.0, Release);
        region.header().counters.backing.store(id.0, Release);
        Some(id)
    }

    /// The backing id in a node's cell.
    pub fn recorded(cell: &NodeCell) -> Option<BackingId> {
        let id = cell.backing.load(Relaxed);
        (id != 0 && id & CLOSING == 0).then_some(BackingId(id))
    }

    /// Records in a node's cell that open files of the node have no backing file.
    pub fn record_none(cell: &NodeCell) {
        cell.backing.store(UNBACKED, Release);
    }

    /// Whether open files of the node may have no backing file.
    pub fn is_none_recorded(cell: &NodeCell) -> bool {
        cell.backing.load(Relaxed) == UNBACKED
    }

    /// Closes the backing file. The kernel answers `ENOENT` if it is closed already.
    pub fn close(self, device: &OwnedFd) {
        let id = self.0;
        // SAFETY: the request takes the address of an id.
        unsafe { libc::ioctl(device.as_raw_fd(), BACKING_CLOSE, &raw const id) };
    }

    /// Closes the backing file, and removes the id from the node's cell.
    pub fn close_for(self, device: &OwnedFd, node: &Node) {
        node.record.backing.store(self.0 | CLOSING, Release);
        self.close(device);
        node.record.backing.store(0, Release);
    }

    /// The id, for answers.
    pub fn number(self) -> i32 {
        self.0.cast_signed()
    }
}

/// Closes the backing files that a dead server opened for no node or was closing. No thread may serve yet.
pub fn give_back_unowned(device: &OwnedFd, region: &Region) {
    /// More than the threads may have opened at the same time.
    const NEAR: u32 = 32;
    let cells = region.cells();
    let nodes = cells.tagged().filter_map(|(id, _)| cells.find::<NodeCell>(id));
    let mut owned = HashSet::new();
    let mut closing = Vec::new();
    for node in nodes {
        match node.backing.load(Relaxed) {
            0 | UNBACKED => {}
            id if id & CLOSING == 0 => drop(owned.insert(id)),
            id => closing.push((node, id & !CLOSING)),
        }
    }
    let last = region.header().counters.backing.load(Relaxed);
    // A volume whose files the kernel never read and wrote by itself has no backing files.
    let near = if last == 0 { 0..0 } else { last.saturating_sub(NEAR).max(1)..last.saturating_add(NEAR) };
    let unowned = near.chain(closing.iter().map(|(_, id)| *id)).filter(|id| !owned.contains(id));
    unowned.for_each(|id| BackingId(id).close(device));
    closing.iter().for_each(|(node, _)| node.backing.store(0, Release));
}

/// `_IOW(229, 1, struct fuse_backing_map)`
pub const BACKING_OPEN: libc::Ioctl = write_request(1, size_of::<BackingMap>());
/// `_IOW(229, 2, uint32_t)`
pub const BACKING_CLOSE: libc::Ioctl = write_request(2, size_of::<u32>());

const fn write_request(number: u64, size: usize) -> libc::Ioctl {
    const WRITE: u64 = 1;
    const FUSE: u64 = 229;
    ((WRITE << 30) | ((size as u64) << 16) | (FUSE << 8) | number) as libc::Ioctl
}
