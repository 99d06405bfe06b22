//! Nodes: the files and directories that the kernel knows, each by a number that is never used again.
//!
//! A node is found by its [`Identity`], so one file is one node whatever name it was looked up by. It needs no open
//! descriptor: a file handle opens it again. The kernel counts how often it was told of a node, and forgets it by that
//! number; then the node goes.
//!
//! All that is to be known of a node stands in its cell of the region, so that a successor has the same nodes. The cell
//! is there before the kernel is told of the node, and counts before the kernel does: after a kill the count may be too
//! high, never too low.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::fs::{FileType, OFlags};
use rustix::io::Errno;

use super::handle::FileHandle;
use super::mounts::{Mount, reopen};
use super::open_node::OpenNode;
use super::share::{Share, Taken};
use super::state::{HANDLE_LENGTH, MAPPABLE, NO_HANDLE, NodeCell, no_memory, recordable};
use crate::region::Region;
use crate::region::cells::Record;

/// The root's number, as FUSE has it.
pub const ROOT: u64 = 1;

/// A table of as many nodes is kept, however few are in it.
const SMALL: usize = 4096;

/// What makes a file the same file.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Identity {
    /// A handle: number and generation in one.
    Handle {
        /// The mount it was reached through.
        mount: u64,
        /// The file.
        handle: FileHandle,
    },
    /// A number that is not used again while the node holds the file open.
    Number {
        /// The mount it was reached through.
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
    pub id: u64,
    /// What kind of file it is; that never changes.
    pub kind: FileType,
    /// Where it is.
    pub mount: Arc<Mount>,
    identity: Arc<Identity>,
    /// What a successor is to know; how often the kernel was told of it is changed under the table's lock only. Dropped
    /// before the descriptor that it names is closed.
    pub record: Record<NodeCell>,
    held: Mutex<Option<(Arc<OwnedFd>, Taken)>>,
    /// What its open files share, while there are any.
    open: Mutex<Option<Box<OpenNode>>>,
}

impl Node {
    /// The handle it is opened with, if its file system has handles.
    pub fn handle(&self) -> Option<&FileHandle> {
        match &*self.identity {
            Identity::Handle { handle, .. } => Some(handle),
            Identity::Number { .. } => None,
        }
    }

    /// Whether the kernel was told of it just once.
    pub fn is_new(&self) -> bool {
        self.record.lookups.load(Relaxed) == 1
    }

    /// The descriptor that is kept for it: where there is no handle, and where the file has no name any more.
    pub fn held(&self) -> Option<Arc<OwnedFd>> {
        let held = self.held.lock().expect("a thread that panics ends the process");
        held.as_ref().map(|(file, _)| Arc::clone(file))
    }

    /// Keeps `file`, open on this node, until the kernel forgets the node.
    pub fn hold(&self, file: OwnedFd, taken: Taken) {
        let file = recordable(file);
        let mut held = self.held.lock().expect("a thread that panics ends the process");
        self.record.held.store(file.as_raw_fd().cast_unsigned(), Release);
        *held = Some((Arc::new(file), taken));
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
        let mut held = self.held.lock().expect("a thread that panics ends the process");
        self.record.held.store(0, Release);
        *held = None;
    }

    /// The file has no name any more, or has one again: what it takes is free when its last open file is closed.
    pub fn set_nameless(&self, nameless: bool) {
        self.record.nameless.store(nameless.into(), Release);
    }

    /// Whether its bytes go with its last open file.
    pub fn is_nameless(&self) -> bool {
        self.record.nameless.load(Relaxed) != 0
    }

    /// Callers may have a writable mapping of the file from here on. Tells whether that is new.
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

    /// What its open files share.
    pub fn open(&self) -> MutexGuard<'_, Option<Box<OpenNode>>> {
        self.open.lock().expect("a thread that panics ends the process")
    }
}

/// The nodes that the kernel knows.
pub struct Nodes {
    region: Arc<Region>,
    table: Mutex<Table>,
}

struct Table {
    by_id: HashMap<u64, Arc<Node>>,
    by_identity: HashMap<Arc<Identity>, Arc<Node>>,
}

/// What a node begins with.
pub struct Found {
    /// What makes it the file it is.
    pub identity: Identity,
    /// Where it is.
    pub mount: Arc<Mount>,
    /// What kind of file it is.
    pub kind: FileType,
    /// What it is charged with if the kernel did not know it.
    pub charge: u64,
}

impl Nodes {
    /// The root alone, open as `source`.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new(region: Arc<Region>, found: Found, source: OwnedFd, share: &Share) -> Result<Self, Errno> {
        region.header().counters.next_node.store(ROOT, Release);
        let mut table = Table { by_id: HashMap::new(), by_identity: HashMap::new() };
        let root = table.insert(&region, found)?;
        // The kernel never forgets the root.
        root.record.lookups.store(1, Release);
        root.hold(source, share.take_anyway());
        Ok(Self { region, table: Mutex::new(table) })
    }

    /// Those that a dead server left.
    pub fn inherit(region: Arc<Region>, nodes: Vec<Inherited>, share: &Share) -> Self {
        let mut by_id = HashMap::with_capacity(nodes.len());
        let mut by_identity = HashMap::with_capacity(nodes.len());
        for Inherited { id, kind, mount, identity, record, held } in nodes {
            let identity = Arc::new(identity);
            let held = Mutex::new(held.map(|held| (Arc::new(held), share.take_anyway())));
            let open = Mutex::default();
            let node = Arc::new(Node { id, kind, mount, identity: Arc::clone(&identity), record, held, open });
            by_identity.insert(identity, Arc::clone(&node));
            by_id.insert(id, node);
        }
        Self { region, table: Mutex::new(Table { by_id, by_identity }) }
    }

    /// The node of that number.
    pub fn get(&self, id: u64) -> Option<Arc<Node>> {
        self.lock().by_id.get(&id).cloned()
    }

    /// The node of that file, if the kernel knows it.
    pub fn find(&self, identity: &Identity) -> Option<Arc<Node>> {
        self.lock().by_identity.get(identity).cloned()
    }

    /// The node of that file. The kernel is told of it once more.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn enter(&self, found: Found) -> Result<Arc<Node>, Errno> {
        let mut table = self.lock();
        let node = match table.by_identity.get(&found.identity) {
            Some(node) => Arc::clone(node),
            None => table.insert(&self.region, found)?,
        };
        node.record.lookups.fetch_add(1, Release);
        Ok(node)
    }

    /// The kernel forgets `lookups` of the times it was told of a node. Tells whether the node is gone.
    pub fn forget(&self, id: u64, lookups: u64) -> bool {
        let mut table = self.lock();
        let Some(node) = table.by_id.get(&id) else { return false };
        let left = node.record.lookups.load(Relaxed).saturating_sub(lookups);
        node.record.lookups.store(left, Release);
        if left > 0 || id == ROOT {
            return false;
        }
        if let Some(node) = table.by_id.remove(&id) {
            table.by_identity.remove(&node.identity);
        }
        let shrunk = table.shrink();
        drop(table);
        if shrunk {
            give_back_memory();
        }
        true
    }

    /// All of them.
    pub fn all(&self) -> Vec<Arc<Node>> {
        self.lock().by_id.values().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().expect("a thread that panics ends the process")
    }
}

impl Table {
    /// Gives up room once most of it is empty; tells whether it did.
    fn shrink(&mut self) -> bool {
        let left = self.by_id.len();
        let shrinks = self.by_id.capacity() > SMALL && left < self.by_id.capacity() / 8;
        if shrinks {
            self.by_id.shrink_to(left * 2);
            self.by_identity.shrink_to(left * 2);
        }
        shrinks
    }

    fn insert(&mut self, region: &Arc<Region>, found: Found) -> Result<Arc<Node>, Errno> {
        let Found { identity, mount, kind, charge } = found;
        let next = &region.header().counters.next_node;
        let id = next.load(Acquire);
        // Also if this server dies now, the number is not used again.
        next.store(id.wrapping_add(1), Release);
        let record = Record::new(region, |cell: &NodeCell| {
            cell.form.store(kind.as_raw_mode() | identity.handle_length(), Relaxed);
            cell.id.store(id, Relaxed);
            cell.mount.store(mount.index(), Relaxed);
            cell.lookups.store(0, Relaxed);
            cell.charged.store(charge, Relaxed);
            [&cell.held, &cell.nameless, &cell.backing].into_iter().for_each(|word| word.store(0, Relaxed));
            identity.write(cell);
        });
        let identity = Arc::new(identity);
        let node = Arc::new(Node {
            id,
            kind,
            mount,
            identity: Arc::clone(&identity),
            record: record.map_err(no_memory)?,
            held: Mutex::default(),
            open: Mutex::default(),
        });
        self.by_id.insert(node.id, Arc::clone(&node));
        self.by_identity.insert(identity, Arc::clone(&node));
        Ok(node)
    }
}

impl Identity {
    fn write(&self, cell: &NodeCell) {
        match self {
            Self::Handle { handle, .. } => handle.write(&cell.handle_kind, &cell.handle),
            Self::Number { device, ino, .. } => {
                cell.handle[0].store(*device, Relaxed);
                cell.handle[1].store(*ino, Relaxed);
            }
        }
    }

    fn handle_length(&self) -> u32 {
        match self {
            Self::Handle { handle, .. } => handle.length(),
            Self::Number { .. } => NO_HANDLE,
        }
    }

    /// What [`write`](Self::write) wrote; none if nobody did.
    pub fn read(cell: &NodeCell, mount: u64) -> Option<Identity> {
        let length = cell.form.load(Relaxed) & HANDLE_LENGTH;
        if length == NO_HANDLE {
            let (device, ino) = (cell.handle[0].load(Relaxed), cell.handle[1].load(Relaxed));
            return Some(Self::Number { mount, device, ino });
        }
        FileHandle::read(length, &cell.handle_kind, &cell.handle).map(|handle| Self::Handle { mount, handle })
    }
}

/// A node as a dead server left it.
pub struct Inherited {
    /// As in [`Node`].
    pub id: u64,
    /// As in [`Node`].
    pub kind: FileType,
    /// As in [`Node`].
    pub mount: Arc<Mount>,
    /// What makes it the file it is.
    pub identity: Identity,
    /// As in [`Node`].
    pub record: Record<NodeCell>,
    /// The descriptor that is kept for it.
    pub held: Option<OwnedFd>,
}

/// Nodes are many small pieces of memory; the allocator keeps them for the next ones unless it is told.
fn give_back_memory() {
    // SAFETY: the call touches only memory that is free.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0)
    };
}
