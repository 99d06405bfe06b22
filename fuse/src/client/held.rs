//! What the supervisor holds of a volume, so that the server may die.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};

use serde_json::Value;

use crate::live::tree::LiveTree;
use crate::mount::MountError;
use crate::mount::private::{NFS_SOURCE, PASSTHROUGH_SOURCE, PROJECTION_SOURCE, PrivateMount};
use crate::mount::table::MountTable;
use crate::nfs;
use crate::nfs::sockets::{SocketSets, Sockets};
use crate::passthrough::Options;
use crate::projection::Image;
use crate::projection::tree::Tree;
use crate::protocol::{Body, Description, Reporting, VolumeId};
use crate::region::{Kind, Region};

/// A volume's half of the supervisor.
pub(crate) struct Held {
    /// For the supervisor that adopts the volume.
    pub(crate) about: Value,
    /// Let go before the mount, while the server still has its own: the process that closes a source on another machine last may
    /// have to wait for that machine.
    pub(crate) content: Content,
    /// None once the volume is given up: the kernel then ends all requests.
    device: Mutex<Option<OwnedFd>>,
    pub(crate) mount: PrivateMount,
    pub(crate) region: Arc<Region>,
}

/// What is served.
pub(crate) enum Content {
    /// Generations of files.
    Projection {
        /// The tree as far as steps are known to be done. Locked for moments, never during a system call on the mount.
        tree: Box<Mutex<Tree>>,
        /// Which of its requests are reported.
        reporting: Reporting,
    },
    /// A source of the host.
    Passthrough {
        /// The source.
        source: OwnedFd,
        /// The mounts that it is among.
        table: MountTable,
        /// How it is served.
        options: Options,
    },
    /// An export of an NFS server.
    Nfs {
        /// The file of its log.
        log: OwnedFd,
        /// Those of its connections.
        sockets: Sockets,
        /// How it is served, as far as [`Sockets::current`] does not say otherwise.
        options: Box<nfs::options::Options>,
    },
    /// Live parts of a projection.
    Live {
        /// The projection.
        of: VolumeId,
        /// The tree as far as steps are known to be done. Locked for moments, never during a system call on the mount.
        tree: Box<Mutex<LiveTree>>,
    },
}

impl Held {
    /// A volume on this device.
    pub(super) fn new(about: Value, device: OwnedFd, mount: PrivateMount, region: Region, content: Content) -> Self {
        Self { about, device: Mutex::new(Some(device)), mount, region: Arc::new(region), content }
    }

    /// What every message about the volume comes with, and what belongs to its content.
    ///
    /// # Errors
    /// When there are no descriptors left, or the volume is given up.
    pub(super) fn descriptors(&self) -> io::Result<Vec<OwnedFd>> {
        let device = self.device();
        let device = device.as_ref().ok_or_else(|| io::Error::other("the volume is given up"))?;
        let own = [device.as_fd(), self.mount.as_fd(), self.region.as_fd()];
        let (more, copies) = match &self.content {
            Content::Projection { .. } | Content::Live { .. } => (Vec::new(), Vec::new()),
            Content::Passthrough { source, table, .. } => (vec![source.as_fd(), table.as_fd()], Vec::new()),
            Content::Nfs { log, sockets, .. } => (vec![log.as_fd()], sockets.copies()?),
        };
        let own = own.into_iter().chain(more).map(|one| one.try_clone_to_owned());
        own.chain(copies.into_iter().map(Ok)).collect()
    }

    /// A clone of the private mount, as `clone` makes it.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(super) fn clone_mount(
        &self,
        clone: impl Fn(&PrivateMount) -> Result<OwnedFd, MountError>,
    ) -> Result<OwnedFd, MountError> {
        let device = || self.device().as_ref().and_then(|device| device.try_clone().ok());
        match clone(&self.mount) {
            // Before Linux 6.15 a detached mount can be cloned once only.
            Err(error) if error.is_invalid() => match device() {
                Some(device) => clone(&self.mount.again(device.as_fd())?),
                None => Err(error),
            },
            cloned => cloned,
        }
    }

    /// No server can go on with the volume: its users get `ENOTCONN`, and another mount may take its place.
    pub(super) fn give_up(&self) {
        drop(self.device().take());
    }

    /// Whether no server can go on with the volume.
    pub(crate) fn is_given_up(&self) -> bool {
        self.device().is_none()
    }

    fn device(&self) -> MutexGuard<'_, Option<OwnedFd>> {
        self.device.lock().expect("a thread that panics ends the process")
    }

    /// Whether each open is written down.
    pub(crate) fn is_audited(&self) -> bool {
        matches!(&self.content, Content::Projection { reporting: Reporting { audit: Some(_), .. }, .. })
    }

    /// Whether each request of a projection is reported on standard output.
    pub(crate) fn is_traced(&self) -> bool {
        matches!(&self.content, Content::Projection { reporting: Reporting { trace: true, .. }, .. })
    }

    /// The tree of a projection.
    pub(crate) fn tree(&self) -> MutexGuard<'_, Tree> {
        match &self.content {
            Content::Projection { tree, .. } => tree.lock().expect("a thread that panics ends the process"),
            _ => unreachable!("only projections are committed"),
        }
    }

    /// The tree of live parts.
    pub(crate) fn live_tree(&self) -> MutexGuard<'_, LiveTree> {
        match &self.content {
            Content::Live { tree, .. } => tree.lock().expect("a thread that panics ends the process"),
            _ => unreachable!("only live parts are updated"),
        }
    }

    /// What a successor needs to know, and the images that belong to it.
    pub(super) fn describe(&self, volume: VolumeId) -> (Description, Vec<Arc<Image>>) {
        let (body, images) = match &self.content {
            Content::Projection { reporting, .. } => {
                let mut tree = self.tree();
                // No successor can serve the generations that the dead server has zeroed.
                tree.prune_generations();
                let (tree, images) = tree.save();
                (Body::Projection { tree: Box::new(tree), reporting: reporting.clone() }, images)
            }
            Content::Live { of, .. } => {
                let (tree, images) = self.live_tree().save();
                (Body::Live { of: *of, tree: Box::new(tree) }, images)
            }
            Content::Passthrough { options, .. } => (Body::Passthrough { options: options.clone() }, Vec::new()),
            Content::Nfs { options, sockets, .. } => {
                (Body::Nfs { options: Box::new(sockets.current(options)) }, Vec::new())
            }
        };
        (Description { volume, about: self.about.clone(), body }, images)
    }

    /// The supervisor's half of a volume that a server has described. Its sockets, if it has some, go to `nfs_sockets`.
    ///
    /// # Errors
    /// When it does not fit together.
    pub(super) fn adopt(
        description: Description,
        descriptors: Vec<OwnedFd>,
        nfs_sockets: &SocketSets,
    ) -> io::Result<Held> {
        let broken = || io::Error::new(io::ErrorKind::InvalidData, "the server describes a volume that cannot be");
        let Description { volume: _, about, body } = description;
        let mut descriptors = descriptors.into_iter();
        let mut next = || descriptors.next().ok_or_else(broken);
        let (device, mount, region) = (next()?, next()?, next()?);
        let (kind, content) = match body {
            Body::Projection { tree, reporting } => {
                let tree = Tree::restore(*tree, images(descriptors)?).ok_or_else(broken)?;
                (Kind::Projection, Content::Projection { tree: Box::new(Mutex::new(tree)), reporting })
            }
            Body::Live { of, tree } => {
                let tree = LiveTree::restore(*tree, images(descriptors)?).ok_or_else(broken)?;
                (Kind::Live, Content::Live { of, tree: Box::new(Mutex::new(tree)) })
            }
            Body::Passthrough { options } => {
                let (source, table) = (next()?, next()?.into());
                (Kind::Passthrough, Content::Passthrough { source, table, options })
            }
            Body::Nfs { options } => {
                let log = next()?;
                let sockets = nfs_sockets.adopt(&options, descriptors.collect())?;
                (Kind::Nfs, Content::Nfs { log, sockets, options })
            }
        };
        let region = Region::adopt(region).map_err(io::Error::other)?;
        if region.kind() != kind {
            return Err(broken());
        }
        let source = match kind {
            Kind::Projection | Kind::Live => PROJECTION_SOURCE,
            Kind::Passthrough => PASSTHROUGH_SOURCE,
            Kind::Nfs => NFS_SOURCE,
        };
        Ok(Held::new(about, device, PrivateMount::adopt(mount, source), region, content))
    }
}

/// Images that a server serves, which zeroes them.
fn images(descriptors: impl Iterator<Item = OwnedFd>) -> io::Result<Vec<Image>> {
    let images = descriptors.map(Image::adopt).collect::<io::Result<Vec<_>>>()?;
    images.iter().for_each(Image::disown);
    Ok(images)
}
