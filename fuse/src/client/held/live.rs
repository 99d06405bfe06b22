//! The state that the supervisor holds of the live parts of a projection. Their mount and updates are in
//! [`live`](crate::client::live).

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::SystemTime;

use super::{HeldKind, TreeReplica, images, impossible_volume};
use crate::live::tree::{LiveTree, SavedLiveTree};
use crate::mount::private::PROJECTION_SOURCE;
use crate::projection::Image;
use crate::protocol::{VolumeBody, VolumeNumber};
use crate::region::VolumeKind;

/// Live parts of a projection.
pub(in crate::client) struct HeldLive {
    of: VolumeNumber,
    tree: TreeReplica<LiveTree>,
}

impl HeldLive {
    /// No parts yet, of the projection `of`.
    pub(in crate::client) fn new(of: VolumeNumber) -> Self {
        Self { of, tree: TreeReplica::new(LiveTree::new(SystemTime::now())) }
    }

    pub(super) fn restore(of: VolumeNumber, tree: SavedLiveTree, descriptors: Vec<OwnedFd>) -> io::Result<Self> {
        let tree = LiveTree::restore(tree, images(descriptors)?).ok_or_else(impossible_volume)?;
        Ok(Self { of, tree: TreeReplica::new(tree) })
    }

    /// The projection.
    pub(in crate::client) fn projection(&self) -> VolumeNumber {
        self.of
    }

    /// The tree, for the updates.
    pub(in crate::client) fn tree(&self) -> TreeReplica<LiveTree> {
        self.tree.clone()
    }
}

impl HeldKind for HeldLive {
    fn region_kind(&self) -> VolumeKind {
        VolumeKind::Live
    }

    fn mount_source(&self) -> &'static str {
        PROJECTION_SOURCE
    }

    fn describe(&self) -> (VolumeBody, Vec<Arc<Image>>) {
        let (tree, images) = self.tree.lock().save();
        (VolumeBody::Live { of: self.of, tree: Box::new(tree) }, images)
    }
}
