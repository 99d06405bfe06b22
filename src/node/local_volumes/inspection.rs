//! A thorough check of an entry: it opens the mount or the device, so it may block.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;

use podfs_fuse::mount::table::{MountTableEntry, mounts};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, StatxFlags, fstatvfs, openat2, statx};
use rustix::io::Errno;

use super::error::InspectionError;
use super::identity::DiskIdentity;
use crate::host::block;
use crate::host::device::{BlockDevice, foreign_content};
use crate::manifest::objects::VolumeMode;

/// An entry that podfs can offer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct UsableEntry {
    /// Its size in bytes.
    pub(super) capacity: u64,
    pub(super) identity: DiskIdentity,
}

/// Checks whether podfs can offer an entry.
///
/// # Errors
/// When it cannot.
pub(super) fn inspect(path: &Path, mode: VolumeMode) -> Result<UsableEntry, InspectionError> {
    let usable = match mode {
        VolumeMode::Filesystem => {
            let (directory, identity) = open_mount(path)?;
            let found = fstatvfs(&directory).map_err(InspectionError::NoAnswer)?;
            UsableEntry { capacity: found.f_blocks.saturating_mul(found.f_frsize), identity }
        }
        VolumeMode::Block => {
            let device = open_device(path)?;
            if device.is_in_use()? {
                return Err(InspectionError::InUse);
            }
            if device.is_read_only() {
                return Err(InspectionError::ReadOnly);
            }
            if let Some(content) = foreign_content(&device).map_err(InspectionError::Content)? {
                return Err(InspectionError::ForeignContent(content));
            }
            UsableEntry { capacity: device.size()?, identity: DiskIdentity::of_device(&device)? }
        }
    };
    if usable.capacity == 0 { Err(InspectionError::NoSize) } else { Ok(usable) }
}

/// Opens the root of the mount at `path`, without following links, and identifies it.
///
/// # Errors
/// When nothing is mounted there, or the file system is mounted elsewhere, too.
pub(super) fn open_mount(path: &Path) -> Result<(OwnedFd, DiskIdentity), InspectionError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory =
        openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS).map_err(|errno| match errno {
            Errno::LOOP | Errno::NOTDIR => InspectionError::NoDirectory,
            errno => InspectionError::OpenMount(errno),
        })?;
    let id = statx(&directory, c"", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)?.stx_mnt_id;
    let table = mounts()?;
    let Some(mounted) = table.iter().find(|mounted| mounted.id == id && mounted.at == path) else {
        return Err(InspectionError::NoMount);
    };
    if let Some(other) = table.iter().find(|other| shows_the_same(other, mounted)) {
        return Err(InspectionError::MountedElsewhere(other.at.clone()));
    }
    if mounted.read_only {
        return Err(InspectionError::MountedReadOnly);
    }
    let identity = DiskIdentity::of_mount(mounted, &directory)?;
    Ok((directory, identity))
}

/// Whether `other` shows files that `mounted` shows, and no others. If `mounted` is a bind mount of a directory, a
/// mount of the whole file system does not count.
fn shows_the_same(other: &MountTableEntry, mounted: &MountTableEntry) -> bool {
    other.id != mounted.id && other.device == mounted.device && other.root.starts_with(&mounted.root)
}

fn open_device(path: &Path) -> Result<BlockDevice, InspectionError> {
    let device = block::open(path).map_err(InspectionError::OpenDevice)?;
    match device.path() == path {
        true => Ok(device),
        false => Err(InspectionError::Link),
    }
}

/// Opens a device for writing, exclusively, and identifies it.
///
/// # Errors
/// When it is in use.
pub(super) fn open_exclusive(path: &Path) -> Result<(File, u64, DiskIdentity), InspectionError> {
    let device = open_device(path)?;
    let file = device.exclusive().map_err(|cause| match cause.raw_os_error() {
        Some(libc::EBUSY) => InspectionError::InUse,
        _ => InspectionError::Unusable(cause),
    })?;
    let size = device.size()?;
    Ok((file, size, DiskIdentity::of_device(&device)?))
}
