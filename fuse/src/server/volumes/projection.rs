//! Projections in the server: trees of generations, and the requests that change them.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::SystemTime;

use super::{ServedKind, ServedParts, ServedVolumes, ServerResources, copies, images, inconsistent_state};
use crate::audit::Audit;
use crate::projection::filesystem::{self, ProjectionFilesystem, SharedTree};
use crate::projection::steps::ProjectionStep;
use crate::projection::tree::saved::SavedTree;
use crate::projection::tree::{ProjectionTree, Root, StagedGeneration};
use crate::projection::undo::Undo;
use crate::projection::{GenerationName, Image};
use crate::protocol::{Reporting, ServerReply, VolumeBody, VolumeNumber};
use crate::region::VolumeKind;
use crate::session::Session;

/// Generations of files.
pub(in crate::server) struct ServedProjection {
    tree: SharedTree,
    reporting: Reporting,
}

impl ServedProjection {
    /// An empty projection.
    pub(in crate::server) fn new(root: Root, reporting: Reporting) -> Self {
        Self { tree: SharedTree::new(ProjectionTree::new(root, SystemTime::now())), reporting }
    }

    pub(super) fn restore(tree: SavedTree, reporting: Reporting, descriptors: Vec<OwnedFd>) -> io::Result<Self> {
        let tree = ProjectionTree::restore(tree, images(descriptors)?).ok_or_else(inconsistent_state)?;
        Ok(Self { tree: SharedTree::new(tree), reporting })
    }

    fn run(&self, session: Session, volume: &ServedParts, shared: &ServerResources) -> io::Result<()> {
        let (region, trace) = (Arc::clone(&volume.region), Arc::clone(&volume.trace));
        let audit = self.reporting.audit.clone();
        let audit = audit.map(|subject| Audit::new(subject, Arc::clone(&region), Arc::clone(&shared.output)));
        let undo = Undo::new(session.notifier());
        let filesystem = ProjectionFilesystem::new(self.tree.clone(), region, undo, trace, audit);
        // One thread: a projection's requests are short, and to wake a second CPU takes longer than the answer.
        self.tree.lock().own_images();
        session.labelled(volume.label()).run(Arc::new(filesystem), 1)
    }
}

impl ServedKind for ServedProjection {
    fn region_kind(&self) -> VolumeKind {
        VolumeKind::Projection
    }

    fn is_traced(&self) -> bool {
        self.reporting.trace
    }

    fn begin(&mut self, volume: &ServedParts, shared: &mut ServerResources) -> io::Result<ServerReply> {
        let wanted = filesystem::wanted(self.reporting.trace);
        let session = Session::open(volume.device.try_clone()?, wanted, Arc::clone(&volume.region))?;
        self.run(session, volume, shared)?;
        Ok(ServerReply::Done)
    }

    fn load(&mut self, volume: &ServedParts) -> io::Result<()> {
        let mut tree = self.tree.lock();
        tree.catch_up(volume.region.applied()).map_err(|_| inconsistent_state())?;
        if tree.has_lost_content() { Err(inconsistent_state()) } else { Ok(()) }
    }

    fn resume(&mut self, volume: &ServedParts, shared: &mut ServerResources) -> io::Result<()> {
        self.run(Session::resume(volume.device.try_clone()?, Arc::clone(&volume.region))?, volume, shared)
    }

    fn describe(&self) -> io::Result<(VolumeBody, Vec<OwnedFd>)> {
        let (tree, images) = self.tree.lock().save();
        Ok((VolumeBody::Projection { tree: Box::new(tree), reporting: self.reporting.clone() }, copies(images)?))
    }
}

impl ServedVolumes {
    /// Announces the next steps to a tree. Returns the thread of its session.
    pub(in crate::server) fn announce(
        &self,
        number: VolumeNumber,
        steps: Vec<ProjectionStep>,
        staged: Option<(GenerationName, OwnedFd)>,
        time: SystemTime,
    ) -> io::Result<Option<i32>> {
        let stage = |(name, image)| io::Result::Ok(StagedGeneration { name, image: Arc::new(Image::adopt(image)?) });
        let staged = staged.map(stage).transpose()?;
        let (volume, projection) = self.of_kind::<ServedProjection>(number)?;
        projection.tree.lock().announce(steps, staged, time);
        Ok(volume.region.session_thread())
    }

    /// Closes a generation. Returns the nodes that the kernel knows.
    pub(in crate::server) fn close(&self, number: VolumeNumber, generation: &GenerationName) -> io::Result<Vec<u32>> {
        let (_, projection) = self.of_kind::<ServedProjection>(number)?;
        Ok(projection.tree.lock().close_generation(generation.as_str())?)
    }
}
