//! Sends a tree to another process: to a successor, or to a supervisor that adopts the volume.
//!
//! The message has the images as descriptors. The supervisor does not trust a server: it refuses an inconsistent tree.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::super::generation::GenerationName;
use super::super::image::Image;
use super::super::steps::{DATA, DATA_TMP, ProjectionStep};
use super::attached::{AttachedGeneration, SavedGeneration};
use super::{LookupCount, NodeId, NodeKind, ProjectionTree, Root, StagedGeneration, TreeLink};

/// A tree without its images.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SavedTree {
    root: Root,
    created: SystemTime,
    time: SystemTime,
    next: u64,
    applied: u64,
    links: Vec<SavedLink>,
    generations: Vec<SavedGeneration>,
    /// The first nodes of the generations that have a name in the root.
    named: Vec<u64>,
    staged: Option<GenerationName>,
    announced: Vec<ProjectionStep>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct SavedLink {
    node: NodeId,
    name: String,
    target: String,
    uid: u32,
    time: SystemTime,
    unlinked: bool,
}

impl SavedTree {
    /// The number of its images.
    pub fn images(&self) -> usize {
        self.generations.len() + usize::from(self.staged.is_some())
    }
}

impl ProjectionTree {
    /// The state for another process, and the images, in order.
    pub fn save(&self) -> (SavedTree, Vec<Arc<Image>>) {
        let links = self.links.iter().map(|(node, link)| SavedLink {
            node: *node,
            name: link.name.clone(),
            target: link.target.clone(),
            uid: link.uid,
            time: link.time,
            unlinked: link.unlinked,
        });
        let named = |base: &&u64| self.entries.after(0).any(|(_, entry)| entry.node.0 == **base);
        let saved = SavedTree {
            root: self.root.clone(),
            created: self.created,
            time: self.time,
            next: self.next,
            applied: self.applied,
            links: links.collect(),
            generations: self.generations.values().map(AttachedGeneration::save).collect(),
            named: self.generations.keys().filter(named).copied().collect(),
            staged: self.staged.as_ref().map(|staged| staged.name.clone()),
            announced: self.announced.iter().cloned().collect(),
        };
        let staged = self.staged.iter().map(|staged| Arc::clone(&staged.image));
        (saved, self.generations.values().map(AttachedGeneration::image).chain(staged).collect())
    }

    /// The tree from the state of another process; `None` if it is inconsistent.
    pub fn restore(saved: SavedTree, images: Vec<Image>) -> Option<ProjectionTree> {
        let count = saved.images();
        let SavedTree { root, created, time, next, applied, links, generations, named, staged, announced } = saved;
        let mut tree = ProjectionTree::new(root, created);
        let first = tree.next;
        if images.len() != count || next < first {
            return None;
        }
        let mut images = images.into_iter().map(Arc::new);
        let mut taken = BTreeMap::new();
        for (generation, image) in generations.into_iter().zip(images.by_ref()) {
            taken.insert(generation.base, u64::from(image.nodes()));
            tree.generations.insert(generation.base, AttachedGeneration::restore(generation, image));
        }
        tree.staged = staged.zip(images.next()).map(|(name, image)| StagedGeneration { name, image });
        for link in links {
            let SavedLink { node, name, target, uid, time, unlinked } = link;
            taken.insert(node.0, 1);
            tree.links.insert(node, TreeLink { name, target, uid, time, lookups: LookupCount::Unknown, unlinked });
        }
        if taken.len() != tree.generations.len() + tree.links.len() || !fits(&taken, first, next) {
            return None;
        }
        for base in named {
            let name = tree.generations.get(&base)?.name().to_string();
            tree.name(&name, NodeId(base), NodeKind::Directory)?;
        }
        let shown = tree.links.iter().filter(|(_, link)| !link.unlinked);
        let shown: HashMap<_, _> = shown.map(|(node, link)| (*node, link.name.clone())).collect();
        for (node, name) in shown {
            tree.name(&name, node, NodeKind::Link)?;
        }
        (tree.time, tree.next, tree.applied, tree.announced) = (time, next, applied, announced.into());
        Some(tree)
    }

    /// Makes this process the owner of all images, so that it zeroes them when it drops them. Only the server of the tree does
    /// this.
    pub fn own_images(&self) {
        self.generations.values().for_each(|generation| generation.image().own());
        self.staged.iter().for_each(|staged| staged.image.own());
    }

    /// Whether a generation with a name has lost its content. The server of a tree zeroes a generation when it has applied the step
    /// that removes the name, which may be before the supervisor has its answer.
    pub fn has_lost_content(&self) -> bool {
        let mut named =
            self.generations.values().filter(|generation| self.entries.find(generation.name().as_str()).is_some());
        named.any(|generation| generation.image().is_zeroed())
    }

    /// Drops generations that the kernel has forgotten, and unlinked links, in a tree for which another process counts lookups.
    pub fn prune(&mut self) {
        self.prune_generations();
        self.links.retain(|_, link| !link.unlinked);
    }

    /// Drops generations that the kernel has forgotten. The process that counts lookups has dropped them, too, and zeroed them.
    pub fn prune_generations(&mut self) {
        self.generations.retain(|_, generation| !generation.is_over());
    }

    /// The image of the generation that `..data` points to, and its name.
    pub fn current(&self) -> Option<(GenerationName, Arc<Image>)> {
        let link = self.links.get(&self.entries.find(DATA)?.node)?;
        let generation = self.generations.get(&self.entries.find(&link.target)?.node.0)?;
        Some((generation.name().clone(), generation.image()))
    }

    /// The generations with a name in the root, without the current one, in the order in which they were made.
    pub fn old(&self) -> Vec<(GenerationName, Arc<Image>)> {
        let current = self.current().map(|(name, _)| name);
        let named =
            self.generations.values().filter(|generation| self.entries.find(generation.name().as_str()).is_some());
        let old = named.filter(|generation| Some(generation.name()) != current.as_ref());
        old.map(|generation| (generation.name().clone(), generation.image())).collect()
    }

    /// The attributes and fixed directories of the root.
    pub fn root(&self) -> &Root {
        &self.root
    }

    fn name(&mut self, name: &str, node: NodeId, kind: NodeKind) -> Option<()> {
        let may_have_name = kind == NodeKind::Link || (name != DATA && name != DATA_TMP);
        (may_have_name && self.entries.find(name).is_none()).then(|| self.entries.insert(name, node, kind))
    }
}

/// Whether blocks of node ids, each with its length, are between `first` and `next` and do not overlap.
fn fits(taken: &BTreeMap<u64, u64>, first: u64, next: u64) -> bool {
    let end = taken
        .iter()
        .try_fold(first, |free, (start, length)| (*start >= free).then(|| start.checked_add(*length)).flatten());
    end.is_some_and(|end| end <= next)
}
