//! Mounting a directory or file of the host.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Once};

use super::connection::unexpected;
use super::held::HeldPassthrough;
use super::identity::VolumeIdentity;
use super::{MountedVolume, ServerClient};
use crate::mount::MountError;
use crate::mount::enclosed::SourceWithMounts;
use crate::mount::private::{MountOptions, PrivateMount, open_device};
use crate::passthrough::PassthroughOptions;
use crate::protocol::{ServerReply, ServerRequest};
use crate::session::ring_memory::RingMemory;
use crate::session::uring;

impl MountedVolume {
    /// Mounts the directory or regular file `source`, with `server` as its server. It is not visible before
    /// [`show`](Self::show). `source` may be opened with `O_PATH`.
    ///
    /// # Errors
    /// When it cannot be mounted, or the server refuses it.
    pub fn of_source(
        server: &Arc<ServerClient>,
        source: BorrowedFd<'_>,
        options: &PassthroughOptions,
        mount: &MountOptions,
        identity: &VolumeIdentity,
    ) -> Result<Self, MountError> {
        let failed = |cause| MountError::Failed { what: "the server did not take the volume".to_owned(), cause };
        let device = open_device()?;
        let mount = PrivateMount::of_source(device.as_fd(), source, mount)?;
        let source = match options.remote {
            // The mount is detached, so nothing is above it.
            Some(_) => SourceWithMounts::open(source),
            None => SourceWithMounts::of(source, identity.name()),
        };
        let source = source.map_err(failed)?;
        let rings = if options.io_uring { rings() } else { None };
        let options = &PassthroughOptions { name: identity.label(), io_uring: rings.is_some(), ..options.clone() };
        let kind = HeldPassthrough::new(source, options.clone(), rings);
        let request = |volume, about| ServerRequest::Pass { volume, about, options: options.clone() };
        match MountedVolume::begin(server, device, mount, identity.about(), kind, request).map_err(failed)? {
            (volume, ServerReply::Passing(_)) => Ok(volume),
            (_, other) => Err(failed(unexpected(&other))),
        }
    }
}

/// Memory for rings, if the kernel offers FUSE over io_uring and has the memory. Without it, requests arrive through the device.
fn rings() -> Option<RingMemory> {
    static WARNED: Once = Once::new();
    if !uring::are_offered() {
        // The reason is the same for all volumes of this process.
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
