//! Block volumes: block devices that containers get as they are (`volumeMode: Block`).
//!
//! ```text
//! ROOT/plugins/PLUGIN/volumeDevices/PV/UID         a symbolic link to the device, for each pod that has the device
//! ROOT/plugins/PLUGIN/volumeDevices/PV/.device     the record of the disk, until no pod has the device any more
//! ROOT/pods/UID/volumeDevices/PLUGIN/PV            a symbolic link to the device, where the kubelet makes one, too
//! ```
//!
//! 1. The supervisor holds the device open as long as the pod has it ([`BlockDevice`]), so the kernel gives the device's number to
//!    no other disk.
//! 2. `.device` has the kernel's sequence number of the disk (`diskseq`), which no other disk has until the next boot. If the
//!    supervisor is killed and the disk is replaced meanwhile, the next supervisor finds another disk at the path and refuses it.
//! 3. podfs records the pods that have the device as it records the users of a shared mount ([`GlobalMount`]). So a cleanup finds
//!    everything that a killed supervisor has left.

use std::fs::{self, DirBuilder};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, symlink};
use std::path::{Path, PathBuf};

use super::device::BlockDevice;
use super::disks::{Disk, read_record};
use super::global_mount::{GlobalMount, GlobalMountUser, LockedGlobalMount, remove_whole, write_whole};
use super::{HostError, HostSource};

/// The suffix of a plugin's name for the records of its block volumes.
const RECORDS: &str = "-devices";
/// The plugins that have block volumes, as directories.
const PLUGINS: [&str; 3] = ["kubernetes.io~local-volume", "kubernetes.io~host-path", "kubernetes.io~csi"];
/// The name of the record of the disk.
const DEVICE: &str = ".device";

/// A block volume of a pod.
#[derive(Clone, Debug)]
pub struct BlockVolume {
    mount: GlobalMount,
    /// The link in the pod's directory.
    link: PathBuf,
    root: PathBuf,
    uid: String,
}

impl BlockVolume {
    /// The PersistentVolume `name` of a plugin, for the pod `uid`, below the root directory `root`.
    pub fn new(root: &Path, plugin: &str, name: &str, uid: &str) -> BlockVolume {
        let place = root.join("plugins").join(plugin).join("volumeDevices").join(name);
        BlockVolume {
            mount: GlobalMount::new(root, &format!("{plugin}{RECORDS}"), name, place),
            link: root.join("pods").join(uid).join("volumeDevices").join(plugin).join(name),
            root: root.to_owned(),
            uid: uid.to_owned(),
        }
    }

    /// The path of the link to the device in the pod's directory.
    pub fn link(&self) -> &Path {
        &self.link
    }

    /// Makes the links to a device. The caller holds the device open until it has removed the links. `claim` is the pod's lock
    /// file.
    ///
    /// # Errors
    /// When other pods of the node have another disk as this volume, or a link cannot be made.
    pub fn map(&self, device: &BlockDevice, claim: &Path) -> Result<(), HostError> {
        self.mount.enter(GlobalMountUser { uid: &self.uid, claim }, |held| {
            let failed = |cause: io::Error| HostError::system("write", held.mount_point(), cause);
            let disk = Disk::of(device).map_err(failed)?;
            let record = held.mount_point().join(DEVICE);
            if let Some(before) = read_record::<Disk>(&record)?.filter(|before| before.differs_from(&disk)) {
                let ((major, minor), path) = (before.number(), device.path().display());
                return Err(HostError::Refused(format!(
                    "{path} is another disk than the one ({major}:{minor}) that pods of this node have as this volume; \
                     podfs hands it over when those pods have gone"
                )));
            }
            DirBuilder::new().recursive(true).mode(0o750).create(held.mount_point()).map_err(failed)?;
            write_whole(&record, &serde_json::to_vec(&disk).map_err(|error| failed(error.into()))?).map_err(failed)?;
            if let Some(parent) = self.link.parent() {
                DirBuilder::new().recursive(true).mode(0o750).create(parent).map_err(failed)?;
            }
            for link in [&held.mount_point().join(&self.uid), &self.link] {
                make_link(device.path(), link).map_err(|cause| HostError::system("make the link", link, cause))?;
            }
            Ok(())
        })
    }

    /// Removes the links, so that the pod no longer has the device.
    ///
    /// # Errors
    /// When a link cannot be removed.
    pub fn unmap(&self) -> Result<(), HostError> {
        let place = self.mount.mount_point();
        for link in [&self.link, &place.join(&self.uid)] {
            absent(fs::remove_file(link)).map_err(|cause| HostError::system("remove the link", link, cause))?;
        }
        remove_empty(self.link.parent(), &self.root.join("pods").join(&self.uid));
        if !self.mount.has_user(&self.uid) {
            return Ok(());
        }
        self.mount.leave(&self.uid, |held| clear(held, &self.root))
    }

    /// Removes the leftovers of a process that was killed while it removed the last pod's use of the device. If another process
    /// works on the volume now, these are no leftovers.
    fn sweep(&self) -> Result<(), HostError> {
        self.mount.sweep(|held| clear(held, &self.root)).map(drop)
    }
}

/// Removes the files that pods shared, when no pod has the device any more.
fn clear(held: &LockedGlobalMount<'_>, root: &Path) -> Result<(), HostError> {
    remove_whole(&held.mount_point().join(DEVICE))
        .map_err(|cause| HostError::system("clear", held.mount_point(), cause))?;
    remove_empty(Some(held.mount_point()), root);
    Ok(())
}

/// Removes the links of all block volumes of a pod that has ended. Returns the links that stay, each with the error.
pub fn unmap_all(root: &Path, uid: &str) -> Vec<(PathBuf, HostError)> {
    let records = |plugin: &str| format!("{plugin}{RECORDS}");
    let volumes = PLUGINS.into_iter().flat_map(|plugin| {
        let names = GlobalMount::names(root, &records(plugin), None);
        names.into_iter().map(move |name| BlockVolume::new(root, plugin, &name, uid))
    });
    let removed = |volume: BlockVolume| {
        let removed = match volume.mount.has_no_user() {
            true => volume.sweep(),
            false if volume.mount.has_user(uid) => volume.unmap(),
            false => Ok(()),
        };
        Some((volume.link, removed.err()?))
    };
    let failures = volumes.filter_map(removed).collect();
    // A process that was killed may have left the directories above the records empty.
    PLUGINS.into_iter().for_each(|plugin| GlobalMount::remove_empty(root, &records(plugin)));
    failures
}

/// Opens the block device at a path.
///
/// # Errors
/// When the path cannot be opened, or leads to no block device.
pub fn open(path: &Path) -> Result<BlockDevice, HostError> {
    let source = HostSource::open(path).map_err(|obstacle| HostError::Open {
        what: "block volume",
        path: path.to_owned(),
        obstacle,
    })?;
    BlockDevice::open(&source)
}

/// Makes a symbolic link to a device. Replaces a link or file at its path.
fn make_link(device: &Path, link: &Path) -> io::Result<()> {
    if fs::read_link(link).is_ok_and(|target| target == device) {
        return Ok(());
    }
    absent(fs::remove_file(link))?;
    symlink(device, link)
}

/// The outcome of a removal. A missing file or directory is no error.
fn absent(removed: io::Result<()>) -> io::Result<()> {
    removed.or_else(|error| if error.kind() == ErrorKind::NotFound { Ok(()) } else { Err(error) })
}

/// Removes a directory and the directories above it up to `top`, if they are empty.
fn remove_empty(directory: Option<&Path>, top: &Path) {
    let above = directory.into_iter().flat_map(Path::ancestors).take_while(|directory| *directory != top);
    for directory in above {
        if absent(fs::remove_dir(directory)).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::golden::{golden, values};

    #[test]
    fn the_record_of_a_disk_has_the_bytes_that_other_versions_read() {
        let [disk] = &values::<Disk>(golden!("block-device.json"))[..] else { panic!("one line") };
        assert_eq!(disk.number(), (8, 1));
    }

    #[test]
    fn a_disk_that_only_another_version_can_read_is_refused_and_stays() {
        let directory = tempfile::tempdir().expect("a directory");
        let record = directory.path().join(DEVICE);
        for unknown in [r#"{"version":2,"boot":"b1","number":[8,1],"sequence":5}"#, r#"{"serial":"s1"}"#] {
            fs::write(&record, unknown).expect("written");
            let refused = read_record::<Disk>(&record).expect_err(unknown).to_string();
            assert!(refused.contains(&record.display().to_string()), "{refused}");
            assert_eq!(fs::read_to_string(&record).expect("it stays"), unknown);
        }
    }
}
