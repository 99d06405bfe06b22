//! The state of a volume's file system as a dead server left it in the region.
//!
//! The successor does not trust the content of a region. A cell that contradicts itself or another cell is lost, and so is a cell
//! that needs a descriptor which no process has any more. A lost cell affects nothing else: callers that use its object get
//! `ESTALE`. Open files, locks and mounts without their descriptors are not lost: the server may find them again.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use rustix::fs::FileType;

use super::data_path::DataPath;
use super::handle::FileHandle;
use super::hashing::HashKey;
use super::mounts::SourceMounts;
use super::node::{FileIdentity, Node, name_cell};
use super::node_names;
use super::nodes::Nodes;
use super::open_files::{OpenDirectory, OpenFile, OpenFiles};
use super::open_node::{BackingId, OpenNode};
use super::options::PassthroughOptions;
use super::share::Share;
use super::source_mount::{MountRoute, SourceMount};
use super::state::{
    DIRECTORY, DeviceCell, DirectoryNameCell, HeldCell, LockCell, MountCell, NodeCell, OpenCell, number,
};
use super::tables::FilesystemTables;
use super::usage::QuotaUsage;
use crate::mount::table::MountTable;
use crate::region::Region;
use crate::region::cell_id::CellId;
use crate::region::cells::{CellContent, OwnedCell};
use crate::session::abi::Kstatfs;
use crate::session::{HandleId, NodeId};

/// The state that was read from a region, and what the successor still has to clean up.
pub struct InheritedTables {
    /// The state of the file system.
    pub tables: FilesystemTables,
    /// The root.
    pub root: Arc<Node>,
    /// Cells whose content is unusable.
    pub lost: Vec<CellId>,
    /// Nodes with a backing id that no open file uses.
    pub unused: Vec<Arc<Node>>,
    /// The numbers of lost open files, locks and nodes.
    pub losses: LostObjects,
}

/// The number of lost objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LostObjects {
    /// Open files and directories.
    pub files: usize,
    /// Owners' locks.
    pub locks: usize,
    /// Nodes, and descriptors that were kept for them.
    pub nodes: usize,
}

/// Why a volume cannot be taken over.
#[derive(Debug, thiserror::Error)]
pub enum TakeoverError {
    /// The state of the volume cannot be read.
    #[error("the state of the volume cannot be read: {0}")]
    Region(#[from] io::Error),
    /// The state is that of a projection.
    #[error("the state is that of a projection, not of a passthrough volume; start the volume anew")]
    OtherKind,
    /// The server died before it had read the source.
    #[error("the server died before it had begun to serve the volume; start the volume anew")]
    NotServed,
    /// The root is not among the nodes.
    #[error("the state of the volume is damaged: it has no root; start the volume anew")]
    NoRoot,
    /// Neither the inherited nor the given descriptor of the source is open.
    #[error("the source of the volume is not open any more; start the volume anew")]
    NoSource,
    /// The source that was given is not the one that was served.
    #[error("the source of the volume is another directory than before; start the volume anew")]
    OtherSource,
}

impl InheritedTables {
    /// Reads the state that a dead server left, and changes nothing outside this process. `in_rings` are the requests that the
    /// dead server has not answered in rings.
    ///
    /// # Errors
    /// When the region lacks what every volume has, such as the root.
    pub fn read(
        region: &Arc<Region>,
        in_rings: Vec<u64>,
        source: Option<OwnedFd>,
        table: Arc<MountTable>,
        options: &PassthroughOptions,
    ) -> Result<InheritedTables, TakeoverError> {
        region.look_again()?;
        let data_path = DataPath::recorded(region).ok_or(TakeoverError::NotServed)?;
        let mut reader = RegionReader::new(region);
        let known = reader.mounts(source.as_ref(), &table);
        let share = Share::new(options.name.as_str());
        let nodes = reader.nodes(&known, &share);
        let root = nodes.get(NodeId::ROOT).ok_or(TakeoverError::NoRoot)?;
        keep_source(&root, source, &share)?;
        let mounts = SourceMounts::new(Arc::clone(region), table, known.values());
        let files = reader.open_files(in_rings, &nodes, &share);
        reader.locks(&nodes, &share);
        let unused = reader.unused(&nodes);
        let usage = options.limit.map(|limit| QuotaUsage::inherit(limit, Arc::clone(region)));
        let RegionReader { mut kept, lost, losses, .. } = reader;
        kept.sort_unstable();
        region.cells().keep_only(&kept);
        // Stands in until the first STATFS.
        let status = Kstatfs { bsize: 4096, frsize: 4096, namelen: 255, ..Default::default() };
        let tables = FilesystemTables { data_path, mounts, nodes, files, usage, share, status };
        Ok(InheritedTables { tables, root, lost, unused, losses })
    }
}

/// Lets the root keep a descriptor of the source: the recorded one, or else `source`.
fn keep_source(root: &Arc<Node>, source: Option<OwnedFd>, share: &Share) -> Result<(), TakeoverError> {
    if root.held().is_none() {
        root.hold_on(source.ok_or(TakeoverError::NoSource)?, share.take_anyway());
    }
    let held = root.held().ok_or(TakeoverError::NoSource)?;
    match (root.handle(), FileHandle::of(held.as_fd())) {
        (Some(handle), Ok((found, _))) if *handle != found => Err(TakeoverError::OtherSource),
        _ => Ok(()),
    }
}

/// Reads the cells of a region, kind by kind.
struct RegionReader<'a> {
    region: &'a Arc<Region>,
    cells: HashMap<u32, Vec<CellId>, HashKey>,
    /// The descriptors that belong to a cell already.
    taken: HashSet<RawFd>,
    kept: Vec<CellId>,
    lost: Vec<CellId>,
    losses: LostObjects,
}

impl<'a> RegionReader<'a> {
    fn new(region: &'a Arc<Region>) -> Self {
        let mut cells: HashMap<u32, Vec<CellId>, HashKey> = HashMap::default();
        region.cells().tagged().for_each(|(id, tag)| cells.entry(tag).or_default().push(id));
        let known = [
            NodeCell::TAG,
            OpenCell::TAG,
            LockCell::TAG,
            MountCell::TAG,
            HeldCell::TAG,
            DeviceCell::TAG,
            DirectoryNameCell::TAG,
        ];
        let strange = cells.iter().filter(|(tag, _)| !known.contains(tag));
        let lost = strange.flat_map(|(_, ids)| ids.iter().copied()).collect();
        let (taken, kept, losses) = (HashSet::new(), Vec::new(), LostObjects::default());
        Self { region, cells, taken, kept, lost, losses }
    }

    /// The records of one kind. Each is then kept or lost.
    fn records<T: CellContent>(&mut self) -> Vec<OwnedCell<T>> {
        let ids = self.cells.remove(&T::TAG).unwrap_or_default();
        ids.into_iter().map(|id| OwnedCell::of(self.region, id)).collect()
    }

    /// The descriptor that a cell names, unless no process has it any more, or another cell named it before.
    fn descriptor(&mut self, word: u32) -> Option<OwnedFd> {
        let number = number(word)?;
        // SAFETY: the number is only looked at.
        let open = unsafe { libc::fcntl(number, libc::F_GETFD) } != -1;
        if !open || !self.taken.insert(number) {
            return None;
        }
        // SAFETY: it is open, and no other code owns it: it was put there for this volume, and is taken once.
        Some(unsafe { OwnedFd::from_raw_fd(number) })
    }

    fn mounts(&mut self, source: Option<&OwnedFd>, table: &MountTable) -> HashMap<u64, Arc<SourceMount>, HashKey> {
        let mut mounts = HashMap::default();
        // If the table cannot be read, every mount below the source gets all restrictions.
        let table = table.mounts().unwrap_or_default();
        let mut records = self.records::<MountCell>();
        // A mount has a higher number than the mount that its mount point is on.
        records.sort_unstable_by_key(|record| record.index.load(Relaxed));
        for record in records {
            let word = record.anchor.load(Relaxed);
            let anchor = self.descriptor(word);
            self.kept.push(record.id());
            let source = source.filter(|_| record.index.load(Relaxed) == 0).and_then(|source| source.try_clone().ok());
            // A mount of a file system without file handles has no anchor to reopen.
            let route =
                (word != 0).then(|| source.map_or_else(|| MountRoute::recorded(&record, &mounts), MountRoute::Source));
            let mount = SourceMount::inherit(record, anchor, route, &table);
            mounts.insert(mount.index(), Arc::new(mount));
        }
        for record in self.records::<DeviceCell>() {
            match mounts.get(&record.mount.load(Relaxed)) {
                Some(mount) => {
                    self.kept.push(record.id());
                    mount.inherit_device(record);
                }
                None => self.lost.push(record.id()),
            }
        }
        mounts
    }

    fn nodes(&mut self, mounts: &HashMap<u64, Arc<SourceMount>, HashKey>, share: &Share) -> Nodes {
        let nodes = Nodes::empty(Arc::clone(self.region));
        let cells = self.cells.remove(&NodeCell::TAG).unwrap_or_default();
        nodes.reserve(cells.len());
        let mut unnamed: HashSet<CellId> =
            self.cells.remove(&DirectoryNameCell::TAG).unwrap_or_default().into_iter().collect();
        self.kept.reserve(cells.len());
        for cell in cells {
            let Some(record) = self.region.cells().find::<NodeCell>(cell) else { continue };
            let id = NodeId(record.id.load(Relaxed));
            // No answer has given the node to the kernel yet, or the kernel has forgotten the node.
            let is_forgotten = record.lookups.load(Relaxed) == 0 && id != NodeId::ROOT;
            let mount = mounts.get(&record.mount.load(Relaxed));
            let held = self.descriptor(record.held.load(Relaxed));
            let name = name_cell(record).and_then(|first| node_names::read(self.region, first, id));
            let identity = FileIdentity::read(record).filter(|identity| match identity {
                FileIdentity::Handle { .. } => !is_forgotten || (held.is_none() && record.nameless.load(Relaxed) == 0),
                // The root gets its descriptor later (`keep_source`). Any other node without a handle needs its descriptor or its name.
                FileIdentity::Number { .. } => {
                    !is_forgotten && (held.is_some() || name.is_some() || id == NodeId::ROOT)
                }
            });
            let takes_in = |(identity, mount)| nodes.inherit(cell, &identity, mount, held, share);
            if identity.zip(mount).is_some_and(takes_in) {
                self.kept.push(cell);
                for cell in name.into_iter().flat_map(|(_, cells)| cells).flatten() {
                    unnamed.remove(&cell);
                    self.kept.push(cell);
                }
            } else {
                self.losses.nodes += usize::from(!is_forgotten);
                self.lost.push(cell);
            }
        }
        self.lost.extend(unnamed);
        nodes
    }

    fn open_files(&mut self, in_rings: Vec<u64>, nodes: &Nodes, share: &Share) -> OpenFiles {
        let asked_again: HashSet<u64> = self.region.in_flight().unanswered().chain(in_rings).collect();
        let (mut files, mut directories) = (HashMap::default(), HashMap::default());
        let mut unanswered = HashMap::new();
        for record in self.records::<OpenCell>() {
            let (cell, unique) = (record.id(), record.unique.load(Relaxed));
            let handle = HandleId(record.handle.load(Relaxed));
            let descriptor = self.descriptor(record.descriptor.load(Relaxed));
            let node = nodes.get(NodeId(record.node.load(Relaxed)));
            let is_directory = record.flags.load(Relaxed) & DIRECTORY != 0;
            let known = files.contains_key(&handle) || directories.contains_key(&handle);
            // podfs reopens the file by its node, so the node must have the right type.
            let fits = |node: &Arc<Node>| match node.kind {
                FileType::Directory => is_directory,
                FileType::RegularFile => !is_directory,
                _ => false,
            };
            let (Some(node), false) = (node.filter(fits), known) else {
                self.losses.files += 1;
                self.lost.push(cell);
                continue;
            };
            self.kept.push(cell);
            if asked_again.contains(&unique) {
                unanswered.insert(unique, handle);
            }
            if is_directory {
                directories
                    .insert(handle, Arc::new(OpenDirectory::inherit(record, node, descriptor, share.take_anyway())));
            } else {
                let open = Arc::new(OpenFile::inherit(record, node, descriptor, share.take_anyway()));
                let mut shared = open.node.open();
                let shared = shared.get_or_insert_with(|| {
                    let cell = &open.node.record;
                    let (backing, is_unbacked) = (BackingId::recorded(cell), BackingId::is_none_recorded(cell));
                    Box::new(OpenNode { backing, is_unbacked, ..Default::default() })
                });
                shared.files.push(Arc::clone(&open));
                files.insert(handle, Arc::clone(&open));
            }
        }
        OpenFiles::inherit(Arc::clone(self.region), files, directories, unanswered)
    }

    fn locks(&mut self, nodes: &Nodes, share: &Share) {
        for record in self.records::<LockCell>() {
            let (cell, word) = (record.id(), record.descriptor.load(Relaxed));
            let node = nodes.get(NodeId(record.node.load(Relaxed)));
            let mut shared = node.as_ref().map(|node| node.open());
            let Some(shared) = shared.as_mut().and_then(|shared| shared.as_mut()) else {
                self.losses.locks += 1;
                self.lost.push(cell);
                continue;
            };
            self.kept.push(cell);
            shared.locks.inherit(record, || (self.descriptor(word), share.take_anyway()));
        }
        for record in self.records::<HeldCell>() {
            let (cell, node) = (record.id(), nodes.get(NodeId(record.node.load(Relaxed))));
            let mut shared = node.as_ref().map(|node| node.open());
            let shared = shared.as_mut().and_then(|shared| shared.as_mut());
            // Without an owner, the server was killed while it gave up the lock.
            let place = if shared.is_some_and(|shared| shared.locks.inherit_locked(record)) {
                &mut self.kept
            } else {
                &mut self.lost
            };
            place.push(cell);
        }
    }

    fn unused(&self, nodes: &Nodes) -> Vec<Arc<Node>> {
        let unused = |node: &Arc<Node>| node.open().is_none() && BackingId::recorded(&node.record).is_some();
        nodes.with_backing().into_iter().filter(unused).collect()
    }
}
