//! Reading the state that a dead server left in the region.
//!
//! podfs does not trust the content of a region: a cell that contradicts itself or another cell is lost. A lost cell affects
//! nothing else: a request with a lost handle gets `EBADF`, a request for a lost node gets `ESTALE`, and podfs makes a lost call
//! like a new one.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use podfs_nfs::v3::FileType;

use super::ClientState;
use super::calls::Calls;
use super::name::{LONGEST_NAME, Name};
use super::node::{InheritedNode, NewNfsNode, NfsNode, NfsNodes};
use super::open_files::{NfsOpenFile, NfsOpenFiles};
use super::state::{CallCell, KNOWN, NameCell, NfsNodeCell, NfsOpenCell, RootCell};
use crate::region::Region;
use crate::region::cell_id::CellId;
use crate::region::cells::{CellContent, OwnedCell};
use crate::session::{HandleId, NodeId};

/// The state that was read from a region.
pub struct InheritedState {
    /// The client's state.
    pub state: ClientState,
    /// Cells without usable content.
    pub lost: Vec<CellId>,
    /// The cell with the root's attributes.
    pub root: Option<OwnedCell<RootCell>>,
    /// Files that were removed while they were open, and are not open any more.
    pub silly: Vec<Rc<NfsNode>>,
}

impl InheritedState {
    /// Reads the state from a region; none if the region has no root. Nothing outside this process changes.
    pub fn read(region: &Arc<Region>) -> Option<Self> {
        region.look_again().ok()?;
        let mut reader = NfsRegionReader::new(region);
        let nodes = NfsNodes::inherit(Arc::clone(region), reader.nodes());
        nodes.get(NodeId::ROOT).ok().filter(|root| root.kind == FileType::Directory)?;
        let files = reader.open_files(&nodes);
        let calls = Calls::new(Arc::clone(region), reader.calls());
        let root = reader.records::<RootCell>().into_iter().next();
        reader.kept.extend(root.as_ref().map(OwnedCell::id));
        let NfsRegionReader { mut kept, .. } = reader;
        kept.sort_unstable();
        let lost = region.cells().tagged().map(|(id, _)| id).filter(|id| kept.binary_search(id).is_err()).collect();
        region.cells().keep_only(&kept);
        let silly = nodes.all().into_iter().filter(|node| node.is_silly() && !node.is_open()).collect();
        Some(Self { state: ClientState { nodes, files, calls }, lost, root, silly })
    }
}

/// Reads the cells of a region, kind by kind.
struct NfsRegionReader<'a> {
    region: &'a Arc<Region>,
    cells: HashMap<u32, Vec<CellId>>,
    kept: Vec<CellId>,
}

impl<'a> NfsRegionReader<'a> {
    fn new(region: &'a Arc<Region>) -> Self {
        let mut cells: HashMap<u32, Vec<CellId>> = HashMap::new();
        region.cells().tagged().for_each(|(id, tag)| cells.entry(tag).or_default().push(id));
        // The nodes refer to the cells of their names.
        cells.remove(&NameCell::TAG);
        Self { region, cells, kept: Vec::new() }
    }

    fn records<T: CellContent>(&mut self) -> Vec<OwnedCell<T>> {
        let ids = self.cells.remove(&T::TAG).unwrap_or_default();
        ids.into_iter().map(|id| OwnedCell::of(self.region, id)).collect()
    }

    fn nodes(&mut self) -> Vec<InheritedNode> {
        let next = self.region.header().counters.next_node.load(Relaxed);
        let (mut nodes, mut taken) = (HashMap::new(), HashSet::new());
        for record in self.records::<NfsNodeCell>() {
            let Some((id, found)) = NfsNode::read(&record) else { continue };
            if !(NodeId::ROOT..NodeId(next)).contains(&id) || nodes.contains_key(&id) {
                continue;
            }
            let name = Name::inherit(self.region, record.name.load(Relaxed), &mut taken);
            let name = name.filter(|name| is_name(&name.name));
            self.kept.push(record.id());
            self.kept.extend(name.iter().flat_map(Name::cells));
            nodes.insert(id, InheritedNode { id, found, record, name });
        }
        let mut handles = HashSet::new();
        nodes
            .into_values()
            .filter(|InheritedNode { found: NewNfsNode { handle, .. }, .. }| handles.insert(*handle))
            .collect()
    }

    fn open_files(&mut self, nodes: &NfsNodes) -> NfsOpenFiles {
        let last = self.region.header().counters.last_handle.load(Relaxed);
        let (mut files, mut by_request) = (HashMap::new(), HashMap::new());
        for record in self.records::<NfsOpenCell>() {
            let handle = HandleId(record.handle.load(Relaxed));
            let Ok(node) = nodes.get(NodeId(record.node.load(Relaxed))) else { continue };
            if handle == HandleId(0) || handle > HandleId(last) || files.contains_key(&handle) {
                continue;
            }
            self.kept.push(record.id());
            let unique = record.unique.load(Relaxed);
            if record.flags.load(Relaxed) & KNOWN == 0 {
                by_request.insert(unique, handle);
            }
            files.insert(handle, Rc::new(NfsOpenFile::inherit(record, node)));
        }
        NfsOpenFiles::new(Arc::clone(self.region), files, by_request)
    }

    fn calls(&mut self) -> HashMap<(u64, u32), OwnedCell<CallCell>> {
        let mut calls = HashMap::new();
        for record in self.records::<CallCell>() {
            let key = (record.unique.load(Relaxed), record.step.load(Relaxed));
            if let Entry::Vacant(place) = calls.entry(key) {
                self.kept.push(record.id());
                place.insert(record);
            }
        }
        calls
    }
}

/// Whether the kernel can use the name.
pub fn is_name(name: &[u8]) -> bool {
    let strange = name.is_empty() || name.len() > LONGEST_NAME || name == b"." || name == b"..";
    !strange && !name.iter().any(|byte| matches!(byte, 0 | b'/'))
}
