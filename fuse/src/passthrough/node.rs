//! Nodes: the files and directories that the kernel knows, each by a number that is never used again.
//!
//! A node is found by its [`FileIdentity`], so a file is one node under all its names. It needs no open
//! descriptor: a file handle opens it again. The kernel counts the answers that showed it a node, and forgets the node by that
//! count; then the node goes.
//!
//! All that podfs knows of a node is in its cell of the region, so that a successor has the same nodes. A [`Node`] is there only
//! while a request, an open file or a kept descriptor uses it; [`Nodes`](super::nodes::Nodes) makes it of the cell.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::fs::{FileType, OFlags};
use rustix::io::Errno;

use super::descriptor::reopen;
use super::handle::FileHandle;
use super::nodes::SharedNodes;
use super::open_node::OpenNode;
use super::share::SharePlace;
use super::source_mount::SourceMount;
use super::state::{HANDLE_LENGTH, MAPPABLE, NO_HANDLE, NodeCell, recordable};
use crate::region::cells::CellRef;
use crate::session::NodeId;

/// The identity of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FileIdentity {
    /// A handle: number and generation in one.
    Handle {
        /// The mount it was reached through, as the volume numbers it.
        mount: u64,
        /// The file.
        handle: FileHandle,
    },
    /// A number that is not used again while the node holds the file open.
    Number {
        /// The mount it was reached through, as the volume numbers it.
        mount: u64,
        /// The device, for file systems with several.
        device: u64,
        /// The number.
        ino: u64,
    },
}

/// A file or directory that the kernel knows.
#[derive(Debug)]
pub struct Node {
    /// Its number.
    pub id: NodeId,
    /// The type of the file, which never changes.
    pub kind: FileType,
    /// The mount that the file is on.
    pub mount: Arc<SourceMount>,
    identity: FileIdentity,
    /// The state for a successor. The kernel's count changes under the lock of all nodes only.
    pub record: CellRef<NodeCell>,
    held: Mutex<Option<HeldNode>>,
    /// State that its open files share, while there are any.
    open: Mutex<Option<Box<OpenNode>>>,
    nodes: Arc<SharedNodes>,
}

/// A descriptor that is kept for a node.
#[derive(Debug)]
struct HeldNode {
    file: Arc<OwnedFd>,
    _taken: SharePlace,
    /// The node itself: until the kernel forgets it, the node stays with its descriptor.
    node: Option<Arc<Node>>,
}

impl Node {
    /// The one of a cell, which [`Nodes`](super::nodes::Nodes) has.
    pub fn new(
        record: CellRef<NodeCell>,
        identity: FileIdentity,
        mount: Arc<SourceMount>,
        nodes: Arc<SharedNodes>,
    ) -> Self {
        let kind = FileType::from_raw_mode(record.form.load(Relaxed) & libc::S_IFMT);
        let id = NodeId(record.id.load(Relaxed));
        Self { id, kind, mount, identity, record, held: Mutex::default(), open: Mutex::default(), nodes }
    }

    /// The handle it is opened with, if its file system has handles.
    pub fn handle(&self) -> Option<&FileHandle> {
        match &self.identity {
            FileIdentity::Handle { handle, .. } => Some(handle),
            FileIdentity::Number { .. } => None,
        }
    }

    /// Whether exactly one answer has given the node to the kernel.
    pub fn is_new(&self) -> bool {
        self.record.lookups.load(Relaxed) == 1
    }

    /// The descriptor that is kept for it: where there is no handle, and where the file has no name any more.
    pub fn held(&self) -> Option<Arc<OwnedFd>> {
        self.lock_held().as_ref().map(|held| Arc::clone(&held.file))
    }

    /// Keeps `file`, open on this node, until the kernel forgets the node.
    pub fn hold(self: &Arc<Self>, file: OwnedFd, taken: SharePlace) {
        let file = recordable(file);
        let number = file.as_raw_fd().cast_unsigned();
        let before = {
            let mut held = self.lock_held();
            self.record.held.store(number, Release);
            held.replace(self.keeping(file, taken))
        };
        drop(before);
        // The kernel may have forgotten it meanwhile.
        if self.record.lookups.load(Acquire) == 0 {
            self.forgotten();
        }
    }

    /// Keeps `file`, as a dead server did; nothing is recorded.
    pub fn hold_on(self: &Arc<Self>, file: OwnedFd, taken: SharePlace) {
        let before = self.lock_held().replace(self.keeping(file, taken));
        drop(before);
    }

    fn keeping(self: &Arc<Self>, file: OwnedFd, taken: SharePlace) -> HeldNode {
        HeldNode { file: Arc::new(file), _taken: taken, node: Some(Arc::clone(self)) }
    }

    /// The kernel knows it no longer: it goes, and its descriptor with it, when its last user drops it.
    pub fn forgotten(&self) {
        let node = self.lock_held().as_mut().and_then(|held| held.node.take());
        drop(node);
    }

    /// Opens it anew, from the descriptor that is kept for it or by its handle.
    ///
    /// # Errors
    /// `ESTALE` when there is no way to it, and those of `open(2)`.
    pub fn reopen(&self, flags: OFlags) -> Result<OwnedFd, Errno> {
        if let Some(held) = self.held() {
            return reopen(held.as_fd(), flags);
        }
        match (self.mount.anchor(), self.handle()) {
            (Some(anchor), Some(handle)) => handle.open(anchor, flags),
            _ => Err(Errno::STALE),
        }
    }

    /// Keeps no descriptor any more.
    pub fn let_go(&self) {
        let held = {
            let mut held = self.lock_held();
            if self.nodes.may_change() {
                self.record.held.store(0, Release);
            }
            held.take()
        };
        drop(held);
    }

    fn lock_held(&self) -> MutexGuard<'_, Option<HeldNode>> {
        self.held.lock().expect("a thread that panics ends the process")
    }

    /// The file has no name any more, or has one again: what it takes is free when its last open file is closed.
    pub fn set_nameless(&self, nameless: bool) {
        self.record.nameless.store(nameless.into(), Release);
    }

    /// Whether the file system frees the file when its last open file is closed.
    pub fn is_nameless(&self) -> bool {
        self.record.nameless.load(Relaxed) != 0
    }

    /// Callers may have a writable mapping of the file from here on. Returns whether that is new.
    ///
    /// Stores through such a mapping go from the kernel to the source and change its times. The mapping keeps the
    /// kernel from forgetting the node, also when the file is closed.
    pub fn set_mappable(&self) -> bool {
        self.record.form.fetch_or(MAPPABLE, AcqRel) & MAPPABLE == 0
    }

    /// Whether callers may have a writable mapping of the file.
    pub fn is_mappable(&self) -> bool {
        self.record.form.load(Acquire) & MAPPABLE != 0
    }

    /// State that its open files share.
    pub fn open(&self) -> MutexGuard<'_, Option<Box<OpenNode>>> {
        self.open.lock().expect("a thread that panics ends the process")
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // Before the descriptor is closed that the cell names.
        let nodes = Arc::clone(&self.nodes);
        nodes.unused(self);
    }
}

impl FileIdentity {
    /// Records it, without its mount.
    pub fn write(&self, cell: &NodeCell) {
        match self {
            Self::Handle { handle, .. } => handle.write(&cell.handle_kind, &cell.handle),
            Self::Number { device, ino, .. } => {
                cell.handle[0].store(*device, Relaxed);
                cell.handle[1].store(*ino, Relaxed);
            }
        }
    }

    /// Its part of a cell's `form`.
    pub fn handle_length(&self) -> u32 {
        match self {
            Self::Handle { handle, .. } => handle.length(),
            Self::Number { .. } => NO_HANDLE,
        }
    }

    /// The identity that [`write`](Self::write) wrote; none if the cell is empty.
    pub fn read(cell: &NodeCell) -> Option<FileIdentity> {
        let mount = cell.mount.load(Relaxed);
        let length = cell.form.load(Relaxed) & HANDLE_LENGTH;
        if length == NO_HANDLE {
            let (device, ino) = (cell.handle[0].load(Relaxed), cell.handle[1].load(Relaxed));
            return Some(Self::Number { mount, device, ino });
        }
        FileHandle::read(length, &cell.handle_kind, &cell.handle).map(|handle| Self::Handle { mount, handle })
    }
}
