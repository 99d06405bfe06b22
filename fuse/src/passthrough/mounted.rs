//! The supervisor's side of one passthrough volume: its mounts, and what was asked for.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::mount::MountError;
use crate::mount::enclosed::Enclosed;
use crate::mount::private::{Access, MountOptions, PrivateMount, Shape, open_device};
use crate::mount::visible::{MountPoint, VisibleMount};
use crate::nfs::options::Callers;
use crate::server::held::{Content, Held};
use crate::server::protocol::VolumeId;
use crate::server::{Server, Watch};

/// How long the kernel may believe what it was told of names and attributes. What a file holds is always
/// asked from the source when its data goes through the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cache {
    /// Not at all: every look asks.
    None,
    /// For one second, so that a change on the source is seen within it.
    #[default]
    Auto,
    /// For ever: nobody changes the source but through this mount.
    Always,
}

/// How the bytes of files travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DataPath {
    /// Reads and writes go from the kernel to the source (`FUSE_PASSTHROUGH`, Linux 6.9).
    Kernel,
    /// The server reads and writes.
    Server,
}

/// How a passthrough volume is served.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Options {
    /// The volume's name, for log lines.
    pub name: String,
    /// What the kernel may remember.
    pub cache: Cache,
    /// Nobody reads or writes the source but through this mount.
    pub exclusive: bool,
    /// Most bytes that files may take on the source, those that are there included. A write beyond it is `ENOSPC`.
    pub limit: Option<u64>,
    /// Report every request on standard output.
    pub trace: bool,
    /// What to do about a socket of the source, which cannot be connected to through FUSE: the end of the sentence that
    /// is logged when the first one is met. Without it, nothing is logged.
    pub socket_advice: Option<String>,
    /// How many threads answer requests; [`SESSION_THREADS`] if it does not matter.
    pub threads: Option<u8>,
    /// The source is on another machine, which may be away for long and decides what callers may do: as whom it is asked.
    #[serde(default)]
    pub remote: Option<Callers>,
}

/// Threads of a session: one for each of two CPUs, which is what answers fastest (docs/benchmarks.md has the figures).
pub const SESSION_THREADS: usize = 2;

/// A directory or file of the host, mounted.
pub struct Passthrough {
    server: Arc<Server>,
    volume: VolumeId,
    held: Arc<Held>,
    data_path: DataPath,
}

impl Passthrough {
    /// Mounts what `source` is open on, and lets `server` answer for it. Nobody sees it before
    /// [`show`](Self::show). `source` may be opened with `O_PATH`; it must be a directory or a regular file. `about` is for
    /// the supervisor that adopts the volume if this one is killed.
    ///
    /// # Errors
    /// When it cannot be mounted, or the server does not take it.
    pub fn start(
        server: Arc<Server>,
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
    pub(crate) fn adopt(server: Arc<Server>, volume: VolumeId, held: Arc<Held>) -> Self {
        let data_path = DataPath::recorded(&held.region).unwrap_or(DataPath::Server);
        Self { server, volume, held, data_path }
    }

    /// Whether nobody could go on with the volume when its server died: it has to be mounted anew.
    pub fn is_given_up(&self) -> bool {
        self.held.is_given_up()
    }

    /// Shows the volume at `point`.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn show(&self, point: &MountPoint, access: Access) -> Result<VisibleMount, MountError> {
        let clone = match access {
            Access::ReadOnly => self.held.mount.read_only_clone()?,
            Access::ReadWrite => self.held.mount.read_write_clone()?,
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
