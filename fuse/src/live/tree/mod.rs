//! The tree of the live parts of one projection. It does not depend on the kernel or FUSE.
//!
//! The server has the tree, and the supervisor has a replica, as for a projection:
//! 1. The tree changes only by the steps that were [announced](LiveTree::announce), in their order; any other change fails with
//!    `EROFS`. The server counts a step in the volume's region before it answers the kernel's request.
//! 2. Each node id is used only once, in the order of the steps. So a replica that applies the same steps has the same ids, and a
//!    successor that begins with the replica answers for the nodes that the kernel knows.
//! 3. A node exists until it is unlinked *and* the kernel has forgotten it. So an open file keeps its bytes. The replica does not
//!    get FORGET; the server reports with each update which unlinked nodes the kernel still knows.
//! 4. The server drops an image, and so zeroes it, when no node of the server *and* none of the replica shows bytes of it
//!    ([`LiveTree::drop_images`]). So a successor, which begins with the replica, never has an image that is zeroed.

mod reads;
mod saved;

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::SystemTime;

use nix::errno::Errno;
use serde::{Deserialize, Serialize};

use super::step::{LiveStep, split};
use crate::projection::image::{Image, ImageNode, ImageNodeKind, Index};
use crate::session::NodeId;

pub use saved::SavedLiveTree;

/// Whether a slot is a file or a directory. It never changes: a bind mount of a file cannot become one of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PartType {
    /// A file, with the last content that the payload had at the path as a file.
    File,
    /// A directory, with the entries that the payload has below the path; empty while the payload has no such directory.
    Directory,
}

/// A path that is shown live. The index of the slot in the list of slots is its name in the root.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slot {
    /// The path in the payload; empty for the whole payload.
    pub path: String,
    /// Its type when a container first mounted it.
    pub shape: PartType,
}

/// An announced update.
#[derive(Clone)]
pub struct LiveUpdate {
    /// All slots, new ones at the end.
    pub slots: Vec<Slot>,
    /// The changes, in their order.
    pub steps: Vec<LiveStep>,
    /// The number of the image that the tree shows after the steps; no other update of the tree has it.
    pub number: u64,
    /// The image of that number.
    pub image: Arc<Image>,
    /// The modification time of the nodes that change.
    pub time: SystemTime,
}

/// The tree of the live parts of a projection.
pub struct LiveTree {
    slots: Vec<Slot>,
    nodes: BTreeMap<NodeId, LiveNode>,
    images: BTreeMap<u64, Arc<Image>>,
    /// The number of the image that the tree shows after the last announced update.
    newest: Option<u64>,
    announced: VecDeque<LiveStep>,
    /// The number of steps applied since the mount.
    applied: u64,
    /// The last step of an earlier server. If that server did not answer, the kernel or the supervisor sends the request again.
    unanswered_step: Option<LiveStep>,
    next: NodeId,
    time: SystemTime,
    /// Files that are about to show other bytes, while the kernel drops their pages.
    pub(super) changing: HashSet<NodeId>,
    /// Whether the server has answered a request for such a file from the old bytes, after a wait of `SWAP_TIMEOUT`.
    pub(super) disturbed: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct LiveNode {
    parent: NodeId,
    name: String,
    body: LiveContent,
    mode: u16,
    uid: u32,
    gid: u32,
    time: SystemTime,
    unlinked: bool,
    /// The kernel's lookup count of the node (FUSE `nlookup`); `None` if earlier servers have a part of the count.
    #[serde(skip)]
    lookups: Option<u64>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
enum LiveContent {
    /// The range is one of the image's bytes.
    File {
        image: u64,
        content: Range<usize>,
    },
    Directory {
        children: BTreeMap<String, NodeId>,
    },
}

impl LiveTree {
    /// A tree without slots.
    pub fn new(time: SystemTime) -> Self {
        let root = LiveNode {
            parent: NodeId::ROOT,
            name: String::new(),
            body: LiveContent::Directory { children: BTreeMap::new() },
            mode: 0o755,
            uid: 0,
            gid: 0,
            time,
            unlinked: false,
            lookups: None,
        };
        Self {
            slots: Vec::new(),
            nodes: BTreeMap::from([(NodeId::ROOT, root)]),
            images: BTreeMap::new(),
            newest: None,
            announced: VecDeque::new(),
            applied: 0,
            unanswered_step: None,
            next: NodeId(NodeId::ROOT.0 + 1),
            time,
            changing: HashSet::new(),
            disturbed: false,
        }
    }

    /// The slots, in the order of their numbers.
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Sets the slots that the next plan makes or keeps.
    pub fn set_slots(&mut self, slots: Vec<Slot>) {
        self.slots = slots;
    }

    /// The image that the tree shows after the last announced update, and its number.
    pub fn newest(&self) -> Option<(u64, &Arc<Image>)> {
        self.newest.and_then(|number| Some((number, self.images.get(&number)?)))
    }

    /// The announced steps that are not applied yet.
    pub fn announced(&self) -> Vec<LiveStep> {
        self.announced.iter().cloned().collect()
    }

    /// Number of steps applied since the mount.
    pub fn applied(&self) -> u64 {
        self.applied
    }

    /// Accepts the steps of `update`, in their order, in place of all earlier ones.
    pub fn announce(&mut self, update: LiveUpdate) {
        let LiveUpdate { slots, steps, number, image, time } = update;
        if let Some(before) = self.images.insert(number, image) {
            // The supervisor announces the update again, because an earlier server did not answer. Both images are the same memory.
            before.disown();
        }
        (self.slots, self.announced, self.newest, self.time) = (slots, steps.into(), Some(number), time);
        self.unanswered_step = None;
    }

    /// Applies the step of a system call or a message that the caller has completed.
    ///
    /// # Errors
    /// `EROFS` when it is not the next one.
    pub fn confirm(&mut self, step: &LiveStep) -> Result<(), Errno> {
        self.take_step(step)
    }

    /// Like [`ProjectionTree::catch_up`](crate::projection::tree::ProjectionTree::catch_up).
    ///
    /// # Errors
    /// `EINVAL` when that tree is not the same or one step ahead.
    pub fn catch_up(&mut self, applied: u64) -> Result<(), Errno> {
        if applied == self.applied {
            return Ok(());
        }
        let step = self.announced.front().filter(|_| applied == self.applied + 1).cloned().ok_or(Errno::EINVAL)?;
        self.take_step(&step)?;
        self.unanswered_step = Some(step);
        Ok(())
    }

    /// Applies the next step, unless an earlier server has applied it without an answer.
    pub(super) fn take(&mut self, step: &LiveStep) -> Result<(), Errno> {
        if self.unanswered_step.take_if(|before| before == step).is_some() {
            return Ok(());
        }
        self.take_step(step)?;
        self.unanswered_step = None;
        Ok(())
    }

    fn take_step(&mut self, step: &LiveStep) -> Result<(), Errno> {
        if self.announced.front() != Some(step) {
            return Err(Errno::EROFS);
        }
        self.apply(step)?;
        self.announced.pop_front();
        self.applied += 1;
        Ok(())
    }

    fn apply(&mut self, step: &LiveStep) -> Result<(), Errno> {
        match step {
            LiveStep::MakeDirectory { path } | LiveStep::MakeFile { path } => self.make(path),
            LiveStep::Swap { paths } => paths.iter().try_for_each(|path| self.show_newest(path, Some(self.time))),
            LiveStep::Modify { path } | LiveStep::Touch { path } => self.find(path).map(drop).ok_or(Errno::ENOENT),
            LiveStep::RemoveFile { path } | LiveStep::RemoveDirectory { path } => self.remove(path),
            LiveStep::Settle => {
                let files: Vec<_> =
                    self.nodes.iter().filter(|(_, node)| node.is_linked_file()).map(|(id, _)| *id).collect();
                files.into_iter().try_for_each(|file| self.show_newest(&self.path(file), None))
            }
        }
    }

    fn make(&mut self, path: &str) -> Result<(), Errno> {
        let (directory, name) = split(path);
        let parent = self.find(directory).ok_or(Errno::ENOENT)?;
        let (number, image) = self.newest().ok_or(Errno::EROFS)?;
        // If the payload does not have the directory of a slot, that directory gets the attributes of the payload's root.
        let wanted = find_in(image, path).unwrap_or(0);
        let ImageNode { kind, mode, uid, gid } = image.node(wanted).ok_or(Errno::EROFS)?;
        let body = match kind {
            ImageNodeKind::File { content } => LiveContent::File { image: number, content },
            ImageNodeKind::Directory { .. } => LiveContent::Directory { children: BTreeMap::new() },
        };
        let (id, time) = (self.next, self.time);
        let above = self.nodes.get_mut(&parent).ok_or(Errno::ENOENT)?;
        let LiveContent::Directory { children } = &mut above.body else { return Err(Errno::ENOTDIR) };
        if children.contains_key(name) {
            return Err(Errno::EEXIST);
        }
        children.insert(name.to_owned(), id);
        above.time = time;
        let name = name.to_owned();
        let node = LiveNode { parent, name, body, mode, uid, gid, time, unlinked: false, lookups: Some(0) };
        self.nodes.insert(id, node);
        self.next.0 += 1;
        Ok(())
    }

    fn remove(&mut self, path: &str) -> Result<(), Errno> {
        let (directory, name) = split(path);
        let (node, parent) = (self.find(path).ok_or(Errno::ENOENT)?, self.find(directory).ok_or(Errno::ENOENT)?);
        if !self.children(node).is_empty() {
            return Err(Errno::ENOTEMPTY);
        }
        let time = self.time;
        if let Some(LiveNode { body: LiveContent::Directory { children }, time: changed, .. }) =
            self.nodes.get_mut(&parent)
        {
            children.remove(name);
            *changed = time;
        }
        if let Some(node) = self.nodes.get_mut(&node) {
            node.unlinked = true;
        }
        self.sweep(node);
        Ok(())
    }

    /// Shows bytes and attributes of the newest image. `time` becomes the modification time; with `None`, that time stays.
    fn show_newest(&mut self, path: &str, time: Option<SystemTime>) -> Result<(), Errno> {
        let id = self.find(path).ok_or(Errno::ENOENT)?;
        let (number, image) = self.newest().ok_or(Errno::EROFS)?;
        let wanted = find_in(image, path).ok_or(Errno::ENOENT)?;
        let ImageNode { kind, mode, uid, gid } = image.node(wanted).ok_or(Errno::EROFS)?;
        let node = self.nodes.get_mut(&id).ok_or(Errno::ENOENT)?;
        match (&mut node.body, kind) {
            (LiveContent::File { image, content: shown }, ImageNodeKind::File { content }) => {
                (*image, *shown) = (number, content)
            }
            (LiveContent::Directory { .. }, ImageNodeKind::Directory { .. }) => {}
            _ => return Err(Errno::EROFS),
        }
        (node.mode, node.uid, node.gid) = (mode, uid, gid);
        node.time = time.unwrap_or(node.time);
        Ok(())
    }

    /// The unlinked nodes that the kernel knows.
    pub fn unlinked(&self) -> Vec<NodeId> {
        self.nodes.iter().filter(|(_, node)| node.unlinked).map(|(id, _)| *id).collect()
    }

    /// In a replica: drops the unlinked nodes except those in `known`.
    pub fn keep_unlinked(&mut self, known: &[NodeId]) {
        let known: BTreeSet<_> = known.iter().collect();
        self.nodes.retain(|id, node| !node.unlinked || known.contains(id));
    }

    /// Counts another reference of the kernel to a node.
    pub(super) fn count(&mut self, node: NodeId) {
        if let Some(LiveNode { lookups: Some(lookups), .. }) = self.nodes.get_mut(&node) {
            *lookups += 1;
        }
    }

    /// Subtracts `count` references of the kernel to a node.
    pub fn forget(&mut self, node: NodeId, count: u64) {
        let Some(known) = self.nodes.get_mut(&node) else { return };
        known.lookups = match known.lookups {
            Some(lookups) => Some(lookups.saturating_sub(count)),
            // The kernel forgets an unlinked node once, with its whole count, that of earlier servers included.
            None if known.unlinked => Some(0),
            None => None,
        };
        self.sweep(node);
    }

    fn sweep(&mut self, node: NodeId) {
        if self.nodes.get(&node).is_some_and(|node| node.unlinked && node.lookups == Some(0)) {
            self.nodes.remove(&node);
        }
    }

    /// Drops the images that no node needs, except those with the numbers in `but`.
    pub fn drop_images(&mut self, but: &[u64]) {
        let needed = self.needed_images();
        self.images.retain(|number, _| needed.contains(number) || but.contains(number));
    }

    /// The numbers of the images whose bytes nodes show, and of the newest image.
    pub fn needed_images(&self) -> BTreeSet<u64> {
        let shown = self.nodes.values().filter_map(|node| match &node.body {
            LiveContent::File { image, .. } => Some(*image),
            LiveContent::Directory { .. } => None,
        });
        shown.chain(self.newest).collect()
    }

    /// Makes this process the owner of all images, so that it zeroes them when it drops them. Only the server of the tree does
    /// this.
    pub fn own_images(&self) {
        self.images.values().for_each(|image| image.own());
    }
}

impl LiveNode {
    fn is_linked_file(&self) -> bool {
        !self.unlinked && matches!(self.body, LiveContent::File { .. })
    }
}

/// The node of an image at a path.
pub(crate) fn find_in(image: &Image, path: &str) -> Option<Index> {
    let mut names = path.split('/').filter(|name| !name.is_empty());
    names.try_fold(0, |node, name| image.child(node, name.as_bytes()))
}
