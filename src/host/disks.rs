//! Records of the disks that a pod has got. When a disk is unplugged, the kernel may give its number, and so its path, to another
//! disk. A supervisor that holds the disk open prevents that, but a supervisor may be killed.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::HostError;
use super::device::BlockDevice;
use super::global_mount::{boot_id, write_whole};
use crate::types::{is_blank, parse_record};

/// The identity of a disk until the next boot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Disk {
    /// The kernel's id of the boot.
    boot: String,
    /// The device number, major and minor.
    number: (u32, u32),
    /// The kernel's sequence number of the disk (`diskseq`), which no other disk has until the next boot.
    sequence: Option<u64>,
}

/// The disks that a pod sees as volumes, in a file that only its supervisors write.
#[derive(Debug)]
pub struct PodDisks(PathBuf);

/// A thread holds this lock while it reads and writes the file: several threads of the supervisor mount volumes of its pod at the
/// same time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

impl Disk {
    pub(super) fn of(device: &BlockDevice) -> io::Result<Disk> {
        Ok(Disk { boot: boot_id()?, number: device.number(), sequence: device.sequence() })
    }

    /// Whether the two are different disks. False if they were recorded in different boots, because podfs cannot compare them then.
    pub(super) fn differs_from(&self, other: &Disk) -> bool {
        self.boot == other.boot && self != other
    }

    /// The device number: major and minor.
    pub(super) fn number(&self) -> (u32, u32) {
        self.number
    }
}

impl PodDisks {
    /// The disks that are recorded in this file, which need not exist yet.
    pub fn of(file: PathBuf) -> PodDisks {
        PodDisks(file)
    }

    /// Records the disk of a volume.
    ///
    /// # Errors
    /// When the volume had another disk before, only another version of podfs can read the file, or it cannot be written.
    pub fn pin(&self, volume: &str, device: &BlockDevice) -> Result<(), HostError> {
        let failed = |cause: io::Error| HostError::system("write", &self.0, cause);
        let _turn = ONE_AT_A_TIME.lock().expect("no thread panics with it");
        let mut disks = self.read()?;
        let disk = Disk::of(device).map_err(failed)?;
        match disks.get(volume) {
            Some(before) if *before == disk => Ok(()),
            Some(before) if before.differs_from(&disk) => {
                let ((major, minor), path) = (before.number, device.path().display());
                Err(HostError::Refused(format!(
                    "{path} is another disk than the one ({major}:{minor}) that containers of the pod have as this volume; podfs \
                     hands it over when the pod is started anew"
                )))
            }
            _ => {
                disks.insert(volume.to_owned(), disk);
                self.write(&disks)
            }
        }
    }

    /// Removes the record of a volume that the pod no longer has.
    ///
    /// # Errors
    /// When only another version of podfs can read the file, or it cannot be written.
    pub fn forget(&self, volume: &str) -> Result<(), HostError> {
        let _turn = ONE_AT_A_TIME.lock().expect("no thread panics with it");
        let mut disks = self.read()?;
        if disks.remove(volume).is_some() { self.write(&disks) } else { Ok(()) }
    }

    fn read(&self) -> Result<BTreeMap<String, Disk>, HostError> {
        Ok(read_record(&self.0)?.unwrap_or_default())
    }

    fn write(&self, disks: &BTreeMap<String, Disk>) -> Result<(), HostError> {
        let failed = |cause: io::Error| HostError::system("write", &self.0, cause);
        let bytes = serde_json::to_vec(disks).map_err(|error| failed(error.into()))?;
        write_whole(&self.0, &bytes).map_err(failed)
    }
}

/// The record of disks in a file. `None` if there is no file, or it lost its content in a crash of the machine: the numbers of the
/// disks were those of an earlier boot.
///
/// # Errors
/// When this version of podfs cannot read the record. A disk in it must not count as forgotten.
pub(super) fn read_record<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, HostError> {
    let bytes = match fs::read(path) {
        Ok(bytes) if is_blank(&bytes) => return Ok(None),
        Ok(bytes) => bytes,
        Err(cause) if cause.kind() == ErrorKind::NotFound => return Ok(None),
        Err(cause) => return Err(HostError::system("read", path, cause)),
    };
    parse_record(&bytes).map(Some).map_err(|error| {
        HostError::Refused(format!(
            "podfs cannot use the record of disks {}: {error}; if no container has a disk of this volume, remove the file",
            path.display()
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::golden::{golden, values};

    #[test]
    fn the_disks_of_a_pod_have_the_bytes_that_other_versions_read() {
        let [disks] = &values::<BTreeMap<String, Disk>>(golden!("disks.json"))[..] else { panic!("one line") };
        assert_eq!(disks["a"], Disk { boot: "b1".to_owned(), number: (8, 1), sequence: Some(5) });
    }

    #[test]
    fn disks_that_only_another_version_can_read_are_refused_and_stay() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("disks.json");
        for unknown in [r#"{"version":2,"disks":{}}"#, r#"{"a":{"disk":"s1"}}"#, "{"] {
            fs::write(&file, unknown).expect("written");
            let refused = PodDisks::of(file.clone()).forget("a").expect_err(unknown).to_string();
            assert!(refused.contains(&format!("the record of disks {}: ", file.display())), "{refused}");
            assert_eq!(fs::read_to_string(&file).expect("it stays"), unknown);
        }
        for blank in ["", "\0\0"] {
            fs::write(&file, blank).expect("written");
            PodDisks::of(file.clone()).forget("a").expect("they were those of an earlier boot");
        }
    }
}
