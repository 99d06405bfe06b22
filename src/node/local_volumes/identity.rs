//! Which file system, or which disk, an entry is. A PersistentVolume records it from its creation, so podfs
//! does not erase another disk that was later put in the place of the entry.

use std::os::fd::AsFd;
use std::path::Path;

use podfs_fuse::mount::table::MountTableEntry;
use rustix::fs::fstatvfs;
use serde::{Deserialize, Serialize};

use super::error::InspectionError;
use crate::host::block;
use crate::host::device::{BlockDevice, file_system_id};
use crate::host::global_mount::boot_id;

/// File systems whose content is in memory: none of them outlives the boot.
const IN_MEMORY: [&str; 3] = ["tmpfs", "ramfs", "hugetlbfs"];

/// The identity of a file system, or of the part of it below one directory, or of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct DiskIdentity {
    /// An id that is the same after each boot, if the file system or disk has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    /// The root of the mount in its file system.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    root: Option<String>,
    /// The boot for which `device` and `number` are valid.
    boot: String,
    /// The device number.
    device: String,
    /// The kernel's sequence number of the disk, or the id that the file system reports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    number: Option<u64>,
}

impl DiskIdentity {
    /// The identity of a mount with the root `directory`.
    pub(super) fn of_mount(mounted: &MountTableEntry, directory: impl AsFd) -> Result<DiskIdentity, InspectionError> {
        let found = fstatvfs(directory).map_err(InspectionError::NoAnswer)?;
        Ok(DiskIdentity {
            id: id_of(mounted),
            root: Some(mounted.root.to_string_lossy().into_owned()),
            boot: boot()?,
            device: mounted.device.clone(),
            number: Some(found.f_fsid),
        })
    }

    /// The identity of a disk.
    pub(super) fn of_device(device: &BlockDevice) -> Result<DiskIdentity, InspectionError> {
        let (major, minor) = device.number();
        let id = device.serial();
        Ok(DiskIdentity {
            id,
            root: None,
            boot: boot()?,
            device: format!("{major}:{minor}"),
            number: device.sequence(),
        })
    }

    /// Whether both are certainly the same file system or disk. Without an id that survives a reboot, both have to be
    /// of the same boot.
    pub(super) fn is(&self, other: &DiskIdentity) -> bool {
        if self.root != other.root {
            return false;
        }
        match (&self.id, &other.id) {
            (Some(one), Some(other)) => one == other,
            (None, None) => (&self.boot, &self.device, self.number) == (&other.boot, &other.device, other.number),
            _ => false,
        }
    }
}

fn boot() -> Result<String, InspectionError> {
    boot_id().map_err(InspectionError::NoBootId)
}

/// An id that survives a reboot: the id of a file system on a device, or the source of another mount, such as an NFS
/// export.
fn id_of(mounted: &MountTableEntry) -> Option<String> {
    if IN_MEMORY.contains(&mounted.fs_type.as_str()) {
        return None;
    }
    let source = Path::new(&mounted.source);
    if source.starts_with("/dev") {
        // If blkid does not find an id, the file system has none that podfs could compare.
        let device = block::open(source).ok()?;
        return file_system_id(&device).ok()?.map(|id| format!("{} {id}", mounted.fs_type));
    }
    let names_something = mounted.source.contains(['/', ':']);
    names_something.then(|| format!("{} {}", mounted.fs_type, mounted.source))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::golden::{golden, values};

    fn identity(id: Option<&str>, boot: &str, device: &str, number: u64) -> DiskIdentity {
        let (id, root) = (id.map(str::to_owned), Some("/".to_owned()));
        DiskIdentity { id, root, boot: boot.to_owned(), device: device.to_owned(), number: Some(number) }
    }

    #[test]
    fn an_entry_is_recognised_after_a_boot_only_by_an_id() {
        let disk = identity(Some("ext4 a"), "1", "8:1", 5);
        assert!(disk.is(&identity(Some("ext4 a"), "2", "8:17", 6)));
        assert!(!disk.is(&identity(Some("ext4 b"), "1", "8:1", 5)));
        assert!(!disk.is(&identity(None, "1", "8:1", 5)), "its id cannot be read any more");
        let memory = identity(None, "1", "0:40", 5);
        assert!(memory.is(&memory));
        for other in [identity(None, "2", "0:40", 5), identity(None, "1", "0:41", 5), identity(None, "1", "0:40", 6)] {
            assert!(!memory.is(&other), "{other:?}");
        }
        assert!(!disk.is(&DiskIdentity { root: Some("/b".to_owned()), ..disk.clone() }), "another directory of it");
    }

    #[test]
    fn an_identity_has_the_bytes_that_other_versions_read() {
        let identities = values::<DiskIdentity>(golden!("disk-identity.jsonl"));
        assert!(identities[0].is(&identities[0]) && !identities[0].is(&identities[1]));
    }
}
