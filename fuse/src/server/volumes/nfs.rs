//! Exports of NFS servers in the server. One thread serves all of them.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use podfs_nfs::rpc::dial::inode;

use super::{ServedKind, ServedParts, ServedVolumes, ServerResources, inconsistent_state};
use crate::nfs;
use crate::nfs::options::{ExportOptions, NfsAddress};
use crate::nfs::thread::{NfsThread, ServedExport};
use crate::protocol::{ServerReply, VolumeBody, VolumeNumber};
use crate::region::VolumeKind;

/// An export of an NFS server.
pub(in crate::server) struct NfsExport {
    log_and_sockets: Vec<OwnedFd>,
    options: Box<ExportOptions>,
}

impl NfsExport {
    /// An export. The first one of `log_and_sockets` is its log file.
    pub(in crate::server) fn new(options: Box<ExportOptions>, log_and_sockets: Vec<OwnedFd>) -> Self {
        Self { log_and_sockets, options }
    }

    /// The export for the thread of NFS volumes.
    fn to_serve(&self, volume: &ServedParts) -> io::Result<ServedExport> {
        let mut own = copies(&self.log_and_sockets)?.into_iter();
        Ok(ServedExport {
            device: volume.device.try_clone()?,
            region: Arc::clone(&volume.region),
            log: own.next().ok_or_else(inconsistent_state)?,
            sockets: own.collect(),
            options: self.options.as_ref().clone(),
            trace: Arc::clone(&volume.trace),
        })
    }

    /// The inode of its first socket. Exports that share their sockets have the same.
    fn first_socket(&self) -> Option<u64> {
        inode(self.log_and_sockets.get(1)?).ok()
    }
}

impl ServedKind for NfsExport {
    fn region_kind(&self) -> VolumeKind {
        VolumeKind::Nfs
    }

    fn is_traced(&self) -> bool {
        self.options.trace
    }

    fn begin(&mut self, volume: &ServedParts, shared: &mut ServerResources) -> io::Result<ServerReply> {
        let served = self.to_serve(volume)?;
        shared.nfs()?.serve(served)?;
        Ok(ServerReply::Done)
    }

    fn load(&mut self, volume: &ServedParts) -> io::Result<()> {
        nfs::thread::can_resume(&volume.region, self.log_and_sockets.first().ok_or_else(inconsistent_state)?)
    }

    fn resume(&mut self, volume: &ServedParts, shared: &mut ServerResources) -> io::Result<()> {
        let served = self.to_serve(volume)?;
        shared.nfs()?.resume(served)
    }

    fn describe(&self) -> io::Result<(VolumeBody, Vec<OwnedFd>)> {
        Ok((VolumeBody::Nfs { options: self.options.clone() }, copies(&self.log_and_sockets)?))
    }
}

impl ServerResources {
    /// The thread that serves NFS volumes.
    fn nfs(&mut self) -> io::Result<&NfsThread> {
        let thread = match self.nfs.take() {
            Some(thread) => thread,
            None => NfsThread::start()?,
        };
        Ok(self.nfs.insert(thread))
    }
}

impl ServedVolumes {
    /// Completes what NFS volumes that are unmounted still have to do: the process is about to end.
    pub(in crate::server) fn finish_nfs(&self) {
        if let Some(thread) = &self.shared.nfs {
            thread.finish();
        }
    }

    /// Uses another address for the NFS server of a volume, and of all volumes that share its sockets.
    pub(in crate::server) fn move_nfs(&mut self, number: VolumeNumber, place: NfsAddress) -> io::Result<()> {
        let (_, export) = self.of_kind::<NfsExport>(number)?;
        let first = export.first_socket().ok_or_else(inconsistent_state)?;
        let exports = self.volumes.values_mut().filter_map(|volume| volume.kind_mut::<NfsExport>());
        for export in exports.filter(|export| export.first_socket() == Some(first)) {
            *export.options = export.options.as_ref().clone().at(place);
        }
        self.shared.nfs()?.move_server(first, place);
        Ok(())
    }
}

fn copies(descriptors: &[OwnedFd]) -> io::Result<Vec<OwnedFd>> {
    descriptors.iter().map(OwnedFd::try_clone).collect()
}
