//! The supervisor's side of one NFS volume: its mount and its log, which outlive the process that serves it.

use std::os::fd::AsFd;
use std::sync::Arc;

use rustix::mount::MountAttrFlags;
use serde_json::Value;

use crate::client::held::Held;
use crate::client::{ServerClient, Watch};
use crate::mount::MountError;
use crate::mount::private::{Access, MountOptions, PrivateMount, open_device};
use crate::mount::visible::{MountPoint, VisibleMount};
use crate::nfs::options::Options;
use crate::nfs::sockets::Sockets;
use crate::nfs::writeback::log::Log;
use crate::protocol::VolumeId;

/// What a volume may have accepted that the server has not on disk, in MiB.
const LOG: usize = 64;
/// What the kernel reads ahead, in KiB: four of its largest requests.
const READ_AHEAD: u32 = 4096;

/// An export of an NFS server, mounted.
pub struct NfsVolume {
    server: Arc<ServerClient>,
    volume: VolumeId,
    held: Arc<Held>,
}

impl NfsVolume {
    /// Mounts the export that `options` name, and lets `server`, which has the `sockets`, answer for it. It is not visible before
    /// [`show`](Self::show). `attributes` are what the mount's options say of it, such as `nosuid`. `about` is for the supervisor
    /// that adopts the volume if this one is killed.
    ///
    /// # Errors
    /// When it cannot be mounted, or the server does not take it: the NFS server does not answer, perhaps.
    pub fn start(
        server: Arc<ServerClient>,
        sockets: Sockets,
        options: &Options,
        attributes: MountAttrFlags,
        mount: &MountOptions,
        about: Value,
    ) -> Result<Self, MountError> {
        let failed = |cause| MountError::Failed { what: "the server did not take the volume".to_owned(), cause };
        let device = open_device()?;
        let mount = PrivateMount::of_export(device.as_fd(), attributes, mount)?;
        let log = Log::create(LOG).and_then(|log| log.as_fd().try_clone_to_owned()).map_err(failed)?;
        let (volume, held) = server.export(device, mount, log, sockets, options, about).map_err(failed)?;
        // Without it, reading is slower.
        if let Err(error) = held.mount.set_read_ahead(READ_AHEAD) {
            tracing::debug!(volume = options.name, "volume {:?}: read-ahead stays what it is: {error}", options.name);
        }
        Ok(Self { server, volume, held })
    }

    /// The volume of a supervisor that was killed.
    pub(crate) fn adopt(server: Arc<ServerClient>, volume: VolumeId, held: Arc<Held>) -> Self {
        Self { server, volume, held }
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

    /// The device number of its file system, as the mount table writes it.
    pub(crate) fn device(&self) -> Option<String> {
        self.held.mount.device()
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

impl Drop for NfsVolume {
    fn drop(&mut self) {
        // The server may be gone already, and with it all it held.
        let _ = self.server.remove(self.volume);
    }
}
