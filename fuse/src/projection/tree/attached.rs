//! A generation in the tree, with the nodes that the kernel knows, and those that are unlinked.
//!
//! The kernel's lookup count of a node is in the image, so the next server has the same count, and so does the supervisor,
//! which only reads it.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::SystemTime;

use nix::errno::Errno;
use serde::{Deserialize, Serialize};

use super::super::generation::GenerationName;
use super::super::image::{Image, ImageNodeKind, Index};
use super::{FIRST_COOKIE, NodeAttributes, NodeId, NodeKind, StagedGeneration, TreeEntry};

/// A generation whose directory has been made.
///
/// It is first open: the kernel can look up all nodes. Then it is closed: the kernel can look up only the nodes that it knew at the
/// close. Then it is detached: its directory was removed. It is over when the kernel has forgotten the last node.
pub(super) struct AttachedGeneration {
    name: GenerationName,
    image: Arc<Image>,
    base: u64,
    /// Mode of the generation's directory. It is 0700 until the commit sets it, as after mkdtemp(3).
    mode: u16,
    time: SystemTime,
    /// The nodes that the kernel can look up, if the generation is closed.
    closed: Option<HashSet<Index>>,
    unlinked: HashSet<Index>,
    detached: bool,
    /// If it is detached: the kernel has forgotten all nodes before this index.
    forgotten: usize,
}

/// An [`AttachedGeneration`] without its image, for another process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct SavedGeneration {
    pub(super) name: GenerationName,
    pub(super) base: u64,
    mode: u16,
    time: SystemTime,
    closed: Option<BTreeSet<Index>>,
    unlinked: BTreeSet<Index>,
    detached: bool,
}

impl AttachedGeneration {
    pub(super) fn new(staged: StagedGeneration, base: u64, time: SystemTime) -> Self {
        let StagedGeneration { name, image } = staged;
        let (closed, unlinked) = (None, HashSet::new());
        Self { name, image, base, mode: 0o700, time, closed, unlinked, detached: false, forgotten: 0 }
    }

    /// The state for another process, without the image.
    pub(super) fn save(&self) -> SavedGeneration {
        SavedGeneration {
            name: self.name.clone(),
            base: self.base,
            mode: self.mode,
            time: self.time,
            closed: self.closed.as_ref().map(|known| known.iter().copied().collect()),
            unlinked: self.unlinked.iter().copied().collect(),
            detached: self.detached,
        }
    }

    /// The generation from the state of another process.
    pub(super) fn restore(saved: SavedGeneration, image: Arc<Image>) -> Self {
        let SavedGeneration { name, base, mode, time, closed, unlinked, detached } = saved;
        let closed = closed.map(|known| known.into_iter().collect());
        let unlinked = unlinked.into_iter().collect();
        Self { name, image, base, mode, time, closed, unlinked, detached, forgotten: 0 }
    }

    pub(super) fn name(&self) -> &GenerationName {
        &self.name
    }

    pub(super) fn image(&self) -> Arc<Image> {
        Arc::clone(&self.image)
    }

    pub(super) fn set_mode(&mut self, mode: u16) {
        self.mode = mode;
    }

    /// Counts another reference of the kernel to a node.
    pub(super) fn look_up(&self, index: Index) {
        if let Some(count) = self.image.lookups().get(index as usize) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Subtracts `count` references of the kernel to a node.
    pub(super) fn forget(&self, index: Index, count: u64) {
        if let Some(lookups) = self.image.lookups().get(index as usize) {
            let subtract = |lookups: u64| Some(lookups.saturating_sub(count));
            let _never_fails = lookups.fetch_update(Ordering::Relaxed, Ordering::Relaxed, subtract);
        }
    }

    /// The nodes that the kernel knows, without unlinked ones.
    pub(super) fn known_nodes(&self) -> Vec<Index> {
        let counts = (0..).zip(self.image.lookups());
        let known = counts.filter(|(_, count)| count.load(Ordering::Relaxed) > 0).map(|(index, _)| index);
        known.filter(|index| !self.unlinked.contains(index)).collect()
    }

    /// Closes the generation: from here on, the kernel can look up only the nodes in `known`.
    pub(super) fn close(&mut self, known: &[Index]) {
        self.closed = Some(known.iter().copied().collect());
    }

    /// Notes that the generation's directory was removed.
    pub(super) fn detach(&mut self) {
        self.detached = true;
    }

    /// Whether the generation is detached and the kernel has forgotten all nodes.
    pub(super) fn is_over(&mut self) -> bool {
        // The kernel cannot look up nodes of a detached generation, so forgotten nodes stay forgotten.
        let counts = self.image.lookups();
        while self.detached && counts.get(self.forgotten).is_some_and(|count| count.load(Ordering::Relaxed) == 0) {
            self.forgotten += 1;
        }
        self.detached && self.forgotten == counts.len()
    }

    pub(super) fn child(&self, directory: Index, name: &str) -> Option<NodeId> {
        let index = self.image.child(directory, name.as_bytes())?;
        let reachable = self.closed.as_ref().is_none_or(|known| known.contains(&index));
        (reachable && !self.is_unlinked(index)).then_some(self.node(index))
    }

    pub(super) fn remove_child(&mut self, directory: Index, name: &str) -> Result<(), Errno> {
        let index = self.image.child(directory, name.as_bytes()).ok_or(Errno::ENOENT)?;
        self.unlinked.insert(index);
        Ok(())
    }

    pub(super) fn kind(&self, index: Index) -> Option<ImageNodeKind> {
        self.image.node(index).map(|node| node.kind)
    }

    pub(super) fn attributes(&self, node: NodeId, index: Index) -> Option<NodeAttributes> {
        let shown = self.image.node(index)?;
        let (kind, size, links) = match shown.kind {
            ImageNodeKind::File { content } => (NodeKind::File, content.len() as u64, 1),
            ImageNodeKind::Directory { subdirectories, .. } => {
                (NodeKind::Directory, 0, subdirectories.saturating_add(2))
            }
        };
        Some(NodeAttributes {
            node,
            kind,
            mode: if index == 0 { self.mode } else { shown.mode },
            size,
            links: if self.is_unlinked(index) { 0 } else { links },
            uid: shown.uid,
            gid: shown.gid,
            time: self.time,
        })
    }

    pub(super) fn list(
        &self,
        directory: Index,
        cookie: u64,
        mut emit: impl FnMut(TreeEntry<'_>) -> bool,
    ) -> Result<(), Errno> {
        let Some(ImageNodeKind::Directory { children, .. }) = self.kind(directory) else {
            return Err(Errno::ENOTDIR);
        };
        let next = Index::try_from(cookie.saturating_add(1).saturating_sub(FIRST_COOKIE)).unwrap_or(Index::MAX);
        for index in (children.start.max(next)..children.end).filter(|index| !self.is_unlinked(*index)) {
            let kind = if self.image.is_directory(index) { NodeKind::Directory } else { NodeKind::File };
            if emit((self.node(index), FIRST_COOKIE + u64::from(index), kind, self.image.name(index))) {
                break;
            }
        }
        Ok(())
    }

    /// The path below the projection's root.
    pub(super) fn path(&self, index: Index) -> String {
        match index {
            0 => self.name.to_string(),
            _ => format!("{}/{}", self.name, self.key(index)),
        }
    }

    /// The path below the generation's directory.
    pub(super) fn key(&self, index: Index) -> String {
        self.image.path(index)
    }

    fn node(&self, index: Index) -> NodeId {
        NodeId(self.base + u64::from(index))
    }

    fn is_unlinked(&self, index: Index) -> bool {
        self.detached || self.unlinked.contains(&index)
    }
}
