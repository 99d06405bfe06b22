//! All nodes of a volume, by number and by identity.
//!
//! A node that the kernel knows is its cell in the region, and an entry in two tables of cell numbers; comparing entries reads
//! the cells. A [`Node`] is made of a cell when it is used, and there is at most one for each cell that is not being dropped.
//!
//! 1. The cell is there before the kernel is told of the node, and counts before the kernel does: after a kill the count may
//!    be too high, never too low.
//! 2. When the kernel forgets a node, its entries go and its cell is freed at once, or by the last user that drops the
//!    [`Node`]. A kept descriptor keeps the [`Node`] only until then.
//! 3. Who drops the last reference finds under the lock of the tables whether the cell has another [`Node`] by now. If so, that
//!    one has taken over what is left to do.
//! 4. A mount stays as long as a node on it is known.
//!
//! No node and no mount is dropped under the lock of the tables: dropping a node takes that lock.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use hashbrown::HashTable;
use rustix::fs::FileType;
use rustix::io::Errno;

use super::mounts::Mount;
use super::node::{Identity, Node, ROOT};
use super::share::Share;
use super::state::{NodeCell, no_memory};
use crate::region::Region;
use crate::region::cells::{CellId, CellRef};

/// A table of as many nodes is kept, however few are in it.
const SMALL: usize = 4096;

/// The nodes that the kernel knows.
pub struct Nodes(Arc<Shared>);

/// What the nodes in use refer to.
pub struct Shared {
    region: Arc<Region>,
    hasher: RandomState,
    tables: Mutex<Tables>,
}

#[derive(Default)]
struct Tables {
    by_id: HashTable<CellId>,
    by_identity: HashTable<CellId>,
    in_use: HashMap<CellId, Weak<Node>>,
    /// By the volume's number for each, with the number of nodes on it.
    mounts: HashMap<u64, (Arc<Mount>, usize)>,
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
    /// None yet.
    pub fn empty(region: Arc<Region>) -> Self {
        Self(Arc::new(Shared { region, hasher: RandomState::new(), tables: Mutex::default() }))
    }

    /// The root alone, open as `source`.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new(region: Arc<Region>, found: Found, source: OwnedFd, share: &Share) -> Result<Self, Errno> {
        region.header().counters.next_node.store(ROOT, Release);
        let nodes = Self::empty(region);
        // The kernel never forgets the root.
        let root = nodes.enter(found)?;
        root.hold(source, share.take_anyway());
        Ok(nodes)
    }

    /// Takes in a node that a dead server left, on that mount, with the descriptor that is kept for it. Tells whether it did:
    /// there may be one of that number already.
    pub fn inherit(&self, cell: CellId, mount: &Arc<Mount>, held: Option<OwnedFd>, share: &Share) -> bool {
        let shared = &*self.0;
        let (id, identity) = (shared.cell(cell).id.load(Relaxed), shared.identity(cell));
        let mut tables = shared.lock();
        if shared.find_id(&tables, id).is_some() {
            return false;
        }
        if shared.find_identity(&tables, &identity).is_none() {
            shared.add_identity(&mut tables, cell, &identity);
        }
        shared.add_id(&mut tables, cell, id);
        tables.mounts.entry(mount.index()).or_insert_with(|| (Arc::clone(mount), 0)).1 += 1;
        let node = held.is_some().then(|| self.0.node(&mut tables, cell)).flatten();
        drop(tables);
        if let (Some(node), Some(held)) = (node, held) {
            node.hold_on(held, share.take_anyway());
        }
        true
    }

    /// The node of that number.
    pub fn get(&self, id: u64) -> Option<Arc<Node>> {
        let mut tables = self.0.lock();
        let cell = self.0.find_id(&tables, id)?;
        self.0.node(&mut tables, cell)
    }

    /// The node of that file, if the kernel knows it.
    pub fn find(&self, identity: &Identity) -> Option<Arc<Node>> {
        let mut tables = self.0.lock();
        let cell = self.0.find_identity(&tables, identity)?;
        if self.0.cell(cell).lookups.load(Relaxed) == 0 {
            return None;
        }
        self.0.node(&mut tables, cell)
    }

    /// The node of that file. The kernel is told of it once more.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn enter(&self, found: Found) -> Result<Arc<Node>, Errno> {
        let mut tables = self.0.lock();
        let cell = match self.0.find_identity(&tables, &found.identity) {
            Some(cell) => cell,
            None => self.0.insert(&mut tables, &found)?,
        };
        self.0.cell(cell).lookups.fetch_add(1, Release);
        self.0.node(&mut tables, cell).ok_or(Errno::STALE)
    }

    /// The kernel forgets `lookups` of the times it was told of a node. Tells whether it knows the node no longer.
    pub fn forget(&self, id: u64, lookups: u64) -> bool {
        let shared = &*self.0;
        let mut tables = shared.lock();
        let Some(cell) = shared.find_id(&tables, id) else { return false };
        let count = &shared.cell(cell).lookups;
        let left = count.load(Relaxed).saturating_sub(lookups);
        count.store(left, Release);
        if left > 0 || id == ROOT {
            return false;
        }
        match tables.in_use.get(&cell).map(Weak::upgrade) {
            None => {
                let removed = shared.remove(&mut tables, cell);
                drop(tables);
                shared.region.cells().free(cell);
                removed.give_back();
            }
            // It goes with its last user, who may be dropping it just now.
            Some(node) => {
                drop(tables);
                if let Some(node) = node {
                    node.forgotten();
                }
            }
        }
        true
    }

    /// Those that have a backing id.
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
        let Tables { by_id, in_use, mounts, .. } = std::mem::take(&mut *self.0.lock());
        // What nodes keep open keeps them.
        for node in in_use.into_values().filter_map(|node| node.upgrade()) {
            node.let_go();
            let open = node.open().take();
            drop(open);
        }
        by_id.into_iter().for_each(|cell| self.0.region.cells().free(cell));
        drop(mounts);
    }
}

impl Shared {
    /// A node has no user any more; it is being dropped.
    pub fn unused(&self, node: &Node) {
        let cell = node.record.id();
        let mut tables = self.lock();
        if !tables.in_use.get(&cell).is_some_and(|own| ptr::eq(own.as_ptr(), node)) {
            return;
        }
        tables.in_use.remove(&cell);
        if node.record.lookups.load(Relaxed) > 0 {
            return;
        }
        let removed = self.remove(&mut tables, cell);
        drop(tables);
        self.region.cells().free(cell);
        removed.give_back();
    }

    /// Whether what is recorded of nodes may be changed.
    pub fn may_change(&self) -> bool {
        self.region.is_ours()
    }

    fn cell(&self, cell: CellId) -> &NodeCell {
        self.region.cells().content(cell)
    }

    fn identity(&self, cell: CellId) -> Identity {
        // Nobody writes a length that is impossible, and a cell with one is not inherited.
        Identity::read(self.cell(cell)).unwrap_or(Identity::Number { mount: 0, device: 0, ino: 0 })
    }

    fn find_id(&self, tables: &Tables, id: u64) -> Option<CellId> {
        tables.by_id.find(self.hasher.hash_one(id), |cell| self.cell(*cell).id.load(Relaxed) == id).copied()
    }

    fn find_identity(&self, tables: &Tables, identity: &Identity) -> Option<CellId> {
        let hash = self.hasher.hash_one(identity);
        tables.by_identity.find(hash, |cell| self.identity(*cell) == *identity).copied()
    }

    fn add_id(&self, tables: &mut Tables, cell: CellId, id: u64) {
        tables.by_id.insert_unique(self.hasher.hash_one(id), cell, |cell| self.hash_of_id(*cell));
    }

    fn add_identity(&self, tables: &mut Tables, cell: CellId, identity: &Identity) {
        let hash = self.hasher.hash_one(identity);
        tables.by_identity.insert_unique(hash, cell, |cell| self.hash_of_identity(*cell));
    }

    fn hash_of_id(&self, cell: CellId) -> u64 {
        self.hasher.hash_one(self.cell(cell).id.load(Relaxed))
    }

    fn hash_of_identity(&self, cell: CellId) -> u64 {
        self.hasher.hash_one(self.identity(cell))
    }

    /// The node of a cell; none if its mount is gone.
    fn node(self: &Arc<Self>, tables: &mut Tables, cell: CellId) -> Option<Arc<Node>> {
        if let Some(node) = tables.in_use.get(&cell).and_then(Weak::upgrade) {
            return Some(node);
        }
        let record = CellRef::<NodeCell>::of(&self.region, cell);
        let (mount, _) = tables.mounts.get(&record.mount.load(Relaxed))?;
        let node = Arc::new(Node::new(record, self.identity(cell), Arc::clone(mount), Arc::clone(self)));
        tables.in_use.insert(cell, Arc::downgrade(&node));
        Some(node)
    }

    fn insert(&self, tables: &mut Tables, found: &Found) -> Result<CellId, Errno> {
        let Found { identity, mount, kind, charge } = found;
        let next = &self.region.header().counters.next_node;
        let id = next.load(Acquire);
        // Also if this server dies now, the number is not used again.
        next.store(id.wrapping_add(1), Release);
        let record = CellRef::new(&self.region, |cell: &NodeCell| {
            cell.form.store(kind.as_raw_mode() | identity.handle_length(), Relaxed);
            cell.id.store(id, Relaxed);
            cell.mount.store(mount.index(), Relaxed);
            cell.lookups.store(0, Relaxed);
            cell.charged.store(*charge, Relaxed);
            [&cell.held, &cell.nameless, &cell.backing].into_iter().for_each(|word| word.store(0, Relaxed));
            identity.write(cell);
        });
        let cell = record.map_err(no_memory)?.id();
        self.add_id(tables, cell, id);
        self.add_identity(tables, cell, identity);
        tables.mounts.entry(mount.index()).or_insert_with(|| (Arc::clone(mount), 0)).1 += 1;
        Ok(cell)
    }

    /// Takes a cell out of the tables.
    fn remove(&self, tables: &mut Tables, cell: CellId) -> Removed {
        let own = |other: &CellId| *other == cell;
        let Ok(entry) = tables.by_id.find_entry(self.hash_of_id(cell), own) else { return Removed::default() };
        entry.remove();
        if let Ok(entry) = tables.by_identity.find_entry(self.hash_of_identity(cell), own) {
            entry.remove();
        }
        let index = self.cell(cell).mount.load(Relaxed);
        let mut mount = None;
        if let Some((_, nodes)) = tables.mounts.get_mut(&index) {
            *nodes -= 1;
            if *nodes == 0 {
                mount = tables.mounts.remove(&index).map(|(mount, _)| mount);
            }
        }
        Removed { _mount: mount, has_shrunk: self.shrink(tables) }
    }

    /// Gives up room once most of it is empty; tells whether it did.
    fn shrink(&self, tables: &mut Tables) -> bool {
        let left = tables.by_id.len();
        let shrinks = tables.by_id.capacity() > SMALL && left < tables.by_id.capacity() / 8;
        if shrinks {
            tables.by_id.shrink_to(left * 2, |cell| self.hash_of_id(*cell));
            tables.by_identity.shrink_to(left * 2, |cell| self.hash_of_identity(*cell));
            tables.in_use.shrink_to(tables.in_use.len() * 2);
        }
        shrinks
    }

    fn lock(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().expect("a thread that panics ends the process")
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Nodes").finish_non_exhaustive()
    }
}

/// What is left of an entry, to be dropped when the tables are not locked.
#[derive(Default)]
struct Removed {
    /// The mount of which it was the last node.
    _mount: Option<Arc<Mount>>,
    has_shrunk: bool,
}

impl Removed {
    fn give_back(self) {
        if self.has_shrunk {
            // The allocator keeps freed memory for the next ones unless it is told.
            // SAFETY: the call touches only memory that is free.
            #[cfg(target_env = "gnu")]
            unsafe {
                libc::malloc_trim(0)
            };
        }
    }
}
