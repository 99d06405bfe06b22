//! A thorough look at an entry: it opens the mount or the device, so it may block.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;

use podfs_fuse::mount::table::{MountTableEntry, mounts};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, StatxFlags, fstatvfs, openat2, statx};
use rustix::io::Errno;

use super::identity::Identity;
use crate::host::block;
use crate::host::device::{BlockDevice, foreign_content};
use crate::manifest::objects::VolumeMode;

/// An entry that can be offered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Fit {
    /// Its size in bytes.
    pub(super) capacity: u64,
    pub(super) identity: Identity,
}

/// Looks whether an entry can be offered.
///
/// # Errors
/// Why not, as the end of a sentence that begins with its path.
pub(super) fn inspect(path: &Path, mode: VolumeMode) -> Result<Fit, String> {
    let fit = match mode {
        VolumeMode::Filesystem => {
            let (directory, identity) = open_mount(path)?;
            let found = fstatvfs(&directory).map_err(|errno| format!("does not answer: {errno}"))?;
            Fit { capacity: found.f_blocks.saturating_mul(found.f_frsize), identity }
        }
        VolumeMode::Block => {
            let device = open_device(path)?;
            if device.is_in_use().map_err(unusable)? {
                return Err("is in use by the node: mounted, swap, or a part of another device".to_owned());
            }
            if device.is_read_only() {
                return Err("is read-only".to_owned());
            }
            if let Some(content) = foreign_content(&device).map_err(|error| format!("cannot be offered: {error}"))? {
                return Err(format!(
                    "may belong to something else: {content}; erase it with wipefs or blkdiscard to offer it"
                ));
            }
            Fit { capacity: device.size().map_err(unusable)?, identity: Identity::of_device(&device)? }
        }
    };
    if fit.capacity == 0 { Err("has no size".to_owned()) } else { Ok(fit) }
}

/// Opens the root of the mount at `path`, without following links, and identifies it.
///
/// # Errors
/// When nothing is mounted there, or the same is mounted elsewhere, too.
pub(super) fn open_mount(path: &Path) -> Result<(OwnedFd, Identity), String> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory =
        openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS).map_err(|errno| match errno {
            Errno::LOOP | Errno::NOTDIR => "is not a directory any more".to_owned(),
            errno => format!("cannot be opened: {errno}"),
        })?;
    let id = statx(&directory, c"", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID).map_err(unusable)?.stx_mnt_id;
    let table = mounts().map_err(unusable)?;
    let Some(mounted) = table.iter().find(|mounted| mounted.id == id && mounted.at == path) else {
        return Err("is not a mount point".to_owned());
    };
    if let Some(other) = table.iter().find(|other| shows_the_same(other, mounted)) {
        return Err(format!("is in use: it is mounted at {}, too; unmount it there", other.at.display()));
    }
    if mounted.read_only {
        return Err("is mounted read-only".to_owned());
    }
    let identity = Identity::of_mount(mounted, &directory)?;
    Ok((directory, identity))
}

/// Whether something can be seen at `other` that is seen at `mounted`. Where a directory is bound, what the whole file system
/// is mounted at is no other use.
fn shows_the_same(other: &MountTableEntry, mounted: &MountTableEntry) -> bool {
    other.id != mounted.id && other.device == mounted.device && other.root.starts_with(&mounted.root)
}

fn open_device(path: &Path) -> Result<BlockDevice, String> {
    let device = block::open(path).map_err(|error| format!("cannot be opened: {error}"))?;
    match device.path() == path {
        true => Ok(device),
        false => Err("is a symbolic link".to_owned()),
    }
}

/// Opens a device for writing, exclusively, and identifies it.
///
/// # Errors
/// When it is in use.
pub(super) fn open_exclusive(path: &Path) -> Result<(File, u64, Identity), String> {
    let device = open_device(path)?;
    let file = device.exclusive().map_err(|cause| match cause.raw_os_error() {
        Some(libc::EBUSY) => "is in use by the node: mounted, swap, or a part of another device".to_owned(),
        _ => unusable(cause),
    })?;
    let size = device.size().map_err(unusable)?;
    Ok((file, size, Identity::of_device(&device)?))
}

fn unusable(cause: impl std::fmt::Display) -> String {
    format!("cannot be used: {cause}")
}
