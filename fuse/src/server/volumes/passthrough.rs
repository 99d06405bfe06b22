//! Sources of the host in the server.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use super::{ServedKind, ServedParts, ServerResources, inconsistent_state};
use crate::mount::enclosed::SourceWithMounts;
use crate::mount::table::MountTable;
use crate::passthrough::{self, LoadedVolume, PassthroughOptions};
use crate::protocol::{ServerReply, VolumeBody};
use crate::region::VolumeKind;
use crate::session::ring_memory::RingMemory;

/// A directory or file of the host.
pub(in crate::server) struct Passthrough {
    source: OwnedFd,
    /// The mount table of the source's namespace.
    table: Arc<MountTable>,
    options: PassthroughOptions,
    /// The memory of rings, if the volume may use io_uring.
    rings: Option<OwnedFd>,
    /// The state of a dead server, until this server serves the volume.
    loaded: Option<LoadedVolume>,
}

impl Passthrough {
    /// A new volume. `rest` are the descriptors after those of the source.
    pub(in crate::server) fn new(
        source: SourceWithMounts,
        options: PassthroughOptions,
        mut rest: impl Iterator<Item = OwnedFd>,
    ) -> io::Result<Self> {
        let SourceWithMounts { source, table } = source;
        let rings = if options.io_uring { Some(rest.next().ok_or_else(inconsistent_state)?) } else { None };
        Ok(Self { source, table: Arc::new(table), options, rings, loaded: None })
    }

    pub(super) fn restore(options: PassthroughOptions, descriptors: Vec<OwnedFd>) -> io::Result<Self> {
        let mut descriptors = descriptors.into_iter();
        let source = descriptors.next().ok_or_else(inconsistent_state)?;
        let table = MountTable::from(descriptors.next().ok_or_else(inconsistent_state)?);
        Self::new(SourceWithMounts { source, table }, options, descriptors)
    }

    fn rings(&self) -> io::Result<Option<Arc<RingMemory>>> {
        let map = |file: &OwnedFd| RingMemory::map(file.try_clone()?, &self.options.name).map(Arc::new);
        self.rings.as_ref().map(map).transpose()
    }
}

impl ServedKind for Passthrough {
    fn region_kind(&self) -> VolumeKind {
        VolumeKind::Passthrough
    }

    fn is_traced(&self) -> bool {
        self.options.trace
    }

    fn begin(&mut self, volume: &ServedParts, _: &mut ServerResources) -> io::Result<ServerReply> {
        let (region, trace) = (Arc::clone(&volume.region), Arc::clone(&volume.trace));
        region.begin();
        let (device, source) = (volume.device.try_clone()?, self.source.try_clone()?);
        let table = Arc::clone(&self.table);
        // Without rings, requests arrive through the device.
        let rings = self.rings().unwrap_or_else(|error| {
            let volume = self.options.name.as_str();
            tracing::warn!(volume, "no memory for rings ({error}); requests come through /dev/fuse");
            None
        });
        let mount = Some(volume.mount.as_fd());
        passthrough::serve(device, mount, source, table, self.options.clone(), region, rings, trace)
            .map(ServerReply::Passing)
    }

    fn load(&mut self, volume: &ServedParts) -> io::Result<()> {
        let (region, trace) = (Arc::clone(&volume.region), Arc::clone(&volume.trace));
        let (source, table) = (self.source.try_clone()?, Arc::clone(&self.table));
        let loaded = passthrough::load(region, self.rings()?, Some(source), table, self.options.clone(), trace);
        self.loaded = Some(loaded.map_err(io::Error::other)?);
        Ok(())
    }

    fn resume(&mut self, volume: &ServedParts, _: &mut ServerResources) -> io::Result<()> {
        let loaded = self.loaded.take().ok_or_else(inconsistent_state)?;
        loaded.start(volume.device.try_clone()?, Some(volume.mount.as_fd())).map(drop)
    }

    fn describe(&self) -> io::Result<(VolumeBody, Vec<OwnedFd>)> {
        let mut descriptors = vec![self.source.try_clone()?, self.table.as_fd().try_clone_to_owned()?];
        descriptors.extend(self.rings.as_ref().map(OwnedFd::try_clone).transpose()?);
        Ok((VolumeBody::Passthrough { options: self.options.clone() }, descriptors))
    }
}
