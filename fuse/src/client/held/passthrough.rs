//! The state that the supervisor holds of a passthrough volume. [`passthrough`](crate::client::passthrough) mounts it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{makedev, stat};

use super::{HeldKind, impossible_volume};
use crate::mount::enclosed::SourceWithMounts;
use crate::mount::private::PASSTHROUGH_SOURCE;
use crate::mount::table::{MountTable, mount_id};
use crate::passthrough::PassthroughOptions;
use crate::projection::Image;
use crate::protocol::VolumeBody;
use crate::region::VolumeKind;
use crate::session::ring_memory::RingMemory;

/// A source of the host.
pub(in crate::client) struct HeldPassthrough {
    source: OwnedFd,
    /// The mounts around the source.
    table: MountTable,
    options: PassthroughOptions,
    /// The memory of rings, if it may use io_uring.
    rings: Option<RingMemory>,
}

impl HeldPassthrough {
    /// An open source, with the memory of its rings if it may use io_uring.
    pub(in crate::client) fn new(
        source: SourceWithMounts,
        options: PassthroughOptions,
        rings: Option<RingMemory>,
    ) -> Self {
        let SourceWithMounts { source, table } = source;
        Self { source, table, options, rings }
    }

    pub(super) fn restore(options: PassthroughOptions, descriptors: Vec<OwnedFd>) -> io::Result<Self> {
        let mut descriptors = descriptors.into_iter();
        let mut next = || descriptors.next().ok_or_else(impossible_volume);
        let (source, table) = (next()?, next()?.into());
        let rings = if options.io_uring { Some(RingMemory::adopt(next()?)?) } else { None };
        Ok(Self { source, table, options, rings })
    }

    /// The source.
    pub(in crate::client) fn source(&self) -> BorrowedFd<'_> {
        self.source.as_fd()
    }

    /// The type of the source's file system, and the number of its block device (`st_rdev`), if the file system has one.
    pub(in crate::client) fn disk(&self) -> Option<(String, u64)> {
        let mounted = self.table.mount_with_id(mount_id(self.source.as_fd()).ok()?).ok()??;
        let (major, minor) = mounted.device.split_once(':')?;
        let device = match (major.parse().ok()?, minor.parse().ok()?) {
            // btrfs has several devices, and device numbers without a driver. The mount table has one of the devices. The source of
            // another mount may be any path, also one on a file system that hangs.
            (0, _) if mounted.fs_type == "btrfs" && mounted.source.starts_with("/dev/") => {
                let device = stat(Path::new(&mounted.source)).ok()?;
                (device.st_mode & libc::S_IFMT == libc::S_IFBLK).then_some(device.st_rdev)?
            }
            (0, _) => return None,
            (major, minor) => makedev(major, minor),
        };
        Some((mounted.fs_type, device))
    }

    /// The options of its mount.
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

    fn rings(&self) -> Option<&RingMemory> {
        self.rings.as_ref()
    }
}
