//! Which file system, or which disk, an entry is. A PersistentVolume records it from its creation, so podfs
//! does not erase a disk that was put in its place later.

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

/// A file system from one of its directories on, or a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Identity {
    /// What it says of itself, the same after each boot, if it says something.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    /// Which directory of the file system it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    root: Option<String>,
    /// The boot since which the rest is true.
    boot: String,
    /// The device number.
    device: String,
    /// The kernel's number for the disk, or the file system's for itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    number: Option<u64>,
}

impl Identity {
    /// That of a mount, of which `directory` is the root.
    pub(super) fn of_mount(mounted: &MountTableEntry, directory: impl AsFd) -> Result<Identity, InspectionError> {
        let found = fstatvfs(directory).map_err(InspectionError::NoAnswer)?;
        Ok(Identity {
            id: id_of(mounted),
            root: Some(mounted.root.to_string_lossy().into_owned()),
            boot: boot()?,
            device: mounted.device.clone(),
            number: Some(found.f_fsid),
        })
    }

    /// That of a disk.
    pub(super) fn of_device(device: &BlockDevice) -> Result<Identity, InspectionError> {
        let (major, minor) = device.number();
        let id = device.serial();
        Ok(Identity { id, root: None, boot: boot()?, device: format!("{major}:{minor}"), number: device.sequence() })
    }

    /// Whether both are surely the same. Where nothing outlives the boot, only the same boot tells.
    pub(super) fn is(&self, other: &Identity) -> bool {
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

/// What outlives the boot: the id of a file system on a device, or what another one is a mount of, such as an export.
fn id_of(mounted: &MountTableEntry) -> Option<String> {
    if IN_MEMORY.contains(&mounted.fs_type.as_str()) {
        return None;
    }
    let source = Path::new(&mounted.source);
    if source.starts_with("/dev") {
        // If blkid cannot say it, the file system has no id that podfs could compare.
        let device = block::open(source).ok()?;
        return file_system_id(&device).ok()?.map(|id| format!("{} {id}", mounted.fs_type));
    }
    let names_something = mounted.source.contains(['/', ':']);
    names_something.then(|| format!("{} {}", mounted.fs_type, mounted.source))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(id: Option<&str>, boot: &str, device: &str, number: u64) -> Identity {
        let (id, root) = (id.map(str::to_owned), Some("/".to_owned()));
        Identity { id, root, boot: boot.to_owned(), device: device.to_owned(), number: Some(number) }
    }

    #[test]
    fn what_has_an_id_is_known_after_a_boot_and_everything_else_is_not() {
        let disk = identity(Some("ext4 a"), "1", "8:1", 5);
        assert!(disk.is(&identity(Some("ext4 a"), "2", "8:17", 6)));
        assert!(!disk.is(&identity(Some("ext4 b"), "1", "8:1", 5)));
        assert!(!disk.is(&identity(None, "1", "8:1", 5)), "its id cannot be read any more");
        let memory = identity(None, "1", "0:40", 5);
        assert!(memory.is(&memory));
        for other in [identity(None, "2", "0:40", 5), identity(None, "1", "0:41", 5), identity(None, "1", "0:40", 6)] {
            assert!(!memory.is(&other), "{other:?}");
        }
        assert!(!disk.is(&Identity { root: Some("/b".to_owned()), ..disk.clone() }), "another directory of it");
    }
}
