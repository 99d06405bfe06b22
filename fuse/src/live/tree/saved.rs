//! Sends a tree of live parts to another process: to a successor, or to a supervisor that adopts the volume.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::{LiveContent, LiveNode, LiveTree, Slot};
use crate::live::step::LiveStep;
use crate::projection::image::Image;
use crate::session::NodeId;

/// A tree without its images. The message has the images as descriptors, in the order of their numbers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SavedLiveTree {
    slots: Vec<Slot>,
    nodes: Vec<(NodeId, LiveNode)>,
    images: Vec<u64>,
    newest: Option<u64>,
    announced: Vec<LiveStep>,
    applied: u64,
    next: NodeId,
    time: SystemTime,
}

impl LiveTree {
    /// The state for another process, and the images, in order.
    pub fn save(&self) -> (SavedLiveTree, Vec<Arc<Image>>) {
        let needed = self.needed_images();
        let (numbers, images) = self
            .images
            .iter()
            .filter(|(number, _)| needed.contains(number))
            .map(|(number, image)| (*number, Arc::clone(image)))
            .unzip();
        let saved = SavedLiveTree {
            slots: self.slots.clone(),
            nodes: self.nodes.iter().map(|(id, node)| (*id, node.clone())).collect(),
            images: numbers,
            newest: self.newest,
            announced: self.announced(),
            applied: self.applied,
            next: self.next,
            time: self.time,
        };
        (saved, images)
    }

    /// The tree from the state of another process; `None` if it is inconsistent. The supervisor does not trust a server.
    pub fn restore(saved: SavedLiveTree, images: Vec<Image>) -> Option<LiveTree> {
        let SavedLiveTree { slots, nodes, images: numbers, newest, announced, applied, next, time } = saved;
        if numbers.len() != images.len() {
            return None;
        }
        let images: BTreeMap<u64, Arc<Image>> = numbers.into_iter().zip(images.into_iter().map(Arc::new)).collect();
        let nodes: BTreeMap<NodeId, LiveNode> = nodes.into_iter().collect();
        let fits = |(id, node): (&NodeId, &LiveNode)| {
            let above = nodes.get(&node.parent).map(|parent| &parent.body);
            // A parent has a lower id than its children, so no path is a cycle.
            let is_in_directory = node.unlinked || matches!(above, Some(LiveContent::Directory { .. }));
            let is_below = *id == NodeId::ROOT || (node.parent < *id && is_in_directory);
            let is_whole = match &node.body {
                LiveContent::File { image, content } => images.get(image).is_some_and(|image| image.contains(content)),
                LiveContent::Directory { children } => children
                    .iter()
                    .all(|(name, child)| nodes.get(child).is_some_and(|node| node.parent == *id && node.name == *name)),
            };
            is_below && is_whole && *id < next
        };
        let is_whole = nodes.get(&NodeId::ROOT).is_some_and(|root| matches!(root.body, LiveContent::Directory { .. }))
            && nodes.iter().all(fits);
        let (announced, unanswered_step) = (announced.into(), None);
        let (changing, disturbed) = (HashSet::new(), false);
        let newest = newest.filter(|newest| images.contains_key(newest));
        is_whole.then_some(LiveTree {
            slots,
            nodes,
            images,
            newest,
            announced,
            applied,
            unanswered_step,
            next,
            time,
            changing,
            disturbed,
        })
    }
}
