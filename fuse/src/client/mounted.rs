//! A mounted volume of any kind, as the supervisor has it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde_json::Value;

use super::held::{HeldKind, HeldPassthrough, HeldVolume};
use super::{ServerClient, Watch};
use crate::mount::MountError;
use crate::mount::private::{Access, PrivateMount, Shape};
use crate::mount::visible::{MountPoint, VisibleMount};
use crate::passthrough::DataPath;
use crate::protocol::{ServerReply, ServerRequest, VolumeId};
use crate::region::VolumeKind;
use crate::session::ring_memory::RingMemory;

/// A volume that a server answers for. When this is dropped, the server forgets the volume, and its private mount goes.
pub struct MountedVolume {
    pub(super) server: Arc<ServerClient>,
    pub(super) volume: VolumeId,
    pub(super) held: Arc<HeldVolume>,
}

impl MountedVolume {
    /// Makes a volume of what is held of it, and lets the server answer for it. No successor has to know of the volume if the
    /// server dies before it has answered: then the volume is made anew.
    ///
    /// # Errors
    /// When the server is gone, the kernel's handshake fails, or the server cannot read the source.
    pub(super) fn begin(
        server: &Arc<ServerClient>,
        device: OwnedFd,
        mount: PrivateMount,
        about: Value,
        kind: impl HeldKind,
        request: impl FnOnce(VolumeId, Value) -> ServerRequest,
    ) -> io::Result<(MountedVolume, ServerReply)> {
        let held = HeldVolume::new(about, device, mount, kind)?;
        let connection = server.connection()?;
        let _joining = server.joining.lock().expect("a thread that panics ends the process");
        let volume = VolumeId(server.next.fetch_add(1, Ordering::Relaxed));
        let descriptors = held.descriptors()?;
        let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        let (reply, _) = connection.ask(&request(volume, held.about.clone()), &descriptors)?;
        let held = Arc::new(held);
        server.volumes().insert(volume, Arc::clone(&held));
        Ok((MountedVolume { server: Arc::clone(server), volume, held }, reply))
    }

    /// Which kind it is of.
    pub fn kind(&self) -> VolumeKind {
        self.held.region.kind()
    }

    /// Whether no successor could take over the volume when its server died: it has to be mounted anew.
    pub fn is_given_up(&self) -> bool {
        self.held.is_given_up()
    }

    /// Shows the volume at `point`.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn show(&self, point: &MountPoint, access: Access) -> Result<VisibleMount, MountError> {
        let clone = match access {
            Access::ReadOnly => self.held.clone_mount(PrivateMount::read_only_clone)?,
            Access::ReadWrite => self.held.clone_mount(PrivateMount::read_write_clone)?,
        };
        point.attach(&clone)
    }

    /// Whether it is a directory or a file.
    pub fn shape(&self) -> Shape {
        self.held.mount.shape()
    }

    /// The device number of its file system, as the mount table writes it.
    pub fn device(&self) -> Option<String> {
        self.held.mount.device()
    }

    /// Whether each open is written down.
    pub fn is_audited(&self) -> bool {
        self.held.is_audited()
    }

    /// Whether it is a passthrough volume whose source is on another machine.
    pub fn is_remote(&self) -> bool {
        self.held.of_kind::<HeldPassthrough>().is_some_and(|passthrough| passthrough.options().remote.is_some())
    }

    /// Changes the limit of a passthrough volume that was mounted with one: most bytes that files may take on the source from now
    /// on, or none. Files that are there already stay.
    pub fn set_limit(&self, limit: Option<u64>) {
        let is_limited = |passthrough: &HeldPassthrough| passthrough.options().limit.is_some();
        if self.held.of_kind::<HeldPassthrough>().is_some_and(is_limited) {
            self.held.region.header().limit.store(limit.unwrap_or(u64::MAX), Ordering::Relaxed);
        }
    }

    /// How the bytes of files travel, as the server of a passthrough volume found out.
    pub fn data_path(&self) -> DataPath {
        DataPath::recorded(&self.held.region).unwrap_or(DataPath::Server)
    }

    /// Whether requests come over io_uring, not through `/dev/fuse`.
    pub fn is_over_io_uring(&self) -> bool {
        self.held.kind().rings().is_some_and(RingMemory::is_in_use)
    }

    /// A way to look at the volume from elsewhere.
    pub fn watch(&self) -> Watch {
        Watch::new(&self.server, self.volume, &self.held)
    }

    /// Number of FUSE requests served so far.
    pub fn requests(&self) -> u64 {
        self.held.region.requests()
    }
}

impl Drop for MountedVolume {
    fn drop(&mut self) {
        // The server may be gone already, and with it all it held.
        let _ = self.server.remove(self.volume);
    }
}
