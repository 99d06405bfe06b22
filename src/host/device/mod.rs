//! Block devices of the node: inspecting, formatting, checking, mounting and growing them.
//!
//! | module | owns |
//! |---|---|
//! | `pinned` | a device that podfs holds open, so that the kernel gives its number to no other device |
//! | `content` | the content of a device: none, a file system, or data that podfs does not touch |
//! | `format` | making a file system on a blank device, and repairing an interrupted format |
//! | `check` | `fsck -a`, and the meaning of its exit codes |
//! | `options` | mount options, as the kernel takes them |
//! | `attach` | mounting and unmounting |
//! | `erase` | making every byte of a device zero |
//! | `grow` | growing a file system that is smaller than its device |
//! | `program` | running mkfs, fsck, blkid and similar programs |
//!
//! [`mount`] does for a device what the kubelet's SafeFormatAndMount does, with more care for data:
//!
//! 1. podfs holds the device open from before the inspection until it is mounted, so no other device can get its number.
//! 2. podfs formats only a device without any known signature, and only if its first MiB and its last 64 KiB are zero. The kubelet
//!    formats any device whose data has no signature that libblkid knows.
//! 3. podfs records a device before it formats it. So it never mounts an incomplete file system of a killed mkfs (`format`).
//! 4. podfs checks a file system before it mounts it, unless the mount is read-only. It does not mount a file system that `fsck -a`
//!    cannot repair.

mod attach;
mod check;
mod content;
mod erase;
mod format;
mod grow;
mod options;
mod pinned;
mod program;

use std::path::Path;

use tracing::{info, warn};

pub use attach::unmount;
pub use erase::erase;
pub use pinned::BlockDevice;

use super::HostError;
use super::global_mount::LockedGlobalMount;
use content::DeviceContent;
use format::FormatMarker;
use options::DeviceMountOptions;

/// The parameters of the mount of a block device.
#[derive(Clone, Copy, Debug)]
pub struct DeviceMountRequest<'a> {
    /// The type of the file system. `None` for whichever type the device has, or ext4 for a blank device.
    pub fs_type: Option<&'a str>,
    /// The options of the mount, in the words of mount(8).
    pub options: &'a [String],
    /// The path for the record that podfs formats the device. The file is on a disk, and no other volume has the same path.
    pub marker: &'a Path,
}

/// Mounts the file system of a device at the mount point of `held`, and formats the device first if it is blank. Mounts nothing if
/// the device is mounted there already. Returns whether the mount is read-only.
///
/// # Errors
/// When the device is in use, holds other data, or cannot be formatted, checked or mounted.
pub fn mount(
    device: &BlockDevice,
    request: DeviceMountRequest<'_>,
    held: &LockedGlobalMount<'_>,
) -> Result<bool, HostError> {
    let options = DeviceMountOptions::parse(request.options)?;
    let is_mounted = held.is_mounted().map_err(|cause| HostError::system("look at", held.mount_point(), cause))?;
    if is_mounted {
        attach::check_mounted(device, held.mount_point())?;
    } else {
        let read_only = options.read_only || device.is_read_only();
        if read_only && !options.read_only {
            warn!("{} is read-only media; its file system is mounted read-only", device.path().display());
        }
        let kind = make_ready(device, request, read_only, held)?;
        attach::mount(device, &kind, &options, read_only, held.mount_point())?;
        info!("{} ({kind}) is mounted at {}", device.path().display(), held.mount_point().display());
    }
    attach::is_read_only(held.mount_point())
}

/// Why podfs must not offer the device as a volume, such as a partition table on it. `None` if the device is blank, has a file
/// system, or has data without a signature.
///
/// # Errors
/// When it cannot be read, or blkid is not installed or fails.
pub fn foreign_content(device: &BlockDevice) -> Result<Option<String>, HostError> {
    Ok(match content::probe(device)? {
        DeviceContent::Blank | DeviceContent::Remains | DeviceContent::FileSystem { .. } => None,
        DeviceContent::Hidden => Some("blkid does not find its file system".to_owned()),
        DeviceContent::Partitions(table) => Some(format!("it has a partition table ({table})")),
        DeviceContent::Other(kind) => Some(format!("it holds {kind}")),
        DeviceContent::Ambiguous => Some("it has the signatures of several file systems".to_owned()),
    })
}

/// The id of the file system on a device, if it has one.
///
/// # Errors
/// When it cannot be read, or blkid is not installed or fails.
pub fn file_system_id(device: &BlockDevice) -> Result<Option<String>, HostError> {
    match content::probe(device)? {
        DeviceContent::FileSystem { uuid, .. } => Ok(uuid),
        _ => Ok(None),
    }
}

/// Grows the file system at `place` to its device, if it has fewer bytes than `capacity` and can be written to.
///
/// # Errors
/// When the device does not answer, or the file system cannot be grown. The file system can still be used with its size.
pub fn grow(device: &BlockDevice, capacity: Option<u64>, place: &Path) -> Result<(), HostError> {
    let Some(capacity) = capacity else { return Ok(()) };
    if attach::is_read_only(place)? {
        return Ok(());
    }
    if let Some(bytes) = grow::grow(device, capacity, place)? {
        info!("the file system of {} was grown to {bytes} bytes", device.path().display());
    }
    Ok(())
}

/// Prepares the device for a mount: formats it if it is blank, or checks its file system. Returns the type of the file system.
fn make_ready(
    device: &BlockDevice,
    request: DeviceMountRequest<'_>,
    read_only: bool,
    held: &LockedGlobalMount<'_>,
) -> Result<String, HostError> {
    let path = device.path().display();
    let mut content = content::probe(device)?;
    if let Some(marker) = FormatMarker::read(request.marker)? {
        content = format::judge(&marker, content, device, request.marker, held)?;
    }
    let wanted = request.fs_type.filter(|wanted| !wanted.is_empty());
    match content {
        DeviceContent::FileSystem { kind, .. } => {
            if let Some(wanted) = wanted.filter(|wanted| *wanted != kind) {
                return Err(HostError::Refused(format!(
                    "failed to mount the volume as {wanted:?}, it already contains {kind}; correct the PersistentVolume's \
                     fsType, or its path {path}"
                )));
            }
            if !read_only {
                check::check(device, held)?;
            }
            Ok(kind)
        }
        DeviceContent::Blank => {
            let kind = wanted.unwrap_or("ext4");
            if read_only {
                return Err(HostError::Refused(format!(
                    "cannot mount unformatted disk {path} as it is in read-only mode; format it, or make it writable"
                )));
            }
            format::format(device, kind, request.marker, held)?;
            Ok(kind.to_owned())
        }
        DeviceContent::Partitions(table) => Err(HostError::Refused(format!(
            "{path} has a partition table ({table}), and podfs formats blank devices only; give the volume one of its \
             partitions, or remove the table with wipefs and blkdiscard"
        ))),
        DeviceContent::Other(kind) => Err(HostError::Refused(format!(
            "{path} holds {kind}, which is no file system, and podfs formats blank devices only; give the volume another \
             device, or erase this one with blkdiscard"
        ))),
        DeviceContent::Ambiguous => Err(HostError::Refused(format!(
            "{path} has the signatures of several file systems, and podfs formats blank devices only; remove the wrong one \
             with wipefs"
        ))),
        DeviceContent::Hidden => Err(HostError::Refused(format!(
            "{path} has the superblock of a file system, and blkid finds none: the file system is damaged, or parts of the disk \
             cannot be read; see the kernel's log, and repair it or replace the disk; podfs neither mounts nor formats it"
        ))),
        DeviceContent::Remains => Err(HostError::Refused(format!(
            "{path} has no signature of a file system but is not blank, and podfs formats blank devices only; if its data \
             is not needed, erase it with blkdiscard or dd"
        ))),
    }
}
