//! The state that the supervisor holds of a volume, so that the server may die.
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
use crate::protocol::{Description, Reporting, VolumeBody, VolumeId};
use crate::region::{Region, VolumeKind};
use crate::session::ring_memory::RingMemory;

/// The state that the supervisor holds of a volume of one kind.
pub(crate) trait HeldKind: Any + Send + Sync {
    /// The kind that its region must have.
    fn region_kind(&self) -> VolumeKind;

    /// The source of its mounts, as mount tables show it.
    fn mount_source(&self) -> &'static str;

    /// Copies of the descriptors that every message about the volume comes with, after those of its [`HeldVolume`].
    ///
    /// # Errors
    /// When there are no descriptors left.
    fn descriptors(&self) -> io::Result<Vec<OwnedFd>> {
        Ok(Vec::new())
    }

    /// The state that a successor needs, and the images that belong to it.
    fn describe(&self) -> (VolumeBody, Vec<Arc<Image>>);

    /// Which of its requests are reported, for a projection.
    fn reporting(&self) -> Option<&Reporting> {
        None
    }

    /// Whether its region refers to descriptors of the server, which the keeper holds.
    fn has_open_files(&self) -> bool {
        false
    }

    /// The memory of its rings, if requests may come over io_uring.
    fn rings(&self) -> Option<&RingMemory> {
        None
    }
}

/// The state that the supervisor holds of a volume, from a server's description. Its sockets, if it has some, go to
/// `nfs_sockets`. The registry of kinds: a new one has a line here.
fn restore(body: VolumeBody, descriptors: Vec<OwnedFd>, nfs_sockets: &SocketSets) -> io::Result<Box<dyn HeldKind>> {
    Ok(match body {
        VolumeBody::Projection { tree, reporting } => Box::new(HeldProjection::restore(*tree, reporting, descriptors)?),
        VolumeBody::Live { of, tree } => Box::new(HeldLive::restore(of, *tree, descriptors)?),
        VolumeBody::Passthrough { options } => Box::new(HeldPassthrough::restore(options, descriptors)?),
        VolumeBody::Nfs { options } => Box::new(HeldExport::restore(options, descriptors, nfs_sockets)?),
    })
}

/// A volume's half of the supervisor.
pub(crate) struct HeldVolume {
    /// For the supervisor that adopts the volume.
    pub(crate) about: Value,
    /// Let go before the mount, while the server still has its own: the process that closes a source on another machine last may
    /// have to wait for that machine.
    kind: Box<dyn HeldKind>,
    /// None once the volume is given up: the kernel then ends all requests.
    device: Mutex<Option<OwnedFd>>,
    pub(crate) mount: PrivateMount,
    pub(crate) region: Arc<Region>,
}

impl HeldVolume {
    /// A volume on this device that no server has served yet.
    ///
    /// # Errors
    /// When there is no memory.
    pub(super) fn new(about: Value, device: OwnedFd, mount: PrivateMount, kind: impl HeldKind) -> io::Result<Self> {
        let region = Arc::new(Region::create(kind.region_kind())?);
        Ok(Self { about, kind: Box::new(kind), device: Mutex::new(Some(device)), mount, region })
    }

    /// The supervisor's half of a volume that a server has described. Its sockets, if it has some, go to `nfs_sockets`.
    ///
    /// # Errors
    /// When it does not fit together.
    pub(super) fn adopt(
        description: Description,
        descriptors: Vec<OwnedFd>,
        nfs_sockets: &SocketSets,
    ) -> io::Result<HeldVolume> {
        let Description { volume: _, about, body } = description;
        let mut descriptors = descriptors.into_iter();
        let mut next = || descriptors.next().ok_or_else(broken);
        let (device, mount, region) = (next()?, next()?, next()?);
        let kind = restore(body, descriptors.collect(), nfs_sockets)?;
        let region = Region::adopt(region).map_err(io::Error::other)?;
        if region.kind() != kind.region_kind() {
            return Err(broken());
        }
        let mount = PrivateMount::adopt(mount, kind.mount_source());
        Ok(Self { about, kind, device: Mutex::new(Some(device)), mount, region: Arc::new(region) })
    }

    /// Which kind it is of.
    pub(super) fn kind(&self) -> &dyn HeldKind {
        &*self.kind
    }

    /// Its state as a volume of kind `K`, if it is one.
    pub(super) fn of_kind<K: HeldKind>(&self) -> Option<&K> {
        let kind: &dyn Any = &*self.kind;
        kind.downcast_ref()
    }

    /// The threads that answer a request at this moment, each with the request's number.
    pub(super) fn busy(&self) -> Vec<(i32, u64)> {
        let of_rings = self.kind.rings().into_iter().flat_map(RingMemory::busy);
        self.region.in_flight().busy().chain(of_rings).collect()
    }

    /// The descriptors that every message about the volume has, and those of its kind.
    ///
    /// # Errors
    /// When there are no descriptors left, or the volume is given up.
    pub(super) fn descriptors(&self) -> io::Result<Vec<OwnedFd>> {
        let device = self.device();
        let device = device.as_ref().ok_or_else(|| io::Error::other("the volume is given up"))?;
        let own = [device.as_fd(), self.mount.as_fd(), self.region.as_fd()];
        let own = own.into_iter().map(|one| one.try_clone_to_owned());
        own.chain(self.kind.descriptors()?.into_iter().map(Ok)).collect()
    }

    /// The state that a successor needs, and the images that belong to it.
    pub(super) fn describe(&self, volume: VolumeId) -> (Description, Vec<Arc<Image>>) {
        let (body, images) = self.kind.describe();
        (Description { volume, about: self.about.clone(), body }, images)
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

    /// Whether each open is written down.
    pub(crate) fn is_audited(&self) -> bool {
        self.kind.reporting().is_some_and(|reporting| reporting.audit.is_some())
    }

    /// Whether each request of a projection is reported on standard output.
    pub(crate) fn is_traced(&self) -> bool {
        self.kind.reporting().is_some_and(|reporting| reporting.trace)
    }

    fn device(&self) -> MutexGuard<'_, Option<OwnedFd>> {
        self.device.lock().expect("a thread that panics ends the process")
    }
}

/// The supervisor's copy of a tree of the server, as far as steps are known to be done. Locked for moments, never during a
/// system call on the mount.
pub(super) struct Replica<T>(Arc<Mutex<T>>);

impl<T> Replica<T> {
    fn new(tree: T) -> Self {
        Self(Arc::new(Mutex::new(tree)))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().expect("a thread that panics ends the process")
    }
}

impl<T> Clone for Replica<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

/// Images that a server serves, which zeroes them.
fn images(descriptors: Vec<OwnedFd>) -> io::Result<Vec<Image>> {
    let images = descriptors.into_iter().map(Image::adopt).collect::<io::Result<Vec<_>>>()?;
    images.iter().for_each(Image::disown);
    Ok(images)
}

fn broken() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the server describes a volume that cannot be")
}
