//! Live parts of projections in the server, and the requests that change them.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::SystemTime;

use super::{ServedKind, ServedParts, ServedVolumes, ServerResources, copies, images, inconsistent_state};
use crate::live::filesystem::{LiveFilesystem, SharedLiveTree, wanted};
use crate::live::tree::{LiveTree, LiveUpdate, SavedLiveTree};
use crate::projection::Image;
use crate::projection::undo::Undo;
use crate::protocol::{ServerReply, VolumeBody, VolumeNumber};
use crate::region::VolumeKind;
use crate::session::{NodeId, Notifier, Session};

/// Live parts of one projection.
pub(in crate::server) struct LiveParts {
    of: VolumeNumber,
    tree: SharedLiveTree,
    is_traced: bool,
    /// The sender of notifications to the kernel, after the start of the session.
    notifier: Option<Notifier>,
}

impl LiveParts {
    /// No parts yet, of the projection `of`.
    pub(in crate::server) fn new(of: VolumeNumber, is_traced: bool) -> Self {
        Self { of, tree: SharedLiveTree::new(LiveTree::new(SystemTime::now())), is_traced, notifier: None }
    }

    pub(super) fn restore(of: VolumeNumber, tree: SavedLiveTree, descriptors: Vec<OwnedFd>) -> io::Result<Self> {
        let images = images(descriptors)?;
        if images.iter().any(Image::is_zeroed) {
            return Err(inconsistent_state());
        }
        let tree = LiveTree::restore(tree, images).ok_or_else(inconsistent_state)?;
        Ok(Self { of, tree: SharedLiveTree::new(tree), is_traced: false, notifier: None })
    }

    /// Starts the session, with one thread, like a projection.
    fn run(&mut self, session: Session, volume: &ServedParts) -> io::Result<()> {
        self.tree.lock().own_images();
        let undo = Undo::new(self.notifier.insert(session.notifier()).clone());
        let (region, trace) = (Arc::clone(&volume.region), Arc::clone(&volume.trace));
        let filesystem = LiveFilesystem::new(self.tree.clone(), region, undo, trace);
        session.labelled(volume.label()).run(Arc::new(filesystem), 1)
    }
}

impl ServedKind for LiveParts {
    fn region_kind(&self) -> VolumeKind {
        VolumeKind::Live
    }

    fn is_traced(&self) -> bool {
        self.is_traced
    }

    fn begin(&mut self, volume: &ServedParts, _: &mut ServerResources) -> io::Result<ServerReply> {
        self.run(
            Session::open(volume.device.try_clone()?, wanted(self.is_traced), Arc::clone(&volume.region))?,
            volume,
        )?;
        Ok(ServerReply::Done)
    }

    fn load(&mut self, volume: &ServedParts) -> io::Result<()> {
        self.tree.lock().catch_up(volume.region.applied()).map_err(|_| inconsistent_state())
    }

    fn resume(&mut self, volume: &ServedParts, _: &mut ServerResources) -> io::Result<()> {
        self.run(Session::resume(volume.device.try_clone()?, Arc::clone(&volume.region))?, volume)
    }

    fn describe(&self) -> io::Result<(VolumeBody, Vec<OwnedFd>)> {
        let (tree, images) = self.tree.lock().save();
        Ok((VolumeBody::Live { of: self.of, tree: Box::new(tree) }, copies(images)?))
    }
}

impl ServedVolumes {
    /// Announces the next steps to the tree of live parts. Returns its unlinked nodes that the kernel knows.
    pub(in crate::server) fn update(&self, number: VolumeNumber, update: LiveUpdate) -> io::Result<Vec<NodeId>> {
        let (_, live) = self.of_kind::<LiveParts>(number)?;
        let mut tree = live.tree.lock();
        tree.announce(update);
        Ok(tree.unlinked())
    }

    /// Zeroes images of live parts that no server needs.
    pub(in crate::server) fn drop_images(&self, number: VolumeNumber, but: &[u64]) -> io::Result<()> {
        let (_, live) = self.of_kind::<LiveParts>(number)?;
        live.tree.lock().drop_images(but);
        Ok(())
    }

    /// Applies a step of live parts for which there is no system call.
    pub(in crate::server) fn take(&self, number: VolumeNumber, applied: u64) -> io::Result<()> {
        let (volume, live) = self.of_kind::<LiveParts>(number)?;
        Ok(live.tree.take(applied, &volume.region, live.notifier.as_ref())?)
    }
}
