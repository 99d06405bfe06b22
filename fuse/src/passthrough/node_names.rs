//! Where the server finds a node again that has no lasting file handle: its directory, and its name there.
//!
//! A node on a file system whose handles end with the kernel's inode ([`lasting_handles`](super::lasting_handles)) has the inode number as
//! its identity, and keeps a descriptor. The server closes the descriptors that were used longest ago ([`HeldNodes`]). To open such a node
//! again, it goes by the node's name, and checks type, device and inode number. A file that was replaced on the source is `ESTALE` then.
//!
//! 1. Each LOOKUP, CREATE and RENAME records the name of the node that it finds, makes or moves. A kill loses none of them, because the
//!    kernel sends a request again that has no answer.
//! 2. The cells of the new name are complete before the node's cell names them, in one word. The cells of the old name become free
//!    afterwards. A successor erases cells that no node names.
//! 3. A node without a recorded name keeps its descriptor: a removed directory, and a directory whose number does not last. Some servers of FUSE
//!    number a file anew each time that the kernel looks it up, so nothing would show that the directory is still the same.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard};

use lru::LruCache;
use rustix::io::Errno;

use super::hashing::HashKey;
use super::state::{DirectoryNameCell, NAME_WORDS, no_memory};
use crate::region::Region;
use crate::region::cell_id::CellId;
use crate::region::cells::CellRef;
use crate::session::NodeId;

/// The most nodes that keep a descriptor although the server could find them again.
const MOST: usize = 1024;
/// Bytes of a name in one cell.
const BYTES: usize = NAME_WORDS * 8;
/// The longest name of Linux.
const LONGEST: usize = 255;
/// The most cells of a name.
const MOST_CELLS: usize = LONGEST.div_ceil(BYTES);

/// A directory and a name in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectoryName {
    /// The directory.
    pub parent: NodeId,
    /// The name.
    pub name: OsString,
}

/// Records a name of `node`. Returns the first of its cells.
///
/// # Errors
/// When there is no memory.
pub fn record(region: &Arc<Region>, node: NodeId, parent: NodeId, name: &OsStr) -> Result<CellId, Errno> {
    let mut first = None;
    let mut length = 0;
    for chunk in name.as_bytes().chunks(BYTES).rev() {
        length += chunk.len();
        let made = CellRef::new(region, |cell: &DirectoryNameCell| {
            cell.length.store(u32::try_from(length).expect("a name is short"), Relaxed);
            cell.node.store(node.0, Relaxed);
            cell.parent.store(parent.0, Relaxed);
            cell.next.store(first.map_or(0, CellId::to_word), Relaxed);
            for (word, bytes) in cell.name.iter().zip(chunk.chunks(8)) {
                let mut whole = [0; 8];
                whole[..bytes.len()].copy_from_slice(bytes);
                word.store(u64::from_ne_bytes(whole), Relaxed);
            }
        });
        let Ok(cell) = made.map_err(no_memory) else {
            first.into_iter().for_each(|cell| free(region, cell, node));
            return Err(Errno::NOMEM);
        };
        first = Some(cell.id());
    }
    first.ok_or(Errno::INVAL)
}

/// The name of `node` that begins in the cell `first`, and all its cells. `None` if the cells contradict each other.
pub fn read(region: &Region, first: CellId, node: NodeId) -> Option<(DirectoryName, [Option<CellId>; MOST_CELLS])> {
    let (mut name, mut cells, mut next) = (Vec::new(), [None; MOST_CELLS], Some(first));
    let mut parent = None;
    let mut remaining = None;
    for read in &mut cells {
        let Some(id) = next else { break };
        let cell = region.cells().find::<DirectoryNameCell>(id)?;
        let length = cell.length.load(Relaxed) as usize;
        let is_next = remaining.is_none_or(|expected| expected == length) && (1..=LONGEST).contains(&length);
        if !is_next || cell.node.load(Relaxed) != node.0 {
            return None;
        }
        let bytes = cell.name.iter().flat_map(|word| word.load(Relaxed).to_ne_bytes());
        name.extend(bytes.take(length.min(BYTES)));
        parent.get_or_insert(NodeId(cell.parent.load(Relaxed)));
        remaining = Some(length.saturating_sub(BYTES));
        next = CellId::from_word(cell.next.load(Relaxed));
        *read = Some(id);
        if remaining == Some(0) && next.is_some() {
            return None;
        }
    }
    let is_name = remaining == Some(0) && !name.contains(&b'/') && !name.contains(&0) && name != b"." && name != b"..";
    Some((DirectoryName { parent: parent?, name: OsString::from_vec(name) }, cells)).filter(|_| is_name)
}

/// Frees the cells of the name of `node` that begins in the cell `first`.
pub fn free(region: &Region, first: CellId, node: NodeId) {
    if let Some((_, cells)) = read(region, first, node) {
        cells.into_iter().flatten().for_each(|cell| region.cells().free(cell));
    }
}

/// The nodes that keep a descriptor although they have no lasting handle, in the order of their last use.
pub struct HeldNodes {
    nodes: Mutex<LruCache<NodeId, (), HashKey>>,
    /// Whether there may be such nodes: volumes whose files have handles are spared the lock.
    are_some: AtomicBool,
}

impl Default for HeldNodes {
    fn default() -> Self {
        Self {
            nodes: Mutex::new(LruCache::unbounded_with_hasher(HashKey::default())),
            are_some: AtomicBool::new(false),
        }
    }
}

impl HeldNodes {
    /// A request has used the descriptor of a node. Returns the node that was not used for the longest time, if there are too many: the
    /// caller closes its descriptor.
    pub fn used(&self, node: NodeId) -> Option<NodeId> {
        self.are_some.store(true, Relaxed);
        let mut nodes = self.lock();
        nodes.put(node, ());
        if nodes.len() > MOST { nodes.pop_lru().map(|(node, ())| node) } else { None }
    }

    /// Removes the node that was not used for the longest time.
    pub fn pop_oldest(&self) -> Option<NodeId> {
        self.lock().pop_lru().map(|(node, ())| node)
    }

    /// The kernel has forgotten a node.
    pub fn forget(&self, node: NodeId) {
        if self.are_some.load(Relaxed) {
            self.lock().pop(&node);
        }
    }

    fn lock(&self) -> MutexGuard<'_, LruCache<NodeId, (), HashKey>> {
        self.nodes.lock().expect("a thread that panics ends the process")
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::region::VolumeKind;
    use crate::region::cells::CellContent;
    use crate::region::golden::{self, golden};
    use crate::region::shared::assert_layout;

    const NODE: NodeId = NodeId(7);
    const PARENT: NodeId = NodeId(8);

    #[test]
    fn names_of_any_length_come_back() {
        let region = Arc::new(Region::create(VolumeKind::Passthrough).expect("a region"));
        for length in [1, 7, 8, 95, 96, 97, 192, 193, 255] {
            let name = OsString::from_vec((0..length).map(|n| b'a' + n % 26).collect());
            let first = record(&region, NODE, PARENT, &name).expect("memory");
            let (found, cells) = read(&region, first, NODE).expect("a name");
            assert_eq!(found, DirectoryName { parent: PARENT, name });
            assert_eq!(cells.iter().flatten().count(), usize::from(length).div_ceil(BYTES));
            assert_eq!(read(&region, first, NodeId(9)), None, "it is another node's");
            free(&region, first, NODE);
            assert_eq!(region.cells().tagged().count(), 0);
        }
    }

    #[test]
    fn a_name_that_leads_elsewhere_is_refused() {
        let region = Arc::new(Region::create(VolumeKind::Passthrough).expect("a region"));
        for name in ["..", ".", "a/b", "a\0b"] {
            let first = record(&region, NODE, PARENT, OsStr::new(name)).expect("memory");
            assert_eq!(read(&region, first, NODE), None, "{name:?}");
        }
    }

    #[test]
    fn the_nodes_that_were_used_last_keep_their_descriptors() {
        let held = HeldNodes::default();
        for node in 0..MOST as u64 {
            assert_eq!(held.used(NodeId(node)), None);
        }
        assert_eq!(held.used(NodeId(0)), None);
        assert_eq!(held.used(NodeId(5000)), Some(NodeId(1)));
        held.forget(NodeId(2));
        assert_eq!(held.pop_oldest(), Some(NodeId(3)));
    }

    #[test]
    fn a_name_has_the_bytes_that_other_versions_read() {
        assert_layout::<DirectoryNameCell>("tag 0, length 4, node 8, parent 16, next 24, name 32; 128 bytes");
        let region = golden::region(VolumeKind::Passthrough);
        let name = OsString::from_vec((0..200).map(|n| b'a' + n % 26).collect());
        record(&region, NODE, PARENT, &name).expect("memory");
        let recorded = golden!("region-node-names.bin");
        golden::assert_golden("region-node-names.bin", recorded, &golden::content((*region).as_fd()));
        let adopted = golden::adopted(recorded, VolumeKind::Passthrough);
        let cells: Vec<_> = adopted.cells().tagged().collect();
        assert_eq!(
            (cells.len(), cells[0].1, DirectoryNameCell::TAG),
            (3, 7, 7),
            "other versions know the cells by this tag"
        );
        let read = cells.iter().filter_map(|(cell, _)| read(&adopted, *cell, NODE));
        let names: Vec<_> = read.map(|(found, _)| found).filter(|found| found.name == name).collect();
        assert_eq!(names, [DirectoryName { parent: PARENT, name }]);
    }
}
