//! One generation in the tree: which of its nodes the kernel knows, and which are unlinked.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::SystemTime;

use nix::errno::Errno;

use super::super::generation::GenerationName;
use super::super::image::{Image, Index, Kind};
use super::{Attributes, FIRST_COOKIE, Listed, NodeId, NodeKind, Staged};

/// A generation whose directory has been made.
///
/// It is open (everything can be looked up), then closed (only what the kernel knew when it was
/// closed), then detached (its directory is gone), and over when the kernel forgot the last node.
pub(super) struct Attached {
    name: GenerationName,
    image: Arc<Image>,
    base: u64,
    /// Mode of the generation's directory; 0700 until the commit sets it, as `mkdtemp` makes it.
    mode: u16,
    time: SystemTime,
    lookups: Vec<u64>,
    /// Nodes whose lookup count is not zero.
    known: usize,
    /// Nodes that can still be looked up, once the generation is closed.
    closed: Option<HashSet<Index>>,
    unlinked: HashSet<Index>,
    detached: bool,
}

impl Attached {
    pub(super) fn new(staged: Staged, base: u64, time: SystemTime) -> Self {
        Self {
            lookups: vec![0; staged.image.nodes() as usize],
            name: staged.name,
            image: Arc::new(staged.image),
            base,
            mode: 0o700,
            time,
            known: 0,
            closed: None,
            unlinked: HashSet::new(),
            detached: false,
        }
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

    /// The kernel got another reference to a node.
    pub(super) fn look_up(&mut self, index: Index) {
        if let Some(count) = self.lookups.get_mut(index as usize) {
            self.known += usize::from(*count == 0);
            *count += 1;
        }
    }

    /// The kernel gave up `count` references to a node.
    pub(super) fn forget(&mut self, index: Index, count: u64) {
        if let Some(left) = self.lookups.get_mut(index as usize).filter(|left| **left > 0) {
            *left = left.saturating_sub(count);
            self.known -= usize::from(*left == 0);
        }
    }

    /// The nodes the kernel knows; no other can be looked up from now on.
    pub(super) fn close(&mut self) -> Vec<Index> {
        let known: Vec<_> = (0..self.image.nodes()).filter(|index| self.lookups[*index as usize] > 0).collect();
        self.closed = Some(known.iter().copied().collect());
        known
    }

    /// The generation's directory is removed, and everything in it.
    pub(super) fn detach(&mut self) {
        self.detached = true;
    }

    /// Nobody can reach a node any more.
    pub(super) fn is_over(&self) -> bool {
        self.detached && self.known == 0
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

    pub(super) fn kind(&self, index: Index) -> Option<Kind> {
        self.image.node(index).map(|node| node.kind)
    }

    pub(super) fn attributes(&self, node: NodeId, index: Index) -> Option<Attributes> {
        let shown = self.image.node(index)?;
        let (kind, size, links) = match shown.kind {
            Kind::File { content } => (NodeKind::File, content.len() as u64, 1),
            Kind::Directory { subdirectories, .. } => (NodeKind::Directory, 0, subdirectories.saturating_add(2)),
        };
        Some(Attributes {
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
        mut emit: impl FnMut(Listed<'_>) -> bool,
    ) -> Result<(), Errno> {
        let Some(Kind::Directory { children, .. }) = self.kind(directory) else {
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
            _ => format!("{}/{}", self.name, self.image.path(index)),
        }
    }

    fn node(&self, index: Index) -> NodeId {
        NodeId(self.base + u64::from(index))
    }

    fn is_unlinked(&self, index: Index) -> bool {
        self.detached || self.unlinked.contains(&index)
    }
}
