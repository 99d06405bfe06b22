//! The free space of a volume.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rustix::fs::fstatvfs;
use rustix::io::Errno;

use super::usage::QuotaUsage;
use crate::region::Region;
use crate::session::abi::Kstatfs;

/// The figures that `df(1)` shows for a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpaceUsage {
    /// All bytes, used and free.
    pub capacity: u64,
    /// Free bytes.
    pub free: u64,
    /// Free bytes that every user may use.
    pub available: u64,
    /// The most files that the volume can have; 0 where that is not known.
    pub inodes: u64,
    /// The number of files that can be added.
    pub inodes_free: u64,
}

impl SpaceUsage {
    /// Looks at a directory or file of the host, without any limit. Blocks for as long as its file system does.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn at(file: impl AsFd) -> io::Result<SpaceUsage> {
        Ok(Self::from(file_system_usage(file.as_fd())?))
    }

    /// As [`at`](Self::at), for a volume with this source, and with its limit in bytes.
    pub(crate) fn of(source: impl AsFd, limit: Option<u64>, region: &Arc<Region>) -> io::Result<SpaceUsage> {
        let whole = file_system_usage(source.as_fd())?;
        let usage = limit.map(|limit| QuotaUsage::inherit(limit, Arc::clone(region)));
        Ok(Self::from(usage.map_or(whole, |usage| usage.narrow(whole))))
    }
}

impl From<Kstatfs> for SpaceUsage {
    fn from(found: Kstatfs) -> SpaceUsage {
        let bytes = |blocks: u64| blocks.saturating_mul(u64::from(found.frsize));
        SpaceUsage {
            capacity: bytes(found.blocks),
            free: bytes(found.bfree),
            available: bytes(found.bavail),
            inodes: found.files,
            inodes_free: found.ffree,
        }
    }
}

/// The file system that a file is on, as a whole.
pub(super) fn file_system_usage(file: BorrowedFd<'_>) -> Result<Kstatfs, Errno> {
    let status = fstatvfs(file)?;
    Ok(Kstatfs {
        blocks: status.f_blocks,
        bfree: status.f_bfree,
        bavail: status.f_bavail,
        files: status.f_files,
        ffree: status.f_ffree,
        bsize: u32::try_from(status.f_bsize).unwrap_or(4096),
        namelen: u32::try_from(status.f_namemax).unwrap_or(255),
        frsize: u32::try_from(status.f_frsize).unwrap_or(4096),
        ..Default::default()
    })
}
