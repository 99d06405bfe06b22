//! Nodes: the files and directories that the kernel knows, each by a number that is never used again.
//!
//! A node is found by its [`Identity`], so one file is one node whatever name it was looked up by. It needs no open
//! descriptor: a file handle opens it again. The kernel counts how often it was told of a node, and forgets it by that
//! number; then the node goes.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::fs::FileType;

use super::handle::FileHandle;
use super::mounts::Mount;
use super::open_node::OpenNode;

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
    /// How often the kernel was told of it. Changed under the table's lock only.
    lookups: AtomicU64,
    /// Bytes that it is charged with, where the volume has a limit.
    pub charged: AtomicU64,
    held: Mutex<Option<Arc<OwnedFd>>>,
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
        self.lookups.load(Ordering::Relaxed) == 1
    }

    /// The descriptor that is kept for it: where there is no handle, and where the file has no name any more.
    pub fn held(&self) -> Option<Arc<OwnedFd>> {
        self.held.lock().expect("a thread that panics ends the process").clone()
    }

    /// Keeps `file`, open on this node, until the kernel forgets the node.
    pub fn hold(&self, file: Arc<OwnedFd>) {
        *self.held.lock().expect("a thread that panics ends the process") = Some(file);
    }

    /// What its open files share.
    pub fn open(&self) -> MutexGuard<'_, Option<Box<OpenNode>>> {
        self.open.lock().expect("a thread that panics ends the process")
    }
}

/// The nodes that the kernel knows.
pub struct Nodes {
    table: Mutex<Table>,
}

struct Table {
    by_id: HashMap<u64, Arc<Node>>,
    by_identity: HashMap<Arc<Identity>, Arc<Node>>,
    next: u64,
}

impl Nodes {
    /// The root alone, open as `source`.
    pub fn new(identity: Identity, mount: Arc<Mount>, kind: FileType, source: OwnedFd) -> Self {
        let mut table = Table { by_id: HashMap::new(), by_identity: HashMap::new(), next: ROOT };
        let root = table.insert(identity, mount, kind);
        // The kernel never forgets the root.
        root.lookups.store(1, Ordering::Relaxed);
        root.hold(Arc::new(source));
        Self { table: Mutex::new(table) }
    }

    /// The node of that number.
    pub fn get(&self, id: u64) -> Option<Arc<Node>> {
        self.lock().by_id.get(&id).cloned()
    }

    /// The node of that file, if the kernel knows it.
    pub fn find(&self, identity: &Identity) -> Option<Arc<Node>> {
        self.lock().by_identity.get(identity).cloned()
    }

    /// The node of that file. The kernel is told of it once more; `charge` is what a new one is charged with.
    pub fn enter(&self, identity: Identity, mount: Arc<Mount>, kind: FileType, charge: u64) -> Arc<Node> {
        let mut table = self.lock();
        let node = match table.by_identity.get(&identity) {
            Some(node) => Arc::clone(node),
            None => {
                let node = table.insert(identity, mount, kind);
                node.charged.store(charge, Ordering::Relaxed);
                node
            }
        };
        node.lookups.fetch_add(1, Ordering::Relaxed);
        node
    }

    /// The kernel forgets `lookups` of the times it was told of a node. Tells whether the node is gone.
    pub fn forget(&self, id: u64, lookups: u64) -> bool {
        let mut table = self.lock();
        let Some(node) = table.by_id.get(&id) else { return false };
        let known = node.lookups.load(Ordering::Relaxed);
        let left = known.saturating_sub(lookups);
        node.lookups.store(left, Ordering::Relaxed);
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

    fn insert(&mut self, identity: Identity, mount: Arc<Mount>, kind: FileType) -> Arc<Node> {
        let identity = Arc::new(identity);
        let node = Arc::new(Node {
            id: self.next,
            kind,
            mount,
            identity: Arc::clone(&identity),
            lookups: AtomicU64::new(0),
            charged: AtomicU64::new(0),
            held: Mutex::default(),
            open: Mutex::default(),
        });
        self.next += 1;
        self.by_id.insert(node.id, Arc::clone(&node));
        self.by_identity.insert(identity, Arc::clone(&node));
        node
    }
}

/// Nodes are many small pieces of memory; the allocator keeps them for the next ones unless it is told.
fn give_back_memory() {
    // SAFETY: the call touches only memory that is free.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0)
    };
}
