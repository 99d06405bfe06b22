//! The state that the supervisor holds of an NFS export. [`nfs`](crate::client::nfs) mounts it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::{HeldKind, impossible_volume};
use crate::mount::private::NFS_SOURCE;
use crate::nfs::options::ExportOptions;
use crate::nfs::sockets::{NfsSockets, SocketSets};
use crate::projection::Image;
use crate::protocol::VolumeBody;
use crate::region::VolumeKind;

/// An export of an NFS server.
pub(in crate::client) struct HeldExport {
    /// The file of its log.
    log: OwnedFd,
    /// The sockets of its connections.
    sockets: NfsSockets,
    /// The options of its mount. [`NfsSockets::current`] may override the server's address.
    options: Box<ExportOptions>,
}

impl HeldExport {
    /// An export with an empty log, over these sockets.
    pub(in crate::client) fn new(log: OwnedFd, sockets: NfsSockets, options: ExportOptions) -> Self {
        // The attributes are those of the moment of the mount.
        let options = ExportOptions { root_attributes: None, ..options };
        Self { log, sockets, options: Box::new(options) }
    }

    pub(super) fn restore(
        options: Box<ExportOptions>,
        descriptors: Vec<OwnedFd>,
        nfs_sockets: &SocketSets,
    ) -> io::Result<Self> {
        let mut descriptors = descriptors.into_iter();
        let log = descriptors.next().ok_or_else(impossible_volume)?;
        let sockets = nfs_sockets.adopt(&options, descriptors.collect())?;
        Ok(Self { log, sockets, options })
    }

    /// The sockets of its connections.
    pub(in crate::client) fn sockets(&self) -> &NfsSockets {
        &self.sockets
    }

    /// The present options.
    pub(in crate::client) fn options(&self) -> ExportOptions {
        self.sockets.current(&self.options)
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
        (VolumeBody::Nfs { options: Box::new(self.options()) }, Vec::new())
    }
}
