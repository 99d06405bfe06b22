//! The supervisor's handle of a mounted volume of any kind.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde_json::Value;

use super::held::{HeldKind, HeldPassthrough, HeldVolume};
use super::{ServerClient, VolumeObserver};
use crate::mount::MountError;
use crate::mount::point::MountPoint;
use crate::mount::private::{ContainerAccess, MountPointType, PrivateMount};
use crate::mount::visible::VisibleMount;
use crate::passthrough::DataPath;
use crate::protocol::{ServerReply, ServerRequest, VolumeNumber};
use crate::region::VolumeKind;
use crate::session::ring_memory::RingMemory;

/// A mounted volume with a server. When this is dropped, the server forgets the volume, and its private mount ends.
pub struct MountedVolume {
    pub(super) server: Arc<ServerClient>,
    pub(super) volume: VolumeNumber,
    pub(super) held: Arc<HeldVolume>,
}

impl MountedVolume {
    /// Makes a volume, and makes the server serve it. If the server dies before its answer, no successor gets the volume, and this
    /// fails.
    ///
    /// # Errors
    /// When the server is gone, the kernel's handshake fails, or the server cannot read the source.
    pub(super) fn begin(
        server: &Arc<ServerClient>,
        device: OwnedFd,
        mount: PrivateMount,
        about: Value,
        kind: impl HeldKind,
        request: impl FnOnce(VolumeNumber, Value) -> ServerRequest,
    ) -> io::Result<(MountedVolume, ServerReply)> {
        let held = HeldVolume::new(about, device, mount, kind)?;
        let connection = server.connection()?;
        let _joining = server.joining.lock().expect("a thread that panics ends the process");
        let volume = VolumeNumber(server.next.fetch_add(1, Ordering::Relaxed));
        let descriptors = held.descriptors()?;
        let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        let (reply, _) = connection.ask(&request(volume, held.about.clone()), &descriptors)?;
        let held = Arc::new(held);
        server.volumes().insert(volume, Arc::clone(&held));
        Ok((MountedVolume { server: Arc::clone(server), volume, held }, reply))
    }

    /// The kind of the volume.
    pub fn kind(&self) -> VolumeKind {
        self.held.region.kind()
    }

    /// Whether no successor could take over the volume after its server died. The caller has to mount it again.
    pub fn is_given_up(&self) -> bool {
        self.held.is_given_up()
    }

    /// Shows the volume at `point`.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn show(&self, point: &MountPoint, access: ContainerAccess) -> Result<VisibleMount, MountError> {
        let clone = match access {
            ContainerAccess::ReadOnly => self.held.clone_mount(PrivateMount::read_only_clone)?,
            ContainerAccess::ReadWrite => self.held.clone_mount(PrivateMount::read_write_clone)?,
        };
        point.attach(&clone)
    }

    /// The type of the root of the mount.
    pub fn shape(&self) -> MountPointType {
        self.held.mount.shape()
    }

    /// The device number of its file system, in the format of the mount table.
    pub fn device(&self) -> Option<String> {
        self.held.mount.device()
    }

    /// Whether the volume has an access log.
    pub fn is_audited(&self) -> bool {
        self.held.is_audited()
    }

    /// Whether it is a passthrough volume whose source is on another machine.
    pub fn is_remote(&self) -> bool {
        self.held.of_kind::<HeldPassthrough>().is_some_and(|passthrough| passthrough.options().remote.is_some())
    }

    /// Changes the limit of a passthrough volume that was mounted with one: most bytes that files may use on the source from now
    /// on; `None` removes it. Existing files stay.
    pub fn set_limit(&self, limit: Option<u64>) {
        let is_limited = |passthrough: &HeldPassthrough| passthrough.options().limit.is_some();
        if self.held.of_kind::<HeldPassthrough>().is_some_and(is_limited) {
            self.held.region.header().limit.store(limit.unwrap_or(u64::MAX), Ordering::Relaxed);
        }
    }

    /// The data path that the server of a passthrough volume has chosen.
    pub fn data_path(&self) -> DataPath {
        DataPath::recorded(&self.held.region).unwrap_or(DataPath::Server)
    }

    /// Whether requests arrive over io_uring, not through `/dev/fuse`.
    pub fn is_over_io_uring(&self) -> bool {
        self.held.kind().rings().is_some_and(RingMemory::is_in_use)
    }

    /// The device and inode number of the source of a passthrough volume.
    pub fn source(&self) -> Option<(u64, u64)> {
        let source = self.held.of_kind::<HeldPassthrough>()?;
        rustix::fs::fstat(source.source()).ok().map(|source| (source.st_dev, source.st_ino))
    }

    /// A handle to observe the volume.
    pub fn watch(&self) -> VolumeObserver {
        VolumeObserver::new(&self.server, self.volume, &self.held)
    }

    /// Number of FUSE requests served so far.
    pub fn requests(&self) -> u64 {
        self.held.region.requests()
    }
}

impl Drop for MountedVolume {
    fn drop(&mut self) {
        // An error means that the server has ended, and with it its state of the volume.
        let _ = self.server.remove(self.volume);
    }
}
