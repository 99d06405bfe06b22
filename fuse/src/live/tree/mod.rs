//! The tree of the live parts of one projection. No kernel and no FUSE in here.
//!
//! The server has it, and the supervisor a replica, as of a projection's tree:
//! 1. It changes only by the steps that were [announced](LiveTree::announce), in their order; any other request that would
//!    change it is `EROFS`. The server counts a step in the volume's region before it answers the kernel's request.
//! 2. Node ids are handed out once and never again, in the order of the steps. So a replica that takes the same steps has the
//!    same ids, and a successor that begins with it answers for the nodes that the kernel knows.
//! 3. A node lives until it is unlinked *and* the kernel forgot it. So an open file keeps its bytes. The replica does not get
//!    FORGET; the server reports forgotten nodes with each update.
//! 4. The server drops an image, and zeroes it by that, when no node of its own *and* none of the replica shows bytes of it
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
    /// A file: what the payload had last at the path, when that was a file.
    File,
    /// A directory: what the payload has below the path, and nothing while that is none.
    Directory,
}

/// A path that is shown live. Its place in the list is its name in the root.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slot {
    /// The path in the payload; empty for all of it.
    pub path: String,
    /// Its type when a container first mounted it.
    pub shape: PartType,
}

/// An update, as it is announced.
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
    /// The image that the last update leads to.
    newest: Option<u64>,
    announced: VecDeque<LiveStep>,
    /// The number of steps applied since the mount.
    applied: u64,
    /// The last step of a server before this one, which the supervisor may repeat.
    asked_before: Option<LiveStep>,
    next: NodeId,
    time: SystemTime,
    /// Files that are about to show other bytes, while the kernel drops their pages.
    pub(super) changing: HashSet<NodeId>,
    /// A request for such a file waited for `SWAP_TIMEOUT` and was answered with the old bytes.
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
    /// The kernel's lookup count of the node (FUSE `nlookup`); unknown if earlier servers gave some of the answers.
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
            asked_before: None,
            next: NodeId(NodeId::ROOT.0 + 1),
            time,
            changing: HashSet::new(),
            disturbed: false,
        }
    }

    /// The paths that are shown, by their numbers.
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Sets the slots that the next plan makes or keeps.
    pub fn set_slots(&mut self, slots: Vec<Slot>) {
        self.slots = slots;
    }

    /// The image that the last update leads to, and its number.
    pub fn newest(&self) -> Option<(u64, &Arc<Image>)> {
        self.newest.and_then(|number| Some((number, self.images.get(&number)?)))
    }

    /// The steps that are announced and not taken.
    pub fn announced(&self) -> Vec<LiveStep> {
        self.announced.iter().cloned().collect()
    }

    /// Number of steps applied since it was mounted.
    pub fn applied(&self) -> u64 {
        self.applied
    }

    /// Announces these steps: the tree accepts them in this order. Earlier announcements are void.
    pub fn announce(&mut self, update: LiveUpdate) {
        let LiveUpdate { slots, steps, number, image, time } = update;
        if let Some(before) = self.images.insert(number, image) {
            // A supervisor that had no answer from a server before this one repeats it. It is the same memory.
            before.disown();
        }
        (self.slots, self.announced, self.newest, self.time) = (slots, steps.into(), Some(number), time);
        self.asked_before = None;
    }

    /// A step was done, as the caller knows, which made the system call.
    ///
    /// # Errors
    /// `EROFS` when it is not the next one.
    pub fn confirm(&mut self, step: &LiveStep) -> Result<(), Errno> {
        self.take_step(step)
    }

    /// As [`ProjectionTree::catch_up`](crate::projection::tree::ProjectionTree::catch_up).
    ///
    /// # Errors
    /// `EINVAL` when the two trees have nothing in common.
    pub fn catch_up(&mut self, applied: u64) -> Result<(), Errno> {
        if applied == self.applied {
            return Ok(());
        }
        let step = self.announced.front().filter(|_| applied == self.applied + 1).cloned().ok_or(Errno::EINVAL)?;
        self.take_step(&step)?;
        self.asked_before = Some(step);
        Ok(())
    }

    /// Takes the next step, unless an earlier server has taken it without an answer.
    pub(super) fn take(&mut self, step: &LiveStep) -> Result<(), Errno> {
        if self.asked_before.take_if(|before| before == step).is_some() {
            return Ok(());
        }
        self.take_step(step)?;
        self.asked_before = None;
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
        // The directory of a slot that the payload does not have looks like the others.
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

    /// Shows bytes and attributes of the newest image, as of this time if that is to be seen.
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

    /// Unlinked nodes that the kernel knows.
    pub fn unlinked(&self) -> Vec<NodeId> {
        self.nodes.iter().filter(|(_, node)| node.unlinked).map(|(id, _)| *id).collect()
    }

    /// Drops the unlinked nodes but these, in a replica.
    pub fn keep_unlinked(&mut self, known: &[NodeId]) {
        let known: BTreeSet<_> = known.iter().collect();
        self.nodes.retain(|id, node| !node.unlinked || known.contains(id));
    }

    /// An answer has shown a node to the kernel.
    pub(super) fn count(&mut self, node: NodeId) {
        if let Some(LiveNode { lookups: Some(told), .. }) = self.nodes.get_mut(&node) {
            *told += 1;
        }
    }

    /// The kernel dropped `count` references to a node.
    pub fn forget(&mut self, node: NodeId, count: u64) {
        let Some(known) = self.nodes.get_mut(&node) else { return };
        known.lookups = match known.lookups {
            Some(told) => Some(told.saturating_sub(count)),
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

    /// Drops the images that no node needs, but these.
    pub fn drop_images(&mut self, but: &[u64]) {
        let needed = self.needed_images();
        self.images.retain(|number, _| needed.contains(number) || but.contains(number));
    }

    /// The numbers of the images that nodes show bytes of, and of the one that the last update leads to.
    pub fn needed_images(&self) -> BTreeSet<u64> {
        let shown = self.nodes.values().filter_map(|node| match &node.body {
            LiveContent::File { image, .. } => Some(*image),
            LiveContent::Directory { .. } => None,
        });
        shown.chain(self.newest).collect()
    }

    /// Zeroes the images that no server needs any more; the server of the tree calls it.
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
