//! The tree of a projection. It does not depend on the kernel or FUSE.
//!
//! Each node id is used only once: 1 is the root, then come the fixed directories, then new generations (a block of ids each, in
//! the order of their image) and links. So an inode number never means another file later.
//!
//! Two rules keep the tree consistent:
//! 1. It changes only by the steps that were [announced](ProjectionTree::announce), in their order; any other
//!    change fails with `EROFS`.
//! 2. A node exists until it is unlinked *and* the kernel has forgotten it. When this is so for all nodes of a generation, the
//!    server drops and zeroes its image. So an open file keeps its bytes (AW-13).
//!
//! | module | owns |
//! |---|---|
//! | `changes` | announcing and applying steps |
//! | `attached` | one generation |
//! | `entries` | the names in the root |
//! | [`saved`] | sending a tree to another process |

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::ffi::OsStr;
use std::ops::Range;
use std::sync::Arc;
use std::time::SystemTime;

use nix::errno::Errno;
use serde::{Deserialize, Serialize};

use super::generation::GenerationName;
use super::image::{Image, ImageNodeKind, Index};
use super::steps::ProjectionStep;
use crate::session::NodeId;

mod attached;
mod changes;
mod entries;
pub mod saved;

use attached::AttachedGeneration;
use entries::Entries;

/// The constant attributes of a projection's root.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Root {
    /// Permission bits, sticky and setgid included.
    pub mode: u16,
    /// Group, also of links.
    pub gid: u32,
    /// Directories for mounts of other volumes, as paths below the root. They exist from the start, and hide keys with the same
    /// name (AW-21).
    pub directories: BTreeSet<String>,
}

/// The type of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeKind {
    /// A directory.
    Directory,
    /// A regular file.
    File,
    /// A symbolic link.
    Link,
}

/// The attributes of a node that `stat(2)` shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeAttributes {
    /// Inode number.
    pub node: NodeId,
    /// Type.
    pub kind: NodeKind,
    /// Permission bits.
    pub mode: u16,
    /// Size in bytes; 0 for directories.
    pub size: u64,
    /// Hard links; 0 once the node is unlinked.
    pub links: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// All timestamps of `stat(2)`.
    pub time: SystemTime,
}

/// A generation before its `mkdir(2)`, which attaches it.
pub struct StagedGeneration {
    /// The name of its directory.
    pub name: GenerationName,
    /// Its payload.
    pub image: Arc<Image>,
}

/// The size of a tree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TreeSize {
    /// Bytes in files.
    pub bytes: u64,
    /// Directories, files and links.
    pub nodes: u64,
}

/// One directory entry: node, cookie of the next one, type, name.
pub type TreeEntry<'a> = (NodeId, u64, NodeKind, &'a str);

/// The tree of one projection.
pub struct ProjectionTree {
    root: Root,
    fixed: Vec<FixedDirectory>,
    entries: Entries,
    links: HashMap<NodeId, TreeLink>,
    generations: BTreeMap<u64, AttachedGeneration>,
    staged: Option<StagedGeneration>,
    announced: VecDeque<ProjectionStep>,
    /// The number of applied steps since the projection was mounted.
    applied: u64,
    /// The last step of an earlier server. If that server did not answer its request, the kernel sends the request again.
    unanswered_step: Option<ProjectionStep>,
    /// The next node id.
    next: u64,
    created: SystemTime,
    time: SystemTime,
}

/// A directory that exists from the start.
struct FixedDirectory {
    parent: NodeId,
    name: String,
    children: BTreeMap<String, NodeId>,
}

struct TreeLink {
    name: String,
    target: String,
    uid: u32,
    time: SystemTime,
    lookups: LookupCount,
    unlinked: bool,
}

/// The kernel's lookup count of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LookupCount {
    /// The count.
    Counted(u64),
    /// Earlier servers have a part of the count. The kernel forgets the whole count of a link at once.
    Unknown,
}

/// Cookies of the entries that every directory has.
pub(crate) const SELF_COOKIE: u64 = 1;
pub(crate) const PARENT_COOKIE: u64 = 2;
/// Every other cookie is this plus the node id.
pub(crate) const FIRST_COOKIE: u64 = 8;

impl ProjectionTree {
    /// An empty projection.
    pub fn new(root: Root, time: SystemTime) -> Self {
        let directories = root.directories.clone();
        let mut tree = Self {
            root,
            fixed: Vec::new(),
            entries: Entries::default(),
            links: HashMap::new(),
            generations: BTreeMap::new(),
            staged: None,
            announced: VecDeque::new(),
            applied: 0,
            unanswered_step: None,
            next: NodeId::ROOT.0 + 1,
            created: time,
            time,
        };
        for path in &directories {
            tree.make_fixed(path);
        }
        tree
    }

    /// The entry `name` of a directory, counted as known to the kernel.
    ///
    /// # Errors
    /// `ENOENT`, `ENOTDIR`, or `ESTALE` for a removed node.
    pub fn lookup(&mut self, parent: NodeId, name: &OsStr) -> Result<NodeAttributes, Errno> {
        let found = self.entry(parent, name)?;
        self.count(found.node);
        Ok(found)
    }

    /// The entry `name` of a directory.
    ///
    /// # Errors
    /// Those of [`Self::lookup`].
    pub fn entry(&self, parent: NodeId, name: &OsStr) -> Result<NodeAttributes, Errno> {
        let name = name.to_str().ok_or(Errno::ENOENT)?;
        self.attributes(self.child(parent, name)?)
    }

    /// Subtracts `count` references of the kernel to a node.
    pub fn forget(&mut self, node: NodeId, count: u64) {
        if let Some(link) = self.links.get_mut(&node) {
            link.lookups = match link.lookups {
                LookupCount::Counted(known) => LookupCount::Counted(known.saturating_sub(count)),
                LookupCount::Unknown if link.unlinked => LookupCount::Counted(0),
                LookupCount::Unknown => LookupCount::Unknown,
            };
            self.sweep_link(node);
        } else if let Some((base, index)) = self.in_generation(node) {
            if let Some(generation) = self.generations.get(&base) {
                generation.forget(index, count);
            }
            self.sweep_generation(base);
        }
    }

    /// The attributes that `stat(2)` shows.
    ///
    /// # Errors
    /// `ESTALE` for a removed node.
    pub fn attributes(&self, node: NodeId) -> Result<NodeAttributes, Errno> {
        match self.place(node)? {
            NodePlace::Root => Ok(self.directory(node, self.root.mode, self.entries.directories(), self.time)),
            NodePlace::Fixed(fixed) => Ok(self.directory(node, 0o755, fixed.children.len() as u32, self.created)),
            NodePlace::Link(link) => Ok(NodeAttributes {
                node,
                kind: NodeKind::Link,
                mode: 0o777,
                size: link.target.len() as u64,
                links: u32::from(!link.unlinked),
                uid: link.uid,
                gid: self.root.gid,
                time: link.time,
            }),
            NodePlace::Generation(generation, index) => generation.attributes(node, index).ok_or(Errno::ESTALE),
        }
    }

    /// The target of a link.
    ///
    /// # Errors
    /// `EINVAL` for a node that is no link, `ESTALE` for a removed one.
    pub fn read_link(&self, node: NodeId) -> Result<&str, Errno> {
        match self.place(node)? {
            NodePlace::Link(link) => Ok(&link.target),
            _ => Err(Errno::EINVAL),
        }
    }

    /// The image with the bytes of a file, and their range.
    ///
    /// # Errors
    /// `EISDIR`, `EINVAL` for a link, `ESTALE` for a removed node.
    pub fn content(&self, node: NodeId) -> Result<(Arc<Image>, Range<usize>), Errno> {
        match self.place(node)? {
            NodePlace::Generation(generation, index) => match generation.kind(index).ok_or(Errno::ESTALE)? {
                ImageNodeKind::File { content } => Ok((generation.image(), content)),
                ImageNodeKind::Directory { .. } => Err(Errno::EISDIR),
            },
            NodePlace::Link(_) => Err(Errno::EINVAL),
            NodePlace::Root | NodePlace::Fixed(_) => Err(Errno::EISDIR),
        }
    }

    /// The path of a file without its generation, as in containers.
    ///
    /// # Errors
    /// Those of [`Self::content`].
    pub fn key(&self, node: NodeId) -> Result<String, Errno> {
        self.content(node)?;
        match self.place(node)? {
            NodePlace::Generation(generation, index) => Ok(generation.key(index)),
            NodePlace::Root | NodePlace::Fixed(_) | NodePlace::Link(_) => Err(Errno::EISDIR),
        }
    }

    /// Calls `emit` for each entry after `cookie`, until it returns `true` because it has no more room.
    ///
    /// # Errors
    /// `ENOTDIR`, or `ESTALE` for a removed node.
    pub fn list(&self, node: NodeId, cookie: u64, mut emit: impl FnMut(TreeEntry<'_>) -> bool) -> Result<(), Errno> {
        let place = self.place(node)?;
        let parent = self.parent(node);
        for (dot, at, to) in [(".", SELF_COOKIE, node), ("..", PARENT_COOKIE, parent)] {
            if cookie < at && emit((to, at, NodeKind::Directory, dot)) {
                return Ok(());
            }
        }
        match place {
            NodePlace::Root => {
                for (at, entry) in self.entries.after(cookie) {
                    if emit((entry.node, at, entry.kind, &entry.name)) {
                        break;
                    }
                }
            }
            NodePlace::Fixed(fixed) => {
                for (name, child) in &fixed.children {
                    let at = child.0 + FIRST_COOKIE;
                    if cookie < at && emit((*child, at, NodeKind::Directory, name)) {
                        break;
                    }
                }
            }
            NodePlace::Generation(generation, index) => generation.list(index, cookie, emit)?,
            NodePlace::Link(_) => return Err(Errno::ENOTDIR),
        }
        Ok(())
    }

    /// The size of all generations and links.
    pub fn usage(&self) -> TreeSize {
        let links = TreeSize { bytes: 0, nodes: 1 + (self.fixed.len() + self.links.len()) as u64 };
        self.generations.values().fold(links, |sum, generation| {
            let image = generation.image();
            TreeSize { bytes: sum.bytes + image.content_size(), nodes: sum.nodes + u64::from(image.nodes()) }
        })
    }

    /// The path of a node, for messages: `/..2026_…/app.yaml`.
    pub fn path(&self, node: NodeId) -> String {
        match self.place(node) {
            Ok(NodePlace::Root) => "/".to_owned(),
            Ok(NodePlace::Link(link)) => format!("/{}", link.name),
            Ok(_) => format!("/{}", self.directory_path(node)),
            Err(_) => format!("/?{}", node.0),
        }
    }
}

/// The place of a node in the tree.
enum NodePlace<'a> {
    Root,
    Fixed(&'a FixedDirectory),
    Link(&'a TreeLink),
    Generation(&'a AttachedGeneration, Index),
}

/// Lookup and lifetime of nodes.
impl ProjectionTree {
    fn place(&self, node: NodeId) -> Result<NodePlace<'_>, Errno> {
        if node == NodeId::ROOT {
            return Ok(NodePlace::Root);
        }
        if let Some(fixed) = self.fixed_index(node).and_then(|index| self.fixed.get(index)) {
            return Ok(NodePlace::Fixed(fixed));
        }
        if let Some(link) = self.links.get(&node) {
            return Ok(NodePlace::Link(link));
        }
        let (base, index) = self.in_generation(node).ok_or(Errno::ESTALE)?;
        self.generations.get(&base).map(|generation| NodePlace::Generation(generation, index)).ok_or(Errno::ESTALE)
    }

    fn fixed_index(&self, node: NodeId) -> Option<usize> {
        usize::try_from(node.0.checked_sub(NodeId::ROOT.0 + 1)?).ok()
    }

    fn in_generation(&self, node: NodeId) -> Option<(u64, Index)> {
        let (base, generation) = self.generations.range(..=node.0).next_back()?;
        let index = Index::try_from(node.0 - base).ok()?;
        (index < generation.image().nodes()).then_some((*base, index))
    }

    fn generation_mut(&mut self, name: &str) -> Result<&mut AttachedGeneration, Errno> {
        let entry = self.entries.find(name).ok_or(Errno::ENOENT)?;
        self.generations.get_mut(&entry.node.0).ok_or(Errno::ENOENT)
    }

    /// The node at a path. Does not count a lookup.
    fn find(&self, path: &str) -> Option<NodeId> {
        let mut names = path.split('/').filter(|name| !name.is_empty());
        names.try_fold(NodeId::ROOT, |node, name| self.child(node, name).ok())
    }

    fn child(&self, parent: NodeId, name: &str) -> Result<NodeId, Errno> {
        match self.place(parent)? {
            NodePlace::Root => self.entries.find(name).map(|entry| entry.node).ok_or(Errno::ENOENT),
            NodePlace::Fixed(fixed) => fixed.children.get(name).copied().ok_or(Errno::ENOENT),
            NodePlace::Generation(generation, index) => generation.child(index, name).ok_or(Errno::ENOENT),
            NodePlace::Link(_) => Err(Errno::ENOTDIR),
        }
    }

    fn parent(&self, node: NodeId) -> NodeId {
        match self.place(node) {
            Ok(NodePlace::Fixed(fixed)) => fixed.parent,
            Ok(NodePlace::Generation(generation, index)) if index > 0 => {
                NodeId(node.0 - u64::from(index) + u64::from(generation.image().parent(index)))
            }
            _ => NodeId::ROOT,
        }
    }

    /// The path of a directory below the root, in the form of [`ProjectionStep::Unlink`].
    fn directory_path(&self, node: NodeId) -> String {
        match self.place(node) {
            Ok(NodePlace::Generation(generation, index)) => generation.path(index),
            Ok(NodePlace::Fixed(fixed)) if fixed.parent == NodeId::ROOT => fixed.name.clone(),
            Ok(NodePlace::Fixed(fixed)) => format!("{}/{}", self.directory_path(fixed.parent), fixed.name),
            _ => String::new(),
        }
    }

    fn count(&mut self, node: NodeId) {
        if let Some(link) = self.links.get_mut(&node) {
            if let LookupCount::Counted(count) = &mut link.lookups {
                *count += 1;
            }
        } else if let Some((base, index)) = self.in_generation(node)
            && let Some(generation) = self.generations.get(&base)
        {
            generation.look_up(index);
        }
    }

    fn sweep_link(&mut self, node: NodeId) {
        if self.links.get(&node).is_some_and(|link| link.unlinked && link.lookups == LookupCount::Counted(0)) {
            self.links.remove(&node);
        }
    }

    fn sweep_generation(&mut self, base: u64) {
        if self.generations.get_mut(&base).is_some_and(AttachedGeneration::is_over) {
            self.generations.remove(&base);
        }
    }

    fn make_fixed(&mut self, path: &str) {
        let mut parent = NodeId::ROOT;
        for name in path.split('/').filter(|name| !name.is_empty()) {
            parent = match self.child(parent, name) {
                Ok(existing) => existing,
                Err(_) => self.push_fixed(parent, name),
            };
        }
    }

    fn push_fixed(&mut self, parent: NodeId, name: &str) -> NodeId {
        let node = NodeId(self.next);
        self.next += 1;
        self.fixed.push(FixedDirectory { parent, name: name.to_owned(), children: BTreeMap::new() });
        if parent == NodeId::ROOT {
            self.entries.insert(name, node, NodeKind::Directory);
        } else if let Some(above) = self.fixed_index(parent).and_then(|index| self.fixed.get_mut(index)) {
            above.children.insert(name.to_owned(), node);
        }
        node
    }

    fn directory(&self, node: NodeId, mode: u16, subdirectories: u32, time: SystemTime) -> NodeAttributes {
        NodeAttributes {
            node,
            kind: NodeKind::Directory,
            mode,
            size: 0,
            links: subdirectories.saturating_add(2),
            uid: 0,
            gid: self.root.gid,
            time,
        }
    }
}

#[cfg(test)]
mod tests;
