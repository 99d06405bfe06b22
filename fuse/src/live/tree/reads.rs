//! The entries, attributes and bytes of a tree of live parts.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use nix::errno::Errno;

use super::{LiveContent, LiveNode, LiveTree};
use crate::projection::image::{Image, Index};
use crate::projection::tree::{FIRST_COOKIE, NodeAttributes, NodeKind, PARENT_COOKIE, SELF_COOKIE, TreeEntry};
use crate::session::NodeId;

impl LiveTree {
    /// The entry `name` of a directory.
    ///
    /// # Errors
    /// `ENOENT`, `ENOTDIR`, or `ESTALE` for a removed node.
    pub fn entry(&self, parent: NodeId, name: &str) -> Result<NodeId, Errno> {
        match &self.node(parent)?.body {
            LiveContent::Directory { children } => children.get(name).copied().ok_or(Errno::ENOENT),
            LiveContent::File { .. } => Err(Errno::ENOTDIR),
        }
    }

    /// The attributes that `stat(2)` shows.
    ///
    /// # Errors
    /// `ESTALE` for a removed node.
    pub fn attributes(&self, id: NodeId) -> Result<NodeAttributes, Errno> {
        let node = self.node(id)?;
        let (kind, size, links) = match &node.body {
            LiveContent::File { content, .. } => (NodeKind::File, content.len() as u64, u32::from(!node.unlinked)),
            LiveContent::Directory { children } => {
                let directories = children.values().filter(|child| self.is_directory(**child)).count();
                (NodeKind::Directory, 0, if node.unlinked { 0 } else { 2 + directories as u32 })
            }
        };
        let LiveNode { mode, uid, gid, time, .. } = *node;
        Ok(NodeAttributes { node: id, kind, mode, size, links, uid, gid, time })
    }

    /// The image with the bytes of a file, and their range.
    ///
    /// # Errors
    /// `EISDIR`, or `ESTALE` for a removed node.
    pub fn content(&self, id: NodeId) -> Result<(Arc<Image>, Range<usize>), Errno> {
        match &self.node(id)?.body {
            LiveContent::File { image, content } => {
                Ok((Arc::clone(self.images.get(image).ok_or(Errno::ESTALE)?), content.clone()))
            }
            LiveContent::Directory { .. } => Err(Errno::EISDIR),
        }
    }

    /// Calls `emit` for each entry after `cookie`, until it returns `true` because it has no more room. A name keeps its cookie
    /// while it exists, and a new name gets a higher cookie.
    ///
    /// # Errors
    /// `ENOTDIR`, or `ESTALE` for a removed node.
    pub fn list(&self, id: NodeId, cookie: u64, mut emit: impl FnMut(TreeEntry<'_>) -> bool) -> Result<(), Errno> {
        let node = self.node(id)?;
        let LiveContent::Directory { children } = &node.body else { return Err(Errno::ENOTDIR) };
        for (dot, at, to) in [(".", SELF_COOKIE, id), ("..", PARENT_COOKIE, node.parent)] {
            if cookie < at && emit((to, at, NodeKind::Directory, dot)) {
                return Ok(());
            }
        }
        let by_id: BTreeMap<NodeId, &str> = children.iter().map(|(name, child)| (*child, name.as_str())).collect();
        for (child, name) in by_id {
            let kind = if self.is_directory(child) { NodeKind::Directory } else { NodeKind::File };
            let at = child.0 + FIRST_COOKIE;
            if cookie < at && emit((child, at, kind, name)) {
                break;
            }
        }
        Ok(())
    }

    /// Bytes in files, and the number of nodes.
    pub fn usage(&self) -> (u64, u64) {
        let bytes = self.nodes.values().map(|node| match &node.body {
            LiveContent::File { content, .. } => content.len() as u64,
            LiveContent::Directory { .. } => 0,
        });
        (bytes.sum(), self.nodes.len() as u64)
    }

    /// The path of a node below the root.
    pub fn path(&self, id: NodeId) -> String {
        let mut names = Vec::new();
        let mut at = id;
        while let Some(node) = self.nodes.get(&at).filter(|_| at != NodeId::ROOT) {
            names.push(node.name.as_str());
            at = node.parent;
        }
        names.reverse();
        names.join("/")
    }

    /// The node at a path.
    pub fn find(&self, path: &str) -> Option<NodeId> {
        let mut names = path.split('/').filter(|name| !name.is_empty());
        names.try_fold(NodeId::ROOT, |node, name| self.entry(node, name).ok())
    }

    /// The entry of a directory.
    pub(in crate::live) fn child(&self, directory: NodeId, name: &str) -> Option<NodeId> {
        self.entry(directory, name).ok()
    }

    /// The names in a directory.
    pub(in crate::live) fn children(&self, id: NodeId) -> Vec<String> {
        match self.nodes.get(&id).map(|node| &node.body) {
            Some(LiveContent::Directory { children }) => children.keys().cloned().collect(),
            _ => Vec::new(),
        }
    }

    pub(in crate::live) fn is_directory(&self, id: NodeId) -> bool {
        matches!(self.nodes.get(&id), Some(LiveNode { body: LiveContent::Directory { .. }, .. }))
    }

    /// Whether the file `id` has these bytes.
    pub(in crate::live) fn has_bytes(&self, id: NodeId, bytes: &[u8]) -> bool {
        self.content(id).is_ok_and(|(image, content)| image.has_bytes(content, bytes))
    }

    /// Whether the node `id` has the mode, owner and group of the node `wanted` of an image.
    pub(in crate::live) fn looks_like(&self, id: NodeId, image: &Image, wanted: Index) -> bool {
        let shown = self.nodes.get(&id).map(|node| (node.mode, node.uid, node.gid));
        shown == image.node(wanted).map(|node| (node.mode, node.uid, node.gid))
    }

    fn node(&self, id: NodeId) -> Result<&LiveNode, Errno> {
        self.nodes.get(&id).ok_or(Errno::ESTALE)
    }
}
