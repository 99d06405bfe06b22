//! Growing a file system that is smaller than its device, while it is mounted, with resize2fs or xfs_growfs.

use std::ffi::OsStr;
use std::path::Path;

use super::BlockDevice;
use super::program::run;
use crate::host::HostError;

/// The offset of the superblock of ext2, ext3 and ext4 on the device, in bytes.
const EXT_SUPERBLOCK: u64 = 1024;
/// The offset of the superblock of xfs on the device, in bytes.
const XFS_SUPERBLOCK: u64 = 0;
const EXT_MAGIC: [u8; 2] = [0x53, 0xef];
const XFS_MAGIC: &[u8] = b"XFSB";

/// A file system that podfs can grow, with the size in its superblock.
struct SizedFilesystem {
    bytes: u64,
    /// The bytes of a block.
    block: u64,
    /// The program that grows the file system.
    program: &'static str,
    /// The Debian package of the program.
    package: &'static str,
}

/// Grows the file system to the size of its device, if the file system has fewer bytes than `capacity` and than the device. Returns
/// the size of the device if podfs has grown the file system.
///
/// # Errors
/// When the device does not answer, or the program fails.
pub(super) fn grow(device: &BlockDevice, capacity: u64, place: &Path) -> Result<Option<u64>, HostError> {
    let refused = |problem: String| {
        HostError::Refused(format!("cannot grow the file system of {}: {problem}", device.path().display()))
    };
    let unreadable = |cause: std::io::Error| refused(cause.to_string());
    let available = device.size().map_err(unreadable)?;
    let Some(SizedFilesystem { bytes, block, program, package }) = sized(device).map_err(unreadable)? else {
        return Ok(None);
    };
    if bytes >= capacity || available < bytes + block {
        return Ok(None);
    }
    let arguments: &[&OsStr] = match program {
        "xfs_growfs" => &[OsStr::new("-d"), place.as_os_str()],
        _ => &[device.path().as_os_str()],
    };
    let outcome = run(program, arguments, None).map_err(|obstacle| obstacle.needed(program, package))?;
    match outcome.code {
        Some(0) => Ok(Some(available)),
        _ => Err(refused(format!("{program} {}: {}", outcome.end(), outcome.words))),
    }
}

/// Whether podfs finds the superblock of a file system that it can grow.
///
/// # Errors
/// When the device does not answer.
pub(super) fn has_superblock(device: &BlockDevice) -> std::io::Result<bool> {
    Ok(sized(device)?.is_some())
}

/// The file system of a device, if podfs can grow it.
fn sized(device: &BlockDevice) -> std::io::Result<Option<SizedFilesystem>> {
    let mut xfs = [0; 16];
    device.read(&mut xfs, XFS_SUPERBLOCK)?;
    if xfs.starts_with(XFS_MAGIC) {
        let block = u64::from(u32::from_be_bytes([xfs[4], xfs[5], xfs[6], xfs[7]]));
        let mut blocks = [0; 8];
        blocks.copy_from_slice(&xfs[8..16]);
        let bytes = u64::from_be_bytes(blocks).saturating_mul(block);
        return Ok(Some(SizedFilesystem { bytes, block, program: "xfs_growfs", package: "xfsprogs" }));
    }
    let mut ext = [0; 1024];
    device.read(&mut ext, EXT_SUPERBLOCK)?;
    if ext[0x38..0x3a] != EXT_MAGIC {
        return Ok(None);
    }
    let word = |at: usize| u64::from(u32::from_le_bytes([ext[at], ext[at + 1], ext[at + 2], ext[at + 3]]));
    // The upper half of the number of blocks is valid only with the feature `64bit` (`s_feature_incompat`).
    let upper = if word(0x60) & 0x80 != 0 { word(0x150) << 32 } else { 0 };
    let block = 1024_u64.checked_shl(u32::try_from(word(0x18)).unwrap_or(u32::MAX)).unwrap_or(u64::MAX);
    let bytes = (word(0x4) | upper).saturating_mul(block);
    Ok(Some(SizedFilesystem { bytes, block, program: "resize2fs", package: "e2fsprogs" }))
}
