//! The name by which a node was found: its directory and its name there. If the NFS server does not know the node's handle any
//! more, podfs looks the node up by this name.

use std::cell::RefCell;
use std::collections::HashSet;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use rustix::io::Errno;

use super::state::{NAME_BYTES, NameCell, no_memory, read_bytes, write_bytes};
use crate::region::Region;
use crate::region::cell_id::CellId;
use crate::region::cells::OwnedCell;
use crate::session::NodeId;

/// Longest name, in bytes.
pub const LONGEST_NAME: usize = 255;

/// A name in a directory.
#[derive(Debug)]
pub struct Name {
    /// The directory's node.
    pub parent: NodeId,
    /// The name.
    pub name: Box<[u8]>,
    /// Its cells, in order.
    records: Vec<OwnedCell<NameCell>>,
}

impl Name {
    /// Records a name.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new(region: &Arc<Region>, parent: NodeId, name: &[u8]) -> Result<Self, Errno> {
        let mut records: Vec<OwnedCell<NameCell>> = Vec::new();
        // The last part comes first, so that a cell only refers to a cell that exists.
        for part in name.chunks(NAME_BYTES).rev() {
            let next = records.last().map_or(0, |next| next.id().to_word());
            let record = OwnedCell::new(region, |cell: &NameCell| {
                cell.length.store(name.len() as u32, Relaxed);
                cell.parent.store(parent.0, Relaxed);
                cell.next.store(next, Relaxed);
                write_bytes(&cell.bytes, part);
            });
            records.push(record.map_err(no_memory)?);
        }
        records.reverse();
        Ok(Self { parent, name: name.into(), records })
    }

    /// The word that refers to the name in a node's cell.
    pub fn word(&self) -> u64 {
        self.records.first().map_or(0, |first| first.id().to_word())
    }

    /// Whether it is the name `name` in the directory `parent`.
    pub fn is(&self, parent: NodeId, name: &[u8]) -> bool {
        self.parent == parent && *self.name == *name
    }

    /// The name that `word` refers to; none if the recorded name is not whole, or another node has it. `taken` has the cells that
    /// are in use.
    pub fn inherit(region: &Arc<Region>, word: u64, taken: &mut HashSet<CellId>) -> Option<Self> {
        let mut name = Vec::new();
        let mut ids = Vec::new();
        let (mut next, mut first) = (CellId::from_word(word), None);
        while let Some(id) = next {
            let cell = region.cells().find::<NameCell>(id)?;
            let length = cell.length.load(Relaxed) as usize;
            let (length, parent) = *first.get_or_insert((length, NodeId(cell.parent.load(Relaxed))));
            if length > LONGEST_NAME || name.len() >= length || taken.contains(&id) || ids.contains(&id) {
                return None;
            }
            let rest = length - name.len();
            name.extend(read_bytes(&cell.bytes, rest));
            ids.push(id);
            next = if rest > NAME_BYTES { Some(CellId::from_word(cell.next.load(Relaxed))?) } else { None };
            if let (None, (_, parent)) = (next, (length, parent)) {
                taken.extend(ids.iter().copied());
                let records = ids.into_iter().map(|id| OwnedCell::of(region, id)).collect();
                return Some(Self { parent, name: name.into(), records });
            }
        }
        None
    }

    /// The cells of the name.
    pub fn cells(&self) -> impl Iterator<Item = CellId> {
        self.records.iter().map(OwnedCell::id)
    }
}

/// The name of a node, which may change.
pub type SharedName = RefCell<Option<Rc<Name>>>;
