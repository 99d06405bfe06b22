//! Mounting an NFS export, and the address of its server.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::mount::MountAttrFlags;

use super::held::HeldExport;
use super::identity::VolumeIdentity;
use super::{MountedVolume, ServerClient};
use crate::mount::MountError;
use crate::mount::private::{MountOptions, PrivateMount, open_device};
use crate::nfs::options::{ExportOptions, NfsAddress};
use crate::nfs::sockets::NfsSockets;
use crate::nfs::writeback::log::Log;
use crate::protocol::{ServerRequest, VolumeNumber};

/// Size of the log of writes that a volume has accepted and the NFS server does not have on disk, in MiB.
const LOG: usize = 64;
/// The kernel's read-ahead, in KiB: four of its largest requests.
const READ_AHEAD: u32 = 4096;

impl MountedVolume {
    /// Mounts the export that `options` name, over `sockets`, with `server` as its server. It is not visible before
    /// [`show`](Self::show). `attributes` are those of the mount options, such as `nosuid`.
    ///
    /// # Errors
    /// When it cannot be mounted, or the server refuses it, for example because the NFS server does not answer.
    pub fn of_export(
        server: &Arc<ServerClient>,
        sockets: NfsSockets,
        options: &ExportOptions,
        attributes: MountAttrFlags,
        mount: &MountOptions,
        identity: &VolumeIdentity,
    ) -> Result<Self, MountError> {
        let failed = |cause| MountError::Failed { what: "the server did not take the volume".to_owned(), cause };
        let device = open_device()?;
        let mount = PrivateMount::of_export(device.as_fd(), attributes, options.permission_check(), mount)?;
        let options = &ExportOptions { name: identity.label(), ..options.clone() };
        let log = Log::create(LOG).and_then(|log| log.as_fd().try_clone_to_owned()).map_err(failed)?;
        let kind = HeldExport::new(log, sockets.clone(), options.clone());
        // The address of the NFS server may have changed since the sockets were made.
        let request =
            |volume, about| ServerRequest::Export { volume, about, options: Box::new(sockets.current(options)) };
        let (volume, _) =
            MountedVolume::begin(server, device, mount, identity.about(), kind, request).map_err(failed)?;
        // With the kernel's default, reads are only slower.
        if let Err(error) = volume.held.mount.set_read_ahead(READ_AHEAD) {
            let volume = identity.name();
            tracing::debug!(volume, "volume {volume:?}: read-ahead stays what it is: {error}");
        }
        Ok(volume)
    }
}

impl ServerClient {
    /// NFS servers that have owed an answer for `limit`. For each, one of the volumes that share it, with its options.
    pub fn silent_exports(&self, limit: Duration) -> Vec<(VolumeNumber, ExportOptions)> {
        let mut found: Vec<(VolumeNumber, &HeldExport)> = Vec::new();
        let volumes = self.volumes();
        for (volume, held) in volumes.iter() {
            let Some(export) = held.of_kind::<HeldExport>() else { continue };
            let is_silent = held.region.silent_since().is_some_and(|since| since.elapsed() >= limit);
            if is_silent && !found.iter().any(|(_, other)| export.sockets().is_shared_with(other.sockets())) {
                found.push((*volume, export));
            }
        }
        found.into_iter().map(|(volume, export)| (volume, export.options())).collect()
    }

    /// Sends the server the new address of a volume's NFS server. It is for all volumes that share that server, now or later.
    ///
    /// # Errors
    /// When there is no such volume any more, or no server.
    pub fn move_nfs(&self, volume: VolumeNumber, place: NfsAddress) -> io::Result<()> {
        {
            // A volume that starts now is in the map already, or its request will have the new address.
            let _joining = self.joining.lock().expect("a thread that panics ends the process");
            let volumes = self.volumes();
            let export = volumes.get(&volume).and_then(|held| held.of_kind::<HeldExport>());
            export.ok_or(io::ErrorKind::NotFound)?.sockets().move_to(place);
        }
        // A successor that starts meanwhile may have the old address for some of the volumes.
        self.expect_done(&ServerRequest::Move { volume, place }, &[])
    }
}
