//! The state that the supervisor holds of a passthrough volume, and mounting one.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Once};

use serde_json::Value;

use super::{HeldKind, broken};
use crate::client::server_client::unexpected;
use crate::client::{MountedVolume, ServerClient};
use crate::mount::MountError;
use crate::mount::enclosed::Enclosed;
use crate::mount::private::{MountOptions, PASSTHROUGH_SOURCE, PrivateMount, open_device};
use crate::mount::table::MountTable;
use crate::passthrough::PassthroughOptions;
use crate::projection::Image;
use crate::protocol::{ServerReply, ServerRequest, VolumeBody};
use crate::region::VolumeKind;
use crate::session::uring::{self, RingMemory};

/// A source of the host.
pub(in crate::client) struct HeldPassthrough {
    source: OwnedFd,
    /// The mounts that it is among.
    table: MountTable,
    options: PassthroughOptions,
    /// The memory of rings, if requests may come over io_uring.
    rings: Option<RingMemory>,
}

impl HeldPassthrough {
    pub(super) fn restore(options: PassthroughOptions, descriptors: Vec<OwnedFd>) -> io::Result<Self> {
        let mut descriptors = descriptors.into_iter();
        let mut next = || descriptors.next().ok_or_else(broken);
        let (source, table) = (next()?, next()?.into());
        let rings = if options.io_uring { Some(RingMemory::adopt(next()?)?) } else { None };
        Ok(Self { source, table, options, rings })
    }

    /// The source that it shows.
    pub(in crate::client) fn source(&self) -> BorrowedFd<'_> {
        self.source.as_fd()
    }

    /// The memory of rings, if requests may come over io_uring.
    pub(in crate::client) fn rings(&self) -> Option<&RingMemory> {
        self.rings.as_ref()
    }

    /// How it is served.
    pub(in crate::client) fn options(&self) -> &PassthroughOptions {
        &self.options
    }
}

impl HeldKind for HeldPassthrough {
    fn region_kind(&self) -> VolumeKind {
        VolumeKind::Passthrough
    }

    fn mount_source(&self) -> &'static str {
        PASSTHROUGH_SOURCE
    }

    fn descriptors(&self) -> io::Result<Vec<OwnedFd>> {
        let all = [Some(self.source.as_fd()), Some(self.table.as_fd()), self.rings.as_ref().map(AsFd::as_fd)];
        all.into_iter().flatten().map(|one| one.try_clone_to_owned()).collect()
    }

    fn describe(&self) -> (VolumeBody, Vec<Arc<Image>>) {
        (VolumeBody::Passthrough { options: self.options.clone() }, Vec::new())
    }

    fn has_open_files(&self) -> bool {
        true
    }
}

impl MountedVolume {
    /// Mounts what `source` is open on, and lets `server` answer for it. It is not visible before [`show`](Self::show). `source`
    /// may be opened with `O_PATH`; it must be a directory or a regular file. `about` is for the supervisor that adopts the
    /// volume if this one is killed.
    ///
    /// # Errors
    /// When it cannot be mounted, or the server does not take it.
    pub fn of_source(
        server: &Arc<ServerClient>,
        source: BorrowedFd<'_>,
        options: &PassthroughOptions,
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
        let Enclosed { source, table } = source.map_err(failed)?;
        let rings = if options.io_uring { rings() } else { None };
        let options = &PassthroughOptions { io_uring: rings.is_some(), ..options.clone() };
        let kind = HeldPassthrough { source, table, options: options.clone(), rings };
        let request = |volume, about| ServerRequest::Pass { volume, about, options: options.clone() };
        match server.begin(device, mount, about, kind, request).map_err(failed)? {
            (volume, ServerReply::Passing(_)) => Ok(volume),
            (_, other) => Err(failed(unexpected(&other))),
        }
    }
}

/// Memory for rings, if the kernel offers them and there is memory. Without it, requests come through the device.
fn rings() -> Option<RingMemory> {
    static WARNED: Once = Once::new();
    if !uring::are_offered() {
        // It holds for all volumes of this process.
        WARNED.call_once(|| {
            tracing::warn!(
                "requests come through /dev/fuse: the kernel offers no io_uring while \
                 /sys/module/fuse/parameters/enable_uring is not Y"
            );
        });
        return None;
    }
    let queues = uring::possible_cpus()?;
    let created = RingMemory::create(queues);
    created.inspect_err(|error| tracing::warn!("no memory for rings ({error}); requests come through /dev/fuse")).ok()
}
