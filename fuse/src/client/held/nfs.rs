//! The state that the supervisor holds of an NFS export, mounting one, and the address of its server.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::mount::MountAttrFlags;
use serde_json::Value;

use super::{HeldKind, broken};
use crate::client::{MountedVolume, ServerClient};
use crate::mount::MountError;
use crate::mount::private::{MountOptions, NFS_SOURCE, PrivateMount, open_device};
use crate::nfs::options::{ExportOptions, NfsAddress};
use crate::nfs::sockets::{SocketSets, Sockets};
use crate::nfs::writeback::log::Log;
use crate::projection::Image;
use crate::protocol::{ServerRequest, VolumeBody, VolumeId};
use crate::region::VolumeKind;

/// The most data that a volume may have accepted and the server not yet on disk, in MiB.
const LOG: usize = 64;
/// The kernel's read-ahead, in KiB: four of its largest requests.
const READ_AHEAD: u32 = 4096;

/// An export of an NFS server.
pub(super) struct HeldExport {
    /// The file of its log.
    log: OwnedFd,
    /// Those of its connections.
    sockets: Sockets,
    /// How it is served, as far as [`Sockets::current`] does not say otherwise.
    options: Box<ExportOptions>,
}

impl HeldExport {
    pub(super) fn restore(
        options: Box<ExportOptions>,
        descriptors: Vec<OwnedFd>,
        nfs_sockets: &SocketSets,
    ) -> io::Result<Self> {
        let mut descriptors = descriptors.into_iter();
        let log = descriptors.next().ok_or_else(broken)?;
        let sockets = nfs_sockets.adopt(&options, descriptors.collect())?;
        Ok(Self { log, sockets, options })
    }
}

impl HeldKind for HeldExport {
    fn region_kind(&self) -> VolumeKind {
        VolumeKind::Nfs
    }

    fn mount_source(&self) -> &'static str {
        NFS_SOURCE
    }

    fn descriptors(&self) -> io::Result<Vec<OwnedFd>> {
        let mut descriptors = vec![self.log.try_clone()?];
        descriptors.extend(self.sockets.copies()?);
        Ok(descriptors)
    }

    fn describe(&self) -> (VolumeBody, Vec<Arc<Image>>) {
        (VolumeBody::Nfs { options: Box::new(self.sockets.current(&self.options)) }, Vec::new())
    }
}

impl MountedVolume {
    /// Mounts the export that `options` name, and lets `server`, which has the `sockets`, answer for it. It is not visible before
    /// [`show`](Self::show). `attributes` are what the mount's options say of it, such as `nosuid`. `about` is for the supervisor
    /// that adopts the volume if this one is killed.
    ///
    /// # Errors
    /// When it cannot be mounted, or the server does not take it: the NFS server does not answer, perhaps.
    pub fn of_export(
        server: &Arc<ServerClient>,
        sockets: Sockets,
        options: &ExportOptions,
        attributes: MountAttrFlags,
        mount: &MountOptions,
        about: Value,
    ) -> Result<Self, MountError> {
        let failed = |cause| MountError::Failed { what: "the server did not take the volume".to_owned(), cause };
        let device = open_device()?;
        let mount = PrivateMount::of_export(device.as_fd(), attributes, mount)?;
        let log = Log::create(LOG).and_then(|log| log.as_fd().try_clone_to_owned()).map_err(failed)?;
        let kind = HeldExport { log, sockets: sockets.clone(), options: Box::new(options.clone()) };
        // Until here, the NFS server may have moved.
        let request =
            |volume, about| ServerRequest::Export { volume, about, options: Box::new(sockets.current(options)) };
        let (volume, _) = server.begin(device, mount, about, kind, request).map_err(failed)?;
        // Without it, reading is slower.
        if let Err(error) = volume.held.mount.set_read_ahead(READ_AHEAD) {
            tracing::debug!(volume = options.name, "volume {:?}: read-ahead stays what it is: {error}", options.name);
        }
        Ok(volume)
    }
}

impl ServerClient {
    /// NFS servers that were asked something and have said nothing for `limit`: of each, one of the volumes that share
    /// it, and how that is served.
    pub fn silent_exports(&self, limit: Duration) -> Vec<(VolumeId, ExportOptions)> {
        let mut found: Vec<(VolumeId, &HeldExport)> = Vec::new();
        let volumes = self.volumes();
        for (volume, held) in volumes.iter() {
            let Some(export) = held.of_kind::<HeldExport>() else { continue };
            let is_silent = held.region.silent_since().is_some_and(|since| since.elapsed() >= limit);
            if is_silent && !found.iter().any(|(_, other)| export.sockets.is_shared_with(&other.sockets)) {
                found.push((*volume, export));
            }
        }
        found.into_iter().map(|(volume, export)| (volume, export.sockets.current(&export.options))).collect()
    }

    /// Tells the server the new place of a volume's NFS server, for all volumes that share it now or later.
    ///
    /// # Errors
    /// When there is no such volume any more, or no server.
    pub fn move_nfs(&self, volume: VolumeId, place: NfsAddress) -> io::Result<()> {
        {
            // A volume that is just starting is in the map already, or its request will carry the new place.
            let _joining = self.joining.lock().expect("a thread that panics ends the process");
            let volumes = self.volumes();
            let export = volumes.get(&volume).and_then(|held| held.of_kind::<HeldExport>());
            export.ok_or(io::ErrorKind::NotFound)?.sockets.move_to(place);
        }
        // A successor that is resumed meanwhile may have got the old place for some of them.
        self.done(&ServerRequest::Move { volume, place }, &[])
    }
}
