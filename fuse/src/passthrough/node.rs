//! Nodes: the files and directories that the kernel knows, each by a number that is never used again.
//!
//! The server finds a node by its [`FileIdentity`], so a file is one node under all its names. A node needs no open descriptor: the
//! server opens the file again by a file handle. The kernel counts the answers that gave it a node, and names that count when it
//! forgets the node. Then the server forgets the node, too.
//!
//! All that podfs knows of a node is in the node's cell of the region, so that a successor has the same nodes. A [`Node`] exists
//! only while a request, an open file or a kept descriptor uses it; [`Nodes`](super::nodes::Nodes) makes it from the cell.

use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Statx, StatxFlags, openat, statx};
use rustix::io::Errno;

use super::descriptor::reopen;
use super::devices::device_of;
use super::handle::FileHandle;
use super::node_names::{self, DirectoryName};
use super::nodes::SharedNodes;
use super::open_node::OpenNode;
use super::share::DescriptorPermit;
use super::source_mount::SourceMount;
use super::state::{DIRECTORY_NAME, HANDLE_LENGTH, MAPPABLE, NO_HANDLE, NodeCell, recordable};
use crate::region::cell_id::CellId;
use crate::region::cells::CellRef;
use crate::session::NodeId;

/// The most directories above a node that the server goes through to find the node by its name.
const LEVELS: usize = 256;

/// The identity of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FileIdentity {
    /// A file handle, which stands for inode number and generation.
    Handle {
        /// The mount through which the server reached the file, as the volume numbers it.
        mount: u64,
        /// The file.
        handle: FileHandle,
    },
    /// An inode number. A file system of the kernel does not use it again while the node holds the file open; a server of FUSE may. A node
    /// that the server has to find by its name may get the number of a deleted file.
    Number {
        /// The mount through which the server reached the file, as the volume numbers it.
        mount: u64,
        /// The device that the inode number belongs to: some file systems have several.
        device: u64,
        /// The inode number.
        ino: u64,
    },
}

/// A file or directory that the kernel knows.
#[derive(Debug)]
pub struct Node {
    /// The number by which the kernel knows the node.
    pub id: NodeId,
    /// The type of the file, which never changes.
    pub kind: FileType,
    /// The mount that the file is on.
    pub mount: Arc<SourceMount>,
    identity: FileIdentity,
    /// The node's cell, which a successor reads. The kernel's count in it changes only under the lock on all nodes.
    pub record: CellRef<NodeCell>,
    held: Mutex<Option<HeldNode>>,
    /// State that the open files of the node share; `None` while no file is open.
    open: Mutex<Option<Box<OpenNode>>>,
    nodes: Arc<SharedNodes>,
}

/// A descriptor that the server keeps for a node.
#[derive(Debug)]
struct HeldNode {
    file: Arc<OwnedFd>,
    _taken: DescriptorPermit,
    /// The node itself: this reference keeps the node, with its descriptor, until the kernel forgets the node.
    node: Option<Arc<Node>>,
}

impl Node {
    /// The node of the cell `record`. [`Nodes`](super::nodes::Nodes) alone makes nodes.
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

    /// The handle that opens the file, if the file system has handles.
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

    /// The descriptor that the server keeps for the node: for the root, a node without a handle, a removed directory, and
    /// a removed special file.
    pub fn held(&self) -> Option<Arc<OwnedFd>> {
        self.lock_held().as_ref().map(|held| Arc::clone(&held.file))
    }

    /// Keeps `file`, open on this node, until the kernel forgets the node.
    pub fn hold(self: &Arc<Self>, file: OwnedFd, taken: DescriptorPermit) {
        let file = recordable(file);
        let number = file.as_raw_fd().cast_unsigned();
        let before = {
            let mut held = self.lock_held();
            self.record.held.store(number, Release);
            held.replace(self.keeping(file, taken))
        };
        drop(before);
        // The kernel may have forgotten the node meanwhile.
        if self.record.lookups.load(Acquire) == 0 {
            self.forgotten();
        }
    }

    /// As [`hold`](Self::hold), for a descriptor that a dead server kept. Does not change the node's cell.
    pub fn hold_on(self: &Arc<Self>, file: OwnedFd, taken: DescriptorPermit) {
        let before = self.lock_held().replace(self.keeping(file, taken));
        drop(before);
    }

    fn keeping(self: &Arc<Self>, file: OwnedFd, taken: DescriptorPermit) -> HeldNode {
        HeldNode { file: Arc::new(file), _taken: taken, node: Some(Arc::clone(self)) }
    }

    /// The kernel has forgotten the node: the last user that drops the node also closes the kept descriptor.
    pub fn forgotten(&self) {
        let node = self.lock_held().as_mut().and_then(|held| held.node.take());
        drop(node);
    }

    /// Opens the file anew, through the kept descriptor or by the handle.
    ///
    /// # Errors
    /// `ESTALE` when the node has neither, or when the file is gone; and those of `open(2)`.
    pub fn reopen(&self, flags: OFlags) -> Result<OwnedFd, Errno> {
        if let Some(held) = self.held() {
            return reopen(held.as_fd(), flags);
        }
        match (self.mount.anchor(), self.handle()) {
            (Some(anchor), Some(handle)) => handle.open(anchor, flags),
            (None, Some(_)) => Err(Errno::STALE),
            (_, None) => reopen(self.open_by_name(LEVELS)?.as_fd(), flags),
        }
    }

    /// Opens a node without a handle by its name, with `O_PATH`. `levels` limits the number of directories above it.
    ///
    /// # Errors
    /// `ESTALE` when the name leads to another file or to none, and those of `open(2)`.
    fn open_by_name(&self, levels: usize) -> Result<OwnedFd, Errno> {
        let levels = levels.checked_sub(1).ok_or(Errno::STALE)?;
        let DirectoryName { parent, name } = self.directory_name().ok_or(Errno::STALE)?;
        let parent = self.nodes.get(parent).ok_or(Errno::STALE)?;
        let directory = match parent.held() {
            Some(held) => held,
            None if parent.handle().is_some() => Arc::new(parent.reopen(OFlags::PATH)?),
            None => Arc::new(parent.open_by_name(levels)?),
        };
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = openat(&*directory, &*name, flags, Mode::empty());
        let file = opened.map_err(|errno| if errno == Errno::NOENT { Errno::STALE } else { errno })?;
        let found = statx(&file, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)?;
        if self.is_of(&found) { Ok(file) } else { Err(Errno::STALE) }
    }

    /// Whether `found` can be the file of this node.
    pub fn is_of(&self, found: &Statx) -> bool {
        let is_same = match self.identity {
            FileIdentity::Number { device, ino, .. } => (device_of(found), found.stx_ino) == (device, ino),
            FileIdentity::Handle { .. } => true,
        };
        is_same && FileType::from_raw_mode(found.stx_mode.into()) == self.kind
    }

    /// Whether this inode number is the identity of the node.
    pub fn has_number(&self, number: u64) -> bool {
        matches!(self.identity, FileIdentity::Number { ino, .. } if ino == number)
    }

    /// The name by which the server finds the node again; `None` for a node with a handle, and for one that keeps its descriptor.
    pub fn directory_name(&self) -> Option<DirectoryName> {
        let _held = self.lock_held();
        node_names::read(self.record.region(), self.name_cell()?, self.id).map(|(name, _)| name)
    }

    /// Records the name of a node without a handle. Without memory the node has none, and keeps its descriptor.
    pub fn record_name(&self, parent: NodeId, name: &OsStr) {
        let _held = self.lock_held();
        let region = self.record.region();
        let before = self.name_cell();
        let known = before.and_then(|first| node_names::read(region, first, self.id));
        if known.is_some_and(|(known, _)| known.parent == parent && *known.name == *name) {
            return;
        }
        let first = node_names::record(region, self.id, parent, name).map_or(0, CellId::to_word);
        self.replace_name(first, before);
    }

    /// The node keeps its descriptor from now on, because it loses its name.
    pub fn forget_name(&self) {
        let _held = self.lock_held();
        if let Some(before) = self.name_cell() {
            self.replace_name(0, Some(before));
        }
    }

    fn replace_name(&self, first: u64, before: Option<CellId>) {
        self.record.handle[DIRECTORY_NAME].store(first, Release);
        if let Some(before) = before {
            node_names::free(self.record.region(), before, self.id);
        }
    }

    /// The first cell of the node's name.
    fn name_cell(&self) -> Option<CellId> {
        name_cell(&self.record)
    }

    /// Closes the kept descriptor, if the server can find the node again. Only for a server that answers requests, which has made the
    /// region or taken it over before.
    pub fn let_go_if_named(&self) {
        debug_assert!(self.nodes.may_change(), "another server may have the node's cell");
        let held = {
            let mut held = self.lock_held();
            let name = self.name_cell().and_then(|first| node_names::read(self.record.region(), first, self.id));
            if name.is_none() {
                return;
            }
            self.record.held.store(0, Release);
            held.take()
        };
        drop(held);
    }

    /// Gives up the kept descriptor, if there is one. Also for a server that could not take the volume over: then the cell stays as it is.
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

    /// Records whether the file has no name any more. The space of such a file becomes free when its last open file is closed.
    pub fn set_nameless(&self, nameless: bool) {
        self.record.nameless.store(nameless.into(), Release);
    }

    /// Whether the file system frees the file when its last open file is closed.
    pub fn is_nameless(&self) -> bool {
        self.record.nameless.load(Relaxed) != 0
    }

    /// Records that callers may have a writable mapping of the file from now on. Returns whether that is new.
    ///
    /// Stores through such a mapping go from the kernel to the source and change the times of the file there. The mapping
    /// keeps the kernel from forgetting the node, also when the file is closed.
    pub fn set_mappable(&self) -> bool {
        self.record.form.fetch_or(MAPPABLE, AcqRel) & MAPPABLE == 0
    }

    /// Whether callers may have a writable mapping of the file.
    pub fn is_mappable(&self) -> bool {
        self.record.form.load(Acquire) & MAPPABLE != 0
    }

    /// Locks the state that the open files of the node share.
    pub fn open(&self) -> MutexGuard<'_, Option<Box<OpenNode>>> {
        self.open.lock().expect("a thread that panics ends the process")
    }
}

/// Whether files of this type are FIFOs, sockets or devices, which the kernel opens without the server.
pub fn is_special(kind: FileType) -> bool {
    matches!(kind, FileType::Fifo | FileType::Socket | FileType::CharacterDevice | FileType::BlockDevice)
}

/// The first cell of the name of the node in `cell`, which may have a handle.
pub fn name_cell(cell: &NodeCell) -> Option<CellId> {
    let has_handle = cell.form.load(Relaxed) & HANDLE_LENGTH != NO_HANDLE;
    if has_handle { None } else { CellId::from_word(cell.handle[DIRECTORY_NAME].load(Acquire)) }
}

impl Drop for Node {
    fn drop(&mut self) {
        // The cell names the kept descriptor, so this frees the cell before the descriptor is closed.
        let nodes = Arc::clone(&self.nodes);
        nodes.unused(self);
    }
}

impl FileIdentity {
    /// Records the identity in `cell`, without the mount.
    pub fn write(&self, cell: &NodeCell) {
        match self {
            Self::Handle { handle, .. } => handle.write(&cell.handle_kind, &cell.handle),
            Self::Number { device, ino, .. } => {
                cell.handle[0].store(*device, Relaxed);
                cell.handle[1].store(*ino, Relaxed);
                cell.handle[DIRECTORY_NAME].store(0, Relaxed);
            }
        }
    }

    /// The bits of a cell's `form` that record the identity: the length of the handle, or [`NO_HANDLE`].
    pub fn handle_length(&self) -> u32 {
        match self {
            Self::Handle { handle, .. } => handle.length(),
            Self::Number { .. } => NO_HANDLE,
        }
    }

    /// The identity that [`write`](Self::write) wrote; `None` if the recorded length is impossible.
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
