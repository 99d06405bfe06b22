//! Making a file system on a blank device.
//!
//! 1. Before mkfs starts, podfs writes and syncs a marker: a file with the path, the size and the identity of the disk, and the
//!    type and the UUID of the new file system. After mkfs has succeeded, podfs removes the marker and syncs its directory. It
//!    mounts the device only after that. If mkfs fails and has written nothing, podfs removes the marker, too.
//! 2. So if there is a marker, mkfs has failed, or mkfs or podfs was killed, and podfs has not mounted the device since. Then:
//!
//!    | on the device | what podfs does |
//!    |---|---|
//!    | nothing | formats the device like any blank device |
//!    | a file system of the marker's type and UUID in which a full check finds no error | uses the file system |
//!    | such a file system, in which the check finds an error | formats again: mkfs has made it, and no pod has used it |
//!    | data without a signature, on the disk of the marker | formats again: mkfs writes its signature last |
//!    | data without a signature, on a disk of the same path and size that podfs cannot tell to be the marker's | refuses it |
//!    | the superblock of a file system that blkid does not find | refuses it: this may be a file system with data |
//!    | anything else | removes the marker, because podfs did not write this, and treats the device like any other |
//!
//!    The path and the size are not enough: after a boot, or when disks are exchanged, another disk may have them.
//! 3. mkfs has the lock of the global mount as its standard input. If podfs is killed, the next process waits until mkfs has
//!    ended.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tracing::{info, warn};

use super::BlockDevice;
use super::content::{self, DeviceContent};
use super::program::run;
use crate::host::HostError;
use crate::host::global_mount::{LockedGlobalMount, boot_id, remove_whole, write_synced};
use crate::types::parse_record;

/// A file of the kernel with a new UUID at each read.
const RANDOM_UUID: &str = "/proc/sys/kernel/random/uuid";

/// The record of a device before podfs formats it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FormatMarker {
    device: PathBuf,
    size: u64,
    /// `None` if the disk has no serial number, and the kernel does not number disks. Earlier versions of podfs wrote none either.
    #[serde(default)]
    disk: Option<FormattedDisk>,
    kind: String,
    uuid: String,
}

/// The identity of a disk that podfs formats.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum FormattedDisk {
    /// Its serial number, which is the same after each boot.
    Serial(String),
    /// The kernel's sequence number of the disk, which no other disk has in this boot.
    Sequence { boot: String, number: u64 },
}

impl FormattedDisk {
    fn of(device: &BlockDevice) -> Option<FormattedDisk> {
        let in_boot = || Some(FormattedDisk::Sequence { boot: boot_id().ok()?, number: device.sequence()? });
        device.serial().map(FormattedDisk::Serial).or_else(in_boot)
    }
}

impl FormatMarker {
    /// The marker at `path`, if there is one.
    pub(super) fn read(path: &Path) -> Result<Option<FormatMarker>, HostError> {
        match fs::read(path) {
            Err(cause) if cause.kind() == ErrorKind::NotFound => Ok(None),
            read => {
                let bytes = read.map_err(|cause| HostError::system("read", path, cause))?;
                parse_record(&bytes).map(Some).map_err(|error| {
                    HostError::Refused(format!(
                        "podfs cannot use the record of a disk that it began to format, {}: {error}; if the data on the disk is not \
                         needed, erase the disk with blkdiscard or dd, and remove the file",
                        path.display()
                    ))
                })
            }
        }
    }

    fn write(&self, path: &Path) -> Result<(), HostError> {
        let write = || -> io::Result<()> {
            if let Some(parent) = path.parent() {
                DirBuilder::new().recursive(true).mode(0o750).create(parent)?;
            }
            write_synced(path, &serde_json::to_vec(self)?)
        };
        // Another process may remove the directory while it is empty. Then podfs tries again.
        let written = (0..100).map(|_| write()).find(|written| !is_gone(written)).unwrap_or_else(write);
        written.map_err(|cause| HostError::system("write", path, cause))
    }

    /// Whether the device has the path and the size of the one that podfs was about to format.
    fn is_like(&self, device: &BlockDevice) -> bool {
        self.device == device.path() && device.size().is_ok_and(|size| size == self.size)
    }

    /// Whether the device is on the disk that podfs was about to format. False if podfs cannot tell.
    fn is_on_disk_of(&self, device: &BlockDevice) -> bool {
        self.disk.is_some() && self.disk == FormattedDisk::of(device)
    }
}

/// Whether a write failed because its directory is gone.
fn is_gone(written: &io::Result<()>) -> bool {
    written.as_ref().is_err_and(|cause| cause.kind() == ErrorKind::NotFound)
}

/// Removes a marker, and the empty directories above it that podfs has made for markers.
fn remove(path: &Path) -> Result<(), HostError> {
    let remove = || -> io::Result<()> {
        remove_whole(path)?;
        let Some(parent) = path.parent() else { return Ok(()) };
        File::open(parent)?.sync_all()?;
        parent.ancestors().take(3).all(|directory| fs::remove_dir(directory).is_ok());
        Ok(())
    };
    remove().map_err(|cause| HostError::system("remove", path, cause))
}

/// Makes a file system on a blank device.
///
/// # Errors
/// When podfs does not make file systems of this type, the device is in use, or mkfs fails.
pub(super) fn format(
    device: &BlockDevice,
    kind: &str,
    marker: &Path,
    held: &LockedGlobalMount<'_>,
) -> Result<(), HostError> {
    let path = device.path();
    let refused = |problem: String| HostError::Refused(format!("cannot format {}: {problem}", path.display()));
    if !matches!(kind, "ext3" | "ext4" | "xfs") {
        return Err(refused(format!("podfs makes ext4, ext3 and xfs; make the file system with mkfs.{kind}")));
    }
    let failed = |cause| HostError::system("format", path, cause);
    if device.is_in_use().map_err(failed)? {
        return Err(refused("the node uses it already; give the volume another device".to_owned()));
    }
    let uuid = fs::read_to_string(RANDOM_UUID).map_err(failed)?.trim().to_owned();
    let size = device.size().map_err(failed)?;
    let disk = FormattedDisk::of(device);
    FormatMarker { device: path.to_owned(), size, disk, kind: kind.to_owned(), uuid: uuid.clone() }.write(marker)?;
    let began = std::time::Instant::now();
    if let Err(error) = make(device, kind, &uuid, held) {
        // A marker that stayed would be taken for that of data that another program writes later.
        if matches!(content::probe(device), Ok(DeviceContent::Blank)) {
            remove(marker).unwrap_or_else(|error| warn!("{error}"));
        }
        return Err(error);
    }
    remove(marker)?;
    info!("{} was blank and has a new file system ({kind}) after {} ms", path.display(), began.elapsed().as_millis());
    Ok(())
}

/// Runs mkfs.
fn make(device: &BlockDevice, kind: &str, uuid: &str, held: &LockedGlobalMount<'_>) -> Result<(), HostError> {
    let refused = |problem: String| HostError::Refused(format!("cannot format {}: {problem}", device.path().display()));
    if !device.is_at_path() {
        return Err(refused("its path leads to another device by now; podfs tries again".to_owned()));
    }
    let program = format!("mkfs.{kind}");
    let xfs_uuid = format!("uuid={uuid}");
    let (arguments, package): (&[&str], _) = match kind {
        "xfs" => (&["-f", "-m", &xfs_uuid], "xfsprogs"),
        _ => (&["-F", "-m0", "-U", uuid], "e2fsprogs"),
    };
    let mut arguments: Vec<&OsStr> = arguments.iter().map(OsStr::new).collect();
    arguments.push(device.path().as_os_str());
    let outcome = run(&program, &arguments, Some(held)).map_err(|obstacle| obstacle.needed(&program, package))?;
    match outcome.code {
        Some(0) => Ok(()),
        _ => Err(refused(format!("{program} {}: {}", outcome.end(), outcome.words))),
    }
}

/// Repairs an interrupted format, as the marker at `path` records it. Returns the content of the device after that.
///
/// # Errors
/// When the device cannot be checked or formatted again, or podfs cannot tell whether it is the marker's.
pub(super) fn judge(
    marker: &FormatMarker,
    content: DeviceContent,
    device: &BlockDevice,
    path: &Path,
    held: &LockedGlobalMount<'_>,
) -> Result<DeviceContent, HostError> {
    let device_path = device.path().display();
    let is_own = match &content {
        DeviceContent::FileSystem { kind, uuid } => *kind == marker.kind && uuid.as_ref() == Some(&marker.uuid),
        // The caller refuses the device. The marker stays: blkid may find the file system later.
        DeviceContent::Hidden => return Ok(content),
        DeviceContent::Remains if marker.is_like(device) && !marker.is_on_disk_of(device) => {
            return Err(HostError::Refused(format!(
                "{device_path} is not blank, and podfs cannot tell whether it is the disk at this path that podfs began to \
                 format: podfs formats nothing over it; if its data is not needed, erase it with blkdiscard or dd"
            )));
        }
        DeviceContent::Remains => marker.is_like(device),
        _ => false,
    };
    if !is_own {
        remove(path)?;
        return Ok(content);
    }
    if matches!(content, DeviceContent::FileSystem { .. }) && is_whole(device, &marker.kind, held)? {
        info!("{device_path} was formatted by a podfs that was killed, and its file system is whole");
    } else {
        if device.is_read_only() {
            return Err(HostError::Refused(format!(
                "the formatting of {device_path} did not end, and the device is read-only now; make it writable"
            )));
        }
        info!("the formatting of {device_path} did not end; podfs formats it again");
        make(device, &marker.kind, &marker.uuid, held)?;
    }
    remove(path)?;
    Ok(DeviceContent::FileSystem { kind: marker.kind.clone(), uuid: Some(marker.uuid.clone()) })
}

/// Whether a full check finds no error in the file system.
fn is_whole(device: &BlockDevice, kind: &str, held: &LockedGlobalMount<'_>) -> Result<bool, HostError> {
    let (program, arguments, package): (_, &[&str], _) = match kind {
        "xfs" => ("xfs_repair", &["-n"], "xfsprogs"),
        _ => ("e2fsck", &["-n", "-f"], "e2fsprogs"),
    };
    let mut arguments: Vec<&OsStr> = arguments.iter().map(OsStr::new).collect();
    arguments.push(device.path().as_os_str());
    let outcome = run(program, &arguments, Some(held)).map_err(|obstacle| obstacle.needed(program, package))?;
    Ok(outcome.code == Some(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::golden::{golden, values};

    #[test]
    fn a_marker_has_the_bytes_that_other_versions_read() {
        let markers = values::<FormatMarker>(golden!("formatting.jsonl"));
        let kinds: Vec<_> = markers.iter().map(|marker| marker.kind.as_str()).collect();
        assert_eq!(kinds, ["ext4", "xfs", "ext3"]);
        assert!(markers[0].disk != markers[1].disk && markers[2].disk.is_none());
    }

    #[test]
    fn a_marker_that_only_another_version_can_read_is_refused_and_stays() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("marker");
        let recorded = golden!("formatting.jsonl").lines().next().expect("a line");
        let later = recorded.replacen('{', r#"{"version":2,"#, 1);
        for unknown in [later, recorded.replace("serial", "wwn")] {
            fs::write(&path, &unknown).expect("written");
            let refused = FormatMarker::read(&path).expect_err("unknown").to_string();
            assert!(refused.contains(&format!("began to format, {}: ", path.display())), "{refused}");
            assert_eq!(fs::read_to_string(&path).expect("it stays"), unknown);
        }
    }
}
