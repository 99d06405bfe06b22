//! The state that the supervisor holds of a volume. A server's successor starts with it.
//!
//! Each kind of volume has a file here. [`restore`] lists the kinds.
//!
//! | module | owns |
//! |---|---|
//! | `projection` | the replica of a projection's tree |
//! | `live` | the replica of the tree of live parts |
//! | `passthrough` | a source of the host |
//! | `nfs` | an NFS export: its log and sockets |

mod live;
mod nfs;
mod passthrough;
mod projection;

use std::any::Any;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};

use serde_json::Value;

pub(super) use live::HeldLive;
pub(super) use nfs::HeldExport;
pub(super) use passthrough::HeldPassthrough;
pub(super) use projection::HeldProjection;

use crate::mount::MountError;
use crate::mount::private::PrivateMount;
use crate::nfs::sockets::SocketSets;
use crate::projection::Image;
use crate::protocol::{Reporting, VolumeBody, VolumeDescription, VolumeNumber};
use crate::region::{Region, VolumeKind};
use crate::session::ring_memory::RingMemory;

/// The state that the supervisor holds of a volume of one kind.
pub(crate) trait HeldKind: Any + Send + Sync {
    /// The kind that its region must have.
    fn region_kind(&self) -> VolumeKind;

    /// The source of its mounts, as mount tables show it.
    fn mount_source(&self) -> &'static str;

    /// Copies of the kind's descriptors in each message about the volume. They follow those of the [`HeldVolume`].
    ///
    /// # Errors
    /// When there are no descriptors left.
    fn descriptors(&self) -> io::Result<Vec<OwnedFd>> {
        Ok(Vec::new())
    }

    /// The state for a successor, and its images.
    fn describe(&self) -> (VolumeBody, Vec<Arc<Image>>);

    /// The reporting of requests; only projections have one.
    fn reporting(&self) -> Option<&Reporting> {
        None
    }

    /// Whether its region refers to descriptors of the server. The keeper has copies of them.
    fn has_open_files(&self) -> bool {
        false
    }

    /// The memory of its rings, if it may use io_uring.
    fn rings(&self) -> Option<&RingMemory> {
        None
    }
}

/// Makes the state of a volume from a server's description. Adds its NFS sockets, if it has any, to `nfs_sockets`. Each kind
/// needs a line here.
fn restore(body: VolumeBody, descriptors: Vec<OwnedFd>, nfs_sockets: &SocketSets) -> io::Result<Box<dyn HeldKind>> {
    Ok(match body {
        VolumeBody::Projection { tree, reporting } => Box::new(HeldProjection::restore(*tree, reporting, descriptors)?),
        VolumeBody::Live { of, tree } => Box::new(HeldLive::restore(of, *tree, descriptors)?),
        VolumeBody::Passthrough { options } => Box::new(HeldPassthrough::restore(options, descriptors)?),
        VolumeBody::Nfs { options } => Box::new(HeldExport::restore(options, descriptors, nfs_sockets)?),
    })
}

/// The supervisor's state of a volume.
pub(crate) struct HeldVolume {
    /// The record for the supervisor that adopts the volume.
    pub(crate) about: Value,
    /// Dropped before `mount`, while the server still has its copies: the last process that closes a source on another machine
    /// may have to wait for that machine.
    kind: Box<dyn HeldKind>,
    /// `None` after [`Self::give_up`].
    device: Mutex<Option<OwnedFd>>,
    pub(crate) mount: PrivateMount,
    pub(crate) region: Arc<Region>,
}

impl HeldVolume {
    /// A volume on this device, before its first server.
    ///
    /// # Errors
    /// When there is no memory.
    pub(super) fn new(about: Value, device: OwnedFd, mount: PrivateMount, kind: impl HeldKind) -> io::Result<Self> {
        let region = Arc::new(Region::create(kind.region_kind())?);
        Ok(Self { about, kind: Box::new(kind), device: Mutex::new(Some(device)), mount, region })
    }

    /// The state of a volume that a server describes. Adds its NFS sockets, if it has any, to `nfs_sockets`.
    ///
    /// # Errors
    /// When descriptors are missing, or the description and the region differ.
    pub(super) fn adopt(
        description: VolumeDescription,
        descriptors: Vec<OwnedFd>,
        nfs_sockets: &SocketSets,
    ) -> io::Result<HeldVolume> {
        let VolumeDescription { volume: _, about, body } = description;
        let mut descriptors = descriptors.into_iter();
        let mut next = || descriptors.next().ok_or_else(impossible_volume);
        let (device, mount, region) = (next()?, next()?, next()?);
        let kind = restore(body, descriptors.collect(), nfs_sockets)?;
        let region = Region::adopt(region)?;
        if region.kind() != kind.region_kind() {
            return Err(impossible_volume());
        }
        let mount = PrivateMount::adopt(mount, kind.mount_source());
        Ok(Self { about, kind, device: Mutex::new(Some(device)), mount, region: Arc::new(region) })
    }

    /// The state of its kind.
    pub(super) fn kind(&self) -> &dyn HeldKind {
        &*self.kind
    }

    /// The state of its kind, if that is `K`.
    pub(super) fn of_kind<K: HeldKind>(&self) -> Option<&K> {
        let kind: &dyn Any = &*self.kind;
        kind.downcast_ref()
    }

    /// The ids of the threads that answer a request now, each with the request's number.
    pub(super) fn busy(&self) -> Vec<(i32, u64)> {
        let of_rings = self.kind.rings().into_iter().flat_map(RingMemory::busy);
        self.region.in_flight().busy().chain(of_rings).collect()
    }

    /// Copies of the descriptors in each message about the volume, with those of its kind.
    ///
    /// # Errors
    /// When there are no descriptors left, or the volume was given up.
    pub(super) fn descriptors(&self) -> io::Result<Vec<OwnedFd>> {
        let device = self.device();
        let device = device.as_ref().ok_or_else(|| io::Error::other("the volume is given up"))?;
        let own = [device.as_fd(), self.mount.as_fd(), self.region.as_fd()];
        let own = own.into_iter().map(|one| one.try_clone_to_owned());
        own.chain(self.kind.descriptors()?.into_iter().map(Ok)).collect()
    }

    /// The state for a successor, and its images.
    pub(super) fn describe(&self, volume: VolumeNumber) -> (VolumeDescription, Vec<Arc<Image>>) {
        let (body, images) = self.kind.describe();
        (VolumeDescription { volume, about: self.about.clone(), body }, images)
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
            // Before Linux 6.15, a detached mount can be cloned only once.
            Err(error) if error.is_invalid() => match device() {
                Some(device) => clone(&self.mount.mount_again(device.as_fd())?),
                None => Err(error),
            },
            cloned => cloned,
        }
    }

    /// Closes the device, because no server can continue with the volume. The kernel ends all requests, and users get `ENOTCONN`.
    pub(super) fn give_up(&self) {
        drop(self.device().take());
    }

    /// Whether the volume was [given up](Self::give_up).
    pub(crate) fn is_given_up(&self) -> bool {
        self.device().is_none()
    }

    /// Whether the volume has an access log.
    pub(crate) fn is_audited(&self) -> bool {
        self.kind.reporting().is_some_and(|reporting| reporting.audit.is_some())
    }

    /// Whether the server reports each request on standard output.
    pub(crate) fn is_traced(&self) -> bool {
        self.kind.reporting().is_some_and(|reporting| reporting.trace)
    }

    fn device(&self) -> MutexGuard<'_, Option<OwnedFd>> {
        self.device.lock().expect("a thread that panics ends the process")
    }
}

/// The supervisor's copy of a tree of the server, up to the last confirmed step. No thread holds the lock during a system call
/// on the mount.
pub(super) struct TreeReplica<T>(Arc<Mutex<T>>);

impl<T> TreeReplica<T> {
    fn new(tree: T) -> Self {
        Self(Arc::new(Mutex::new(tree)))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().expect("a thread that panics ends the process")
    }
}

impl<T> Clone for TreeReplica<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

/// The images of a server. Only the server zeroes them.
fn images(descriptors: Vec<OwnedFd>) -> io::Result<Vec<Image>> {
    // At once: an error about one of them drops the others.
    descriptors.into_iter().map(|file| Image::adopt(file).inspect(Image::disown)).collect()
}

fn impossible_volume() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the server describes a volume that cannot be")
}
