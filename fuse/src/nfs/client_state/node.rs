//! Nodes: the files that the kernel knows, by the kernel's number and by the NFS server's handle.
//!
//! A number is never used for two nodes. podfs drops a node when the kernel has forgotten it, it is not open, and podfs has no
//! data to write to it and no name of its own to remove.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use podfs_nfs::rpc::Credential;
use podfs_nfs::v3::{FileType, NfsFileHandle};
use rustix::io::Errno;

use super::freshness::Freshness;
use super::name::{Name, SharedName};
use super::state::{HANDLE_LENGTH, NfsNodeCell, SILLY, no_memory, read_bytes, write_bytes};
use crate::nfs::file_type::{file_type, kind_of};
use crate::region::Region;
use crate::region::cells::OwnedCell;
use crate::session::NodeId;

/// A file that the kernel knows.
pub struct NfsNode {
    /// The kernel's number for it.
    pub id: NodeId,
    /// The type of the file.
    pub kind: FileType,
    /// The server's number for it.
    pub fileid: u64,
    /// Its cached attributes and rights, and their age.
    pub freshness: RefCell<Freshness>,
    /// The credential for its removal at its last close, if it is removed while it is open.
    pub remover: RefCell<Option<Credential>>,
    handle: Cell<NfsFileHandle>,
    record: RefCell<OwnedCell<NfsNodeCell>>,
    name: SharedName,
    opens: Cell<u32>,
    /// OPENs that are not answered yet.
    opening: Cell<u32>,
}

/// The fields of a new node.
#[derive(Clone, Copy, Debug)]
pub struct NewNfsNode {
    /// The server's handle of the file.
    pub handle: NfsFileHandle,
    /// As in [`NfsNode`].
    pub kind: FileType,
    /// As in [`NfsNode`].
    pub fileid: u64,
}

impl NfsNode {
    fn new(id: NodeId, found: NewNfsNode, record: OwnedCell<NfsNodeCell>, name: Option<Rc<Name>>) -> Self {
        let NewNfsNode { handle, kind, fileid } = found;
        let (handle, record, name) = (Cell::new(handle), RefCell::new(record), RefCell::new(name));
        let (freshness, remover, opens, opening) = Default::default();
        Self { id, kind, fileid, freshness, remover, handle, record, name, opens, opening }
    }

    /// The server's handle of the file.
    pub fn handle(&self) -> NfsFileHandle {
        self.handle.get()
    }

    /// The name by which it was found last.
    pub fn name(&self) -> Option<Rc<Name>> {
        self.name.borrow().clone()
    }

    fn set_name(&self, name: Option<Rc<Name>>) {
        self.record.borrow().name.store(name.as_ref().map_or(0, |name| name.word()), Release);
        // The cells of the earlier name are freed only now, when the node's cell does not refer to them any more.
        drop(self.name.replace(name));
    }

    /// Whether its only name is one that podfs gave it.
    pub fn is_silly(&self) -> bool {
        self.record.borrow().flags.load(Relaxed) & SILLY != 0
    }

    /// Records whether its only name is one that podfs gave it. podfs removes such a file at its last close.
    pub fn set_silly(&self, silly: bool) {
        self.record.borrow().flags.store(if silly { SILLY } else { 0 }, Release);
    }

    /// Whether it is open.
    pub fn is_open(&self) -> bool {
        self.opens.get() > 0
    }

    /// Whether it is open, or an OPEN of it is not answered yet.
    pub fn is_in_use(&self) -> bool {
        self.is_open() || self.opening.get() > 0
    }

    /// Counts an OPEN that is not answered yet.
    pub fn open_begins(&self) {
        self.opening.set(self.opening.get() + 1);
    }

    /// Counts the answer to an OPEN.
    pub fn open_ends(&self) {
        self.opening.set(self.opening.get().saturating_sub(1));
    }

    /// Counts an open of it.
    pub fn opened(&self) {
        self.opens.set(self.opens.get() + 1);
    }

    /// Counts a close of it.
    pub fn closed(&self) {
        self.opens.set(self.opens.get().saturating_sub(1));
    }

    /// Whether podfs needs it even if the kernel has forgotten it: it is open, has a name that podfs has to remove, or has data to
    /// write, for which `is_dirty` holds.
    fn is_needed(&self, is_dirty: impl Fn(NodeId) -> bool) -> bool {
        self.is_open() || self.is_silly() || is_dirty(self.id)
    }

    /// Fills the cell of a new node.
    fn fill(cell: &NfsNodeCell, id: NodeId, lookups: u64, found: &NewNfsNode, name: u64, flags: u64) {
        let handle = found.handle.as_bytes();
        cell.form.store(file_type(found.kind) | handle.len() as u32, Relaxed);
        cell.id.store(id.0, Relaxed);
        cell.lookups.store(lookups, Relaxed);
        cell.fileid.store(found.fileid, Relaxed);
        cell.name.store(name, Relaxed);
        cell.flags.store(flags, Relaxed);
        write_bytes(&cell.handle, handle);
    }

    /// The node that a cell describes; none if no server can have written the cell.
    pub fn read(cell: &NfsNodeCell) -> Option<(NodeId, NewNfsNode)> {
        let form = cell.form.load(Relaxed);
        let handle = NfsFileHandle::new(&read_bytes(&cell.handle, (form & HANDLE_LENGTH) as usize))?;
        let found = NewNfsNode { handle, kind: kind_of(form & !HANDLE_LENGTH)?, fileid: cell.fileid.load(Relaxed) };
        Some((NodeId(cell.id.load(Relaxed)), found))
    }
}

/// The nodes that the kernel knows.
pub struct NfsNodes {
    region: Arc<Region>,
    table: RefCell<NodeTable>,
}

#[derive(Default)]
struct NodeTable {
    by_id: HashMap<NodeId, Rc<NfsNode>>,
    by_handle: HashMap<NfsFileHandle, Rc<NfsNode>>,
    /// The nodes by name, if they have one: by the name under which each was found last.
    by_name: HashMap<(NodeId, Box<[u8]>), NodeId>,
    /// Nodes that the kernel has forgotten, and that podfs [needs](NfsNode::is_needed).
    lingering: Vec<NodeId>,
}

/// A node as a dead server left it.
pub struct InheritedNode {
    /// Its number.
    pub id: NodeId,
    /// The node as the server described it.
    pub found: NewNfsNode,
    /// Its cell.
    pub record: OwnedCell<NfsNodeCell>,
    /// Its name.
    pub name: Option<Name>,
}

impl NfsNodes {
    /// The nodes of a new volume: the root alone.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new(region: Arc<Region>, root: NewNfsNode) -> Result<Self, Errno> {
        region.header().counters.next_node.store(NodeId::ROOT.0, Release);
        let nodes = Self { region, table: RefCell::default() };
        // The kernel never forgets the root.
        nodes.enter(root, None)?;
        Ok(nodes)
    }

    /// The nodes that a dead server left. The next [`drop_forgotten`](Self::drop_forgotten) removes those that the kernel has
    /// forgotten.
    pub fn inherit(region: Arc<Region>, inherited: Vec<InheritedNode>) -> Self {
        let mut table = NodeTable::default();
        for InheritedNode { id, found, record, name } in inherited {
            if record.lookups.load(Relaxed) == 0 {
                table.lingering.push(id);
            }
            let node = Rc::new(NfsNode::new(id, found, record, name.map(Rc::new)));
            if let Some(name) = node.name() {
                table.by_name.insert((name.parent, name.name.clone()), id);
            }
            table.by_handle.insert(found.handle, Rc::clone(&node));
            table.by_id.insert(id, node);
        }
        Self { region, table: RefCell::new(table) }
    }

    /// The node of that number.
    ///
    /// # Errors
    /// `ESTALE` when there is none.
    pub fn get(&self, id: NodeId) -> Result<Rc<NfsNode>, Errno> {
        self.table.borrow().by_id.get(&id).cloned().ok_or(Errno::STALE)
    }

    /// The node of that handle, if the kernel knows it.
    pub fn find(&self, handle: &NfsFileHandle) -> Option<Rc<NfsNode>> {
        self.table.borrow().by_handle.get(handle).cloned()
    }

    /// The node that was found last under a name.
    pub fn at(&self, parent: NodeId, name: &[u8]) -> Option<Rc<NfsNode>> {
        let table = self.table.borrow();
        let id = table.by_name.get(&(parent, Box::from(name)))?;
        table.by_id.get(id).cloned()
    }

    /// The root.
    pub fn root(&self) -> Rc<NfsNode> {
        self.get(NodeId::ROOT).expect("the root is never forgotten")
    }

    /// The node of a file. Counts a lookup, because the answer shows the node to the kernel. `at` is the directory and the name by
    /// which the file was found.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn enter(&self, found: NewNfsNode, at: Option<(NodeId, &[u8])>) -> Result<Rc<NfsNode>, Errno> {
        let known = self.find(&found.handle).filter(|node| node.kind == found.kind);
        let node = match known {
            Some(node) => {
                let is_there = |(parent, name)| node.name.borrow().as_ref().is_some_and(|known| known.is(parent, name));
                if let Some((parent, name)) = at.filter(|at| !node.is_silly() && !is_there(*at)) {
                    self.rename(&node, parent, name)?;
                }
                node
            }
            None => self.insert(found, at)?,
        };
        node.record.borrow().lookups.fetch_add(1, Release);
        Ok(node)
    }

    fn insert(&self, found: NewNfsNode, at: Option<(NodeId, &[u8])>) -> Result<Rc<NfsNode>, Errno> {
        let next = &self.region.header().counters.next_node;
        let id = NodeId(next.load(Acquire));
        // Even if this process dies now, no successor uses the number for another node.
        next.store(id.0.wrapping_add(1), Release);
        let record =
            OwnedCell::new(&self.region, |cell| NfsNode::fill(cell, id, 0, &found, 0, 0)).map_err(no_memory)?;
        let node = Rc::new(NfsNode::new(id, found, record, None));
        if let Some((parent, name)) = at {
            self.rename(&node, parent, name)?;
        }
        let mut table = self.table.borrow_mut();
        table.by_handle.insert(found.handle, Rc::clone(&node));
        table.by_id.insert(id, Rc::clone(&node));
        Ok(node)
    }

    /// Records that a node has this name now. A node that had the name before has no known name any more.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn rename(&self, node: &NfsNode, parent: NodeId, name: &[u8]) -> Result<(), Errno> {
        let new = Rc::new(Name::new(&self.region, parent, name)?);
        let other = self.at(parent, name).filter(|other| other.id != node.id);
        if let Some(other) = other {
            self.unname(&other);
        }
        if let Some(before) = node.name() {
            self.table.borrow_mut().by_name.remove(&(before.parent, before.name.clone()));
        }
        self.table.borrow_mut().by_name.insert((parent, name.into()), node.id);
        node.set_name(Some(new));
        Ok(())
    }

    /// Records that no name of a node is known any more.
    pub fn unname(&self, node: &NfsNode) {
        if let Some(name) = node.name() {
            self.table.borrow_mut().by_name.remove(&(name.parent, name.name.clone()));
            node.set_name(None);
        }
    }

    /// Records that the server has another handle for the file now.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn set_handle(&self, node: &Rc<NfsNode>, handle: NfsFileHandle) -> Result<(), Errno> {
        let found = NewNfsNode { handle, kind: node.kind, fileid: node.fileid };
        let (lookups, name, flags) = {
            let record = node.record.borrow();
            (record.lookups.load(Relaxed), record.name.load(Relaxed), record.flags.load(Relaxed))
        };
        // A kill in between leaves both cells, and a successor uses either of them.
        let record = OwnedCell::new(&self.region, |cell| NfsNode::fill(cell, node.id, lookups, &found, name, flags));
        drop(node.record.replace(record.map_err(no_memory)?));
        let mut table = self.table.borrow_mut();
        table.by_handle.remove(&node.handle.get());
        node.handle.set(handle);
        table.by_handle.insert(handle, Rc::clone(node));
        Ok(())
    }

    /// Handles FORGET: reduces the lookup count of a node. A forgotten node stays as long as podfs [needs](NfsNode::is_needed) it.
    pub fn forget(&self, id: NodeId, lookups: u64, is_dirty: impl Fn(NodeId) -> bool) {
        let mut table = self.table.borrow_mut();
        let Some(node) = table.by_id.get(&id) else { return };
        let remaining = {
            let record = node.record.borrow();
            let remaining = record.lookups.load(Relaxed).saturating_sub(lookups);
            record.lookups.store(remaining, Release);
            remaining
        };
        if remaining > 0 || id == NodeId::ROOT {
            return;
        }
        if node.is_needed(is_dirty) {
            table.lingering.push(id);
        } else {
            table.remove(id);
        }
    }

    /// Drops forgotten nodes, except those that podfs [needs](NfsNode::is_needed).
    pub fn drop_forgotten(&self, is_dirty: impl Fn(NodeId) -> bool) {
        let mut table = self.table.borrow_mut();
        if table.lingering.is_empty() {
            return;
        }
        let lingering = std::mem::take(&mut table.lingering);
        for id in lingering {
            let Some(node) = table.by_id.get(&id).cloned() else { continue };
            if node.record.borrow().lookups.load(Relaxed) > 0 {
                continue;
            }
            if node.is_needed(&is_dirty) {
                table.lingering.push(id);
            } else {
                table.remove(id);
            }
        }
    }

    /// All nodes.
    pub fn all(&self) -> Vec<Rc<NfsNode>> {
        self.table.borrow().by_id.values().cloned().collect()
    }
}

impl NodeTable {
    fn remove(&mut self, id: NodeId) {
        let Some(node) = self.by_id.remove(&id) else { return };
        if let Some(name) = node.name() {
            self.by_name.remove(&(name.parent, name.name.clone()));
        }
        let handle = node.handle();
        if self.by_handle.get(&handle).is_some_and(|other| other.id == id) {
            self.by_handle.remove(&handle);
        }
    }
}
