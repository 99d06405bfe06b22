//! All nodes of a volume, by number and by identity.
//!
//! Each node that the kernel knows has a cell in the region, and an entry in two tables of cell numbers; comparing entries reads
//! the cells. The server makes a [`Node`] from a cell when a request uses the node. Each cell has at most one [`Node`] that is not
//! being dropped.
//!
//! 1. The cell is complete before an answer gives the node to the kernel, and the cell counts that answer before the kernel counts
//!    it: after a kill the count may be too high, never too low.
//! 2. When the kernel forgets a node that no request uses, the node is *forgotten* at once. Otherwise the last user that drops the
//!    [`Node`] does that. A kept descriptor keeps the [`Node`] only until the kernel forgets it.
//! 3. The thread that drops the last reference to a [`Node`] looks, under the lock of the tables, whether the cell has another
//!    [`Node`] by now. If so, the thread leaves the cell to the users of that [`Node`].
//! 4. The tables keep a mount as long as the kernel knows a node on it.
//! 5. The last [`FORGOTTEN`] forgotten nodes that a handle opens keep their cells and their entries, with a count of zero. So
//!    a caller's file handle, which contains a node's number, still leads to the node (`filesystem::export`). A later lookup of
//!    the file finds the same node, with the same number. The tables remove all other forgotten nodes.
//! 6. The numbers of a volume begin at a random one, so the number in a file handle of another volume leads to no node.
//!
//! No node and no mount is dropped under the lock of the tables: dropping a node takes that lock.

use std::collections::HashMap;
use std::hash::BuildHasher;
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use hashbrown::HashTable;
use lru::LruCache;
use rustix::fs::FileType;
use rustix::io::Errno;

use super::hashing::{HashKey, random};
use super::node::{FileIdentity, Node, is_special, name_cell};
use super::node_names;
use super::share::Share;
use super::source_mount::SourceMount;
use super::state::{MAPPABLE, NodeCell, no_memory};
use crate::region::Region;
use crate::region::cell_id::CellId;
use crate::region::cells::CellRef;
use crate::session::NodeId;

/// The least capacity that a table keeps, in nodes.
const SMALL: usize = 4096;

/// The most nodes to keep that the kernel has forgotten.
const FORGOTTEN: usize = 8192;

/// The nodes that the kernel knows, and those that it forgot last.
pub struct Nodes(Arc<SharedNodes>);

/// State that the nodes in use refer to.
pub struct SharedNodes {
    region: Arc<Region>,
    key: HashKey,
    tables: Mutex<NodeTables>,
    /// Whether a FIFO, a socket or a device was among the nodes.
    has_special_files: AtomicBool,
}

struct NodeTables {
    by_id: HashTable<CellId>,
    by_identity: HashTable<CellId>,
    in_use: HashMap<CellId, Weak<Node>, HashKey>,
    /// Forgotten nodes. If there are too many, the one that was forgotten first is removed.
    forgotten: LruCache<CellId, (), HashKey>,
    /// The mounts, by the volume's numbers. With each, the number of nodes on it that are not forgotten.
    mounts: HashMap<u64, (Arc<SourceMount>, usize), HashKey>,
}

impl Default for NodeTables {
    fn default() -> Self {
        Self {
            by_id: HashTable::new(),
            by_identity: HashTable::new(),
            in_use: HashMap::default(),
            forgotten: LruCache::unbounded_with_hasher(HashKey::default()),
            mounts: HashMap::default(),
        }
    }
}

/// The fields of a new node.
pub struct NewNode {
    /// The identity of the file.
    pub identity: FileIdentity,
    /// The mount that the file is on.
    pub mount: Arc<SourceMount>,
    /// The type of the file.
    pub kind: FileType,
    /// The bytes that a limited volume charges for the file, if the kernel did not know it.
    pub charge: u64,
}

impl Nodes {
    /// A table without nodes.
    pub fn empty(region: Arc<Region>) -> Self {
        Self(Arc::new(SharedNodes {
            region,
            key: HashKey::default(),
            tables: Mutex::default(),
            has_special_files: AtomicBool::new(false),
        }))
    }

    /// Reserves room for so many more nodes, so that the tables need not grow step by step.
    pub fn reserve(&self, number: usize) {
        let mut tables = self.0.lock();
        tables.by_id.reserve(number, |cell| self.0.hash_of_id(*cell));
        tables.by_identity.reserve(number, |cell| self.0.hash_of_identity(*cell));
    }

    /// A table with the root alone, on which `source` is open.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new(region: Arc<Region>, found: NewNode, source: OwnedFd, share: &Share) -> Result<Self, Errno> {
        region.header().counters.next_node.store(NodeId::ROOT.0, Release);
        let nodes = Self::empty(region);
        // The kernel never forgets the root.
        let root = nodes.enter(found)?;
        // The first number is below 2^62, so a server can never use up the numbers above.
        nodes.0.region.header().counters.next_node.store((random() >> 2) + NodeId::ROOT.0 + 1, Release);
        root.hold(source, share.take_anyway());
        Ok(nodes)
    }

    /// Takes over the node in `cell`, which a dead server left, with its identity, its mount, and the descriptor kept for it.
    /// Returns `false` if there is a node with that number already, or if there are too many forgotten nodes.
    pub fn inherit(
        &self,
        cell: CellId,
        identity: &FileIdentity,
        mount: &Arc<SourceMount>,
        held: Option<OwnedFd>,
        share: &Share,
    ) -> bool {
        let shared = &*self.0;
        let id = NodeId(shared.cell(cell).id.load(Relaxed));
        let is_forgotten = id != NodeId::ROOT && shared.cell(cell).lookups.load(Relaxed) == 0;
        let (id_hash, identity_hash) = (shared.key.hash_one(id), shared.key.hash_one(identity));
        shared.note_kind(shared.cell(cell).kind());
        let mut tables = shared.lock();
        let is_id = |cell: &CellId| NodeId(shared.cell(*cell).id.load(Relaxed)) == id;
        if tables.by_id.find(id_hash, is_id).is_some() || (is_forgotten && tables.forgotten.len() == FORGOTTEN) {
            return false;
        }
        if tables.by_identity.find(identity_hash, |cell| shared.identity(*cell) == *identity).is_none() {
            tables.by_identity.insert_unique(identity_hash, cell, |cell| shared.hash_of_identity(*cell));
        }
        tables.by_id.insert_unique(id_hash, cell, |cell| shared.hash_of_id(*cell));
        if is_forgotten {
            tables.forgotten.put(cell, ());
            return true;
        }
        tables.count_node(mount);
        let node = held.is_some().then(|| self.0.node(&mut tables, cell)).flatten();
        drop(tables);
        if let (Some(node), Some(held)) = (node, held) {
            node.hold_on(held, share.take_anyway());
        }
        true
    }

    /// The node of that number.
    pub fn get(&self, id: NodeId) -> Option<Arc<Node>> {
        self.0.get(id)
    }

    /// The nodes without a handle that keep a descriptor.
    pub fn held(&self) -> Vec<NodeId> {
        let tables = self.0.lock();
        let nodes: Vec<_> = tables.in_use.values().filter_map(Weak::upgrade).collect();
        // The last reference to a node is dropped when the tables are not locked.
        drop(tables);
        let is_held = |node: &&Arc<Node>| node.id != NodeId::ROOT && node.handle().is_none() && node.held().is_some();
        nodes.iter().filter(is_held).map(|node| node.id).collect()
    }

    /// Whether the kernel knows the node of that number.
    pub fn is_known(&self, id: NodeId) -> bool {
        let tables = self.0.lock();
        self.0.find_id(&tables, id).is_some_and(|cell| self.0.cell(cell).lookups.load(Relaxed) > 0)
    }

    /// The node of that file, if the kernel knows it.
    pub fn find(&self, identity: &FileIdentity) -> Option<Arc<Node>> {
        let mut tables = self.0.lock();
        let cell = self.0.find_identity(&tables, identity)?;
        if self.0.cell(cell).lookups.load(Relaxed) == 0 {
            return None;
        }
        self.0.node(&mut tables, cell)
    }

    /// The file of `node` is deleted, and another file has its identity now.
    pub fn separate(&self, node: &Node) {
        let mut tables = self.0.lock();
        if let Some(cell) = self.0.find_id(&tables, node.id) {
            self.0.remove_identity(&mut tables, cell);
        }
    }

    /// The node of that file, a new one if there is none. Counts the answer that will give the node to the kernel.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn enter(&self, found: NewNode) -> Result<Arc<Node>, Errno> {
        let mut removed = RemovedEntries::default();
        let mut tables = self.0.lock();
        let known = self.0.find_identity(&tables, &found.identity);
        let known = known.filter(|cell| {
            let cell = *cell;
            let is_another = !self.0.cell(cell).is_of(found.kind);
            if is_another && self.0.cell(cell).lookups.load(Relaxed) == 0 {
                // The file system has given the handle of a deleted file to another file.
                removed = self.0.remove(&mut tables, cell);
            } else if is_another {
                // The kernel still knows the deleted file.
                self.0.remove_identity(&mut tables, cell);
            }
            !is_another
        });
        let cell = match known {
            Some(cell) => Ok(self.0.remember(&mut tables, cell, &found.mount)),
            None => self.0.insert(&mut tables, &found),
        };
        let node = cell.map(|cell| {
            self.0.cell(cell).lookups.fetch_add(1, Release);
            self.0.node(&mut tables, cell)
        });
        drop(tables);
        self.0.give_back(removed);
        node?.ok_or(Errno::STALE)
    }

    /// The kernel forgets `lookups` of the answers that gave it a node. Returns whether it does not know the node any more.
    pub fn forget(&self, id: NodeId, lookups: u64) -> bool {
        let shared = &*self.0;
        let mut tables = shared.lock();
        let Some(cell) = shared.find_id(&tables, id) else { return false };
        let count = &shared.cell(cell).lookups;
        let remaining = count.load(Relaxed).saturating_sub(lookups);
        count.store(remaining, Release);
        if remaining > 0 || id == NodeId::ROOT {
            return false;
        }
        match tables.in_use.get(&cell).map(Weak::upgrade) {
            None => {
                let removed = shared.retire(&mut tables, cell);
                drop(tables);
                shared.give_back(removed);
            }
            // The last user of the node forgets it. That user may be dropping the node at this moment.
            Some(node) => {
                drop(tables);
                if let Some(node) = node {
                    node.forgotten();
                }
            }
        }
        true
    }

    /// Whether the kernel has got a FIFO, a socket or a device from this server or its predecessor.
    pub fn has_special_files(&self) -> bool {
        self.0.has_special_files.load(Relaxed)
    }

    /// Returns the nodes that have a backing id.
    pub fn with_backing(&self) -> Vec<Arc<Node>> {
        let mut tables = self.0.lock();
        let backed = |cell: &CellId| self.0.cell(*cell).backing.load(Relaxed) != 0;
        let cells: Vec<CellId> = tables.by_id.iter().copied().filter(backed).collect();
        cells.into_iter().filter_map(|cell| self.0.node(&mut tables, cell)).collect()
    }
}

impl Drop for Nodes {
    /// The volume is unmounted, or could not be taken over.
    fn drop(&mut self) {
        let NodeTables { by_id, in_use, mounts, .. } = std::mem::take(&mut *self.0.lock());
        // The kept descriptor and the open files of a node hold references to the node: dropping them frees the node.
        for node in in_use.into_values().filter_map(|node| node.upgrade()) {
            node.let_go();
            let open = node.open().take();
            drop(open);
        }
        by_id.into_iter().for_each(|cell| self.0.free(cell));
        drop(mounts);
    }
}

impl SharedNodes {
    /// The last user of `node` drops it. Forgets the node if the kernel has forgotten it.
    pub fn unused(&self, node: &Node) {
        let cell = node.record.id();
        let mut tables = self.lock();
        if !tables.in_use.get(&cell).is_some_and(|own| ptr::eq(own.as_ptr(), node)) {
            return;
        }
        tables.in_use.remove(&cell);
        let removed = if self.find_id(&tables, node.id) != Some(cell) {
            RemovedEntries { cell: Some(cell), ..RemovedEntries::default() }
        } else if node.record.lookups.load(Relaxed) == 0 {
            self.retire(&mut tables, cell)
        } else {
            return;
        };
        drop(tables);
        self.give_back(removed);
    }

    /// Whether this server may change the cells of nodes: it has made the region or taken it over.
    pub fn may_change(&self) -> bool {
        self.region.is_ours()
    }

    fn cell(&self, cell: CellId) -> &NodeCell {
        self.region.cells().content(cell)
    }

    fn identity(&self, cell: CellId) -> FileIdentity {
        // No server writes an impossible length, and a cell with one is not inherited.
        FileIdentity::read(self.cell(cell)).unwrap_or(FileIdentity::Number { mount: 0, device: 0, ino: 0 })
    }

    fn note_kind(&self, kind: FileType) {
        if is_special(kind) {
            self.has_special_files.store(true, Relaxed);
        }
    }

    fn find_id(&self, tables: &NodeTables, id: NodeId) -> Option<CellId> {
        tables.by_id.find(self.key.hash_one(id), |cell| NodeId(self.cell(*cell).id.load(Relaxed)) == id).copied()
    }

    fn find_identity(&self, tables: &NodeTables, identity: &FileIdentity) -> Option<CellId> {
        let hash = self.key.hash_one(identity);
        tables.by_identity.find(hash, |cell| self.identity(*cell) == *identity).copied()
    }

    fn add_id(&self, tables: &mut NodeTables, cell: CellId, id: NodeId) {
        tables.by_id.insert_unique(self.key.hash_one(id), cell, |cell| self.hash_of_id(*cell));
    }

    fn add_identity(&self, tables: &mut NodeTables, cell: CellId, identity: &FileIdentity) {
        let hash = self.key.hash_one(identity);
        tables.by_identity.insert_unique(hash, cell, |cell| self.hash_of_identity(*cell));
    }

    fn hash_of_id(&self, cell: CellId) -> u64 {
        self.key.hash_one(NodeId(self.cell(cell).id.load(Relaxed)))
    }

    fn hash_of_identity(&self, cell: CellId) -> u64 {
        self.key.hash_one(self.identity(cell))
    }

    /// The node of a cell; none if its mount is gone.
    fn node(self: &Arc<Self>, tables: &mut NodeTables, cell: CellId) -> Option<Arc<Node>> {
        if let Some(node) = tables.in_use.get(&cell).and_then(Weak::upgrade) {
            return Some(node);
        }
        let record = CellRef::<NodeCell>::of(&self.region, cell);
        let (mount, _) = tables.mounts.get(&record.mount.load(Relaxed))?;
        let node = Arc::new(Node::new(record, self.identity(cell), Arc::clone(mount), Arc::clone(self)));
        tables.in_use.insert(cell, Arc::downgrade(&node));
        Some(node)
    }

    fn insert(&self, tables: &mut NodeTables, found: &NewNode) -> Result<CellId, Errno> {
        let NewNode { identity, mount, kind, charge } = found;
        self.note_kind(*kind);
        let next = &self.region.header().counters.next_node;
        let id = NodeId(next.load(Acquire));
        // The counter grows first: if this server dies now, no server uses the number again.
        next.store(id.0.wrapping_add(1), Release);
        let record = CellRef::new(&self.region, |cell: &NodeCell| {
            cell.form.store(kind.as_raw_mode() | identity.handle_length(), Relaxed);
            cell.id.store(id.0, Relaxed);
            cell.mount.store(mount.index(), Relaxed);
            cell.lookups.store(0, Relaxed);
            cell.charged.store(*charge, Relaxed);
            [&cell.held, &cell.nameless, &cell.backing].into_iter().for_each(|word| word.store(0, Relaxed));
            identity.write(cell);
        });
        let cell = record.map_err(no_memory)?.id();
        self.add_id(tables, cell, id);
        self.add_identity(tables, cell, identity);
        tables.count_node(mount);
        Ok(cell)
    }

    /// Counts a node as known to the kernel again, if it is forgotten.
    fn remember(&self, tables: &mut NodeTables, cell: CellId, mount: &Arc<SourceMount>) -> CellId {
        if tables.forgotten.pop(&cell).is_some() {
            // Nothing has the file open, so no process has a mapping of it.
            self.cell(cell).form.fetch_and(!MAPPABLE, AcqRel);
            tables.count_node(mount);
        }
        cell
    }

    /// Forgets a node that the kernel does not know any more, and that no request uses.
    fn retire(&self, tables: &mut NodeTables, cell: CellId) -> RemovedEntries {
        let record = self.cell(cell);
        let has_handle = matches!(self.identity(cell), FileIdentity::Handle { .. });
        // Such a node is not kept for a later lookup: it has no handle, or its file was kept open or has no name any more.
        if !has_handle || record.held.load(Relaxed) != 0 || record.nameless.load(Relaxed) != 0 {
            return self.remove(tables, cell);
        }
        let mut removed = RemovedEntries::default();
        if tables.forgotten.put(cell, ()).is_none() {
            let mount = tables.uncount_node(record.mount.load(Relaxed));
            if tables.forgotten.len() > FORGOTTEN
                && let Some((oldest, ())) = tables.forgotten.pop_lru()
            {
                removed = self.remove_entries(tables, oldest);
            }
            removed.mount = mount;
        }
        removed
    }

    /// Takes a cell out of the tables.
    fn remove(&self, tables: &mut NodeTables, cell: CellId) -> RemovedEntries {
        let is_counted = tables.forgotten.pop(&cell).is_none();
        let index = self.cell(cell).mount.load(Relaxed);
        let mut removed = self.remove_entries(tables, cell);
        if is_counted {
            removed.mount = tables.uncount_node(index);
        }
        removed
    }

    /// Takes a cell out of the tables by number and identity.
    fn remove_entries(&self, tables: &mut NodeTables, cell: CellId) -> RemovedEntries {
        let own = |other: &CellId| *other == cell;
        if let Ok(entry) = tables.by_id.find_entry(self.hash_of_id(cell), own) {
            entry.remove();
        }
        self.remove_identity(tables, cell);
        // If a request uses the node, its last user frees the cell.
        let is_used = tables.in_use.contains_key(&cell);
        RemovedEntries { cell: (!is_used).then_some(cell), mount: None, has_shrunk: self.shrink(tables) }
    }

    /// Gives up memory of the tables if most of it is unused. Returns whether it did.
    fn shrink(&self, tables: &mut NodeTables) -> bool {
        let count = tables.by_id.len();
        let shrinks = tables.by_id.capacity() > SMALL && count < tables.by_id.capacity() / 8;
        if shrinks {
            tables.by_id.shrink_to(count * 2, |cell| self.hash_of_id(*cell));
            tables.by_identity.shrink_to(count * 2, |cell| self.hash_of_identity(*cell));
            tables.in_use.shrink_to(tables.in_use.len() * 2);
        }
        shrinks
    }

    /// Frees a removed cell and mount. The caller does not hold the lock on the tables.
    fn give_back(&self, removed: RemovedEntries) {
        if let Some(cell) = removed.cell {
            self.free(cell);
        }
        drop(removed.mount);
        if removed.has_shrunk {
            // Without this call the allocator keeps freed memory.
            // SAFETY: the call touches only memory that is free.
            #[cfg(target_env = "gnu")]
            unsafe {
                libc::malloc_trim(0)
            };
        }
    }

    /// Frees the cell of a node, and those of its name.
    fn free(&self, cell: CellId) {
        let (id, name) = (NodeId(self.cell(cell).id.load(Relaxed)), name_cell(self.cell(cell)));
        self.region.cells().free(cell);
        if let Some(name) = name {
            node_names::free(&self.region, name, id);
        }
    }

    /// As [`Nodes::get`].
    pub fn get(self: &Arc<Self>, id: NodeId) -> Option<Arc<Node>> {
        let mut tables = self.lock();
        let cell = self.find_id(&tables, id)?;
        self.node(&mut tables, cell)
    }

    /// Takes a cell out of the table by identity: another file has the identity now.
    fn remove_identity(&self, tables: &mut NodeTables, cell: CellId) {
        if let Ok(entry) = tables.by_identity.find_entry(self.hash_of_identity(cell), |other| *other == cell) {
            entry.remove();
        }
    }

    fn lock(&self) -> MutexGuard<'_, NodeTables> {
        self.tables.lock().expect("a thread that panics ends the process")
    }
}

impl NodeCell {
    fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.form.load(Relaxed) & libc::S_IFMT)
    }

    fn is_of(&self, kind: FileType) -> bool {
        self.kind() == kind
    }
}

impl std::fmt::Debug for SharedNodes {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Nodes").finish_non_exhaustive()
    }
}

impl NodeTables {
    /// The kernel knows one more node on a mount.
    fn count_node(&mut self, mount: &Arc<SourceMount>) {
        self.mounts.entry(mount.index()).or_insert_with(|| (Arc::clone(mount), 0)).1 += 1;
    }

    /// The kernel knows one node less on a mount. Returns the mount if that was its last node.
    fn uncount_node(&mut self, index: u64) -> Option<Arc<SourceMount>> {
        let (_, nodes) = self.mounts.get_mut(&index)?;
        *nodes -= 1;
        if *nodes > 0 { None } else { self.mounts.remove(&index).map(|(mount, _)| mount) }
    }
}

/// Removed entries, to be dropped when the tables are not locked.
#[derive(Default)]
struct RemovedEntries {
    /// A cell that nothing refers to.
    cell: Option<CellId>,
    /// A mount on which the kernel knows no node any more.
    mount: Option<Arc<SourceMount>>,
    has_shrunk: bool,
}
