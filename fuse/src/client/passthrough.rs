//! The supervisor's side of one passthrough volume: its mounts and its options.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use serde_json::Value;

use crate::client::held::{Content, Held};
use crate::client::{ServerClient, Watch};
use crate::mount::MountError;
use crate::mount::enclosed::Enclosed;
use crate::mount::private::{Access, MountOptions, PrivateMount, Shape, open_device};
use crate::mount::visible::{MountPoint, VisibleMount};
use crate::passthrough::{DataPath, Options};
use crate::protocol::VolumeId;

/// A directory or file of the host, mounted.
pub struct Passthrough {
    server: Arc<ServerClient>,
    volume: VolumeId,
    held: Arc<Held>,
    data_path: DataPath,
}

impl Passthrough {
    /// Mounts what `source` is open on, and lets `server` answer for it. It is not visible before [`show`](Self::show). `source`
    /// may be opened with `O_PATH`; it must be a directory or a regular file. `about` is for the supervisor that adopts the
    /// volume if this one is killed.
    ///
    /// # Errors
    /// When it cannot be mounted, or the server does not take it.
    pub fn start(
        server: Arc<ServerClient>,
        source: BorrowedFd<'_>,
        options: &Options,
        mount: &MountOptions,
        about: Value,
    ) -> Result<Self, MountError> {
        let failed = |cause| MountError::Failed { what: "the server did not take the volume".to_owned(), cause };
        let device = open_device()?;
        let mount = PrivateMount::of_source(device.as_fd(), source, mount)?;
        let source = match options.remote {
            // It is attached nowhere, so nothing is above it.
            Some(_) => Enclosed::open(source),
            None => Enclosed::of(source, &options.name),
        };
        let source = source.map_err(failed)?;
        let (volume, held, data_path) = server.pass(device, mount, source, options, about).map_err(failed)?;
        Ok(Self { server, volume, held, data_path })
    }

    /// The volume of a supervisor that was killed.
    pub(crate) fn adopt(server: Arc<ServerClient>, volume: VolumeId, held: Arc<Held>) -> Self {
        let data_path = DataPath::recorded(&held.region).unwrap_or(DataPath::Server);
        Self { server, volume, held, data_path }
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

    /// Whether it is a directory or a file.
    pub fn shape(&self) -> Shape {
        self.held.mount.shape()
    }

    /// Whether the source is on another machine.
    pub fn is_remote(&self) -> bool {
        matches!(&self.held.content, Content::Passthrough { options, .. } if options.remote.is_some())
    }

    /// How the bytes of files travel, as a probe found out.
    pub fn data_path(&self) -> DataPath {
        self.data_path
    }

    /// A way to look at the volume from elsewhere.
    pub fn watch(&self) -> Watch {
        Watch::new(&self.server, self.volume, &self.held)
    }

    /// Number of FUSE requests served so far.
    ///
    /// # Errors
    /// When the server is gone.
    pub fn requests(&self) -> io::Result<u64> {
        Ok(self.held.region.requests())
    }
}

impl Drop for Passthrough {
    fn drop(&mut self) {
        // The server may be gone already, and with it all it held.
        let _ = self.server.remove(self.volume);
    }
}
