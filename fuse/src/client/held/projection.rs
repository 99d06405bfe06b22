//! The state that the supervisor holds of a projection. Its mounts and commits are in [`projection`](crate::client::projection).

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::SystemTime;

use super::{HeldKind, TreeReplica, images, impossible_volume};
use crate::mount::private::PROJECTION_SOURCE;
use crate::projection::Image;
use crate::projection::tree::saved::SavedTree;
use crate::projection::tree::{ProjectionTree, Root};
use crate::protocol::{Reporting, VolumeBody};
use crate::region::VolumeKind;

/// Generations of files.
pub(in crate::client) struct HeldProjection {
    tree: TreeReplica<ProjectionTree>,
    reporting: Reporting,
}

impl HeldProjection {
    /// An empty projection.
    pub(in crate::client) fn new(root: Root, reporting: Reporting) -> Self {
        Self { tree: TreeReplica::new(ProjectionTree::new(root, SystemTime::now())), reporting }
    }

    pub(super) fn restore(tree: SavedTree, reporting: Reporting, descriptors: Vec<OwnedFd>) -> io::Result<Self> {
        let tree = ProjectionTree::restore(tree, images(descriptors)?).ok_or_else(impossible_volume)?;
        Ok(Self { tree: TreeReplica::new(tree), reporting })
    }

    /// The tree, for the commits.
    pub(in crate::client) fn tree(&self) -> TreeReplica<ProjectionTree> {
        self.tree.clone()
    }
}

impl HeldKind for HeldProjection {
    fn region_kind(&self) -> VolumeKind {
        VolumeKind::Projection
    }

    fn mount_source(&self) -> &'static str {
        PROJECTION_SOURCE
    }

    fn describe(&self) -> (VolumeBody, Vec<Arc<Image>>) {
        let mut tree = self.tree.lock();
        // The dead server has zeroed the old generations, so no successor can serve them.
        tree.prune_generations();
        let (tree, images) = tree.save();
        (VolumeBody::Projection { tree: Box::new(tree), reporting: self.reporting.clone() }, images)
    }

    fn reporting(&self) -> Option<&Reporting> {
        Some(&self.reporting)
    }
}
