//! The record of an erasure that has begun: a file for each PersistentVolume, below the root directory.
//!
//! ```text
//! ROOT/plugins/podfs/local-volumes/NAME.json
//! ```

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder};
use std::io::{self, ErrorKind};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::identity::DiskIdentity;
use super::volume::LocalVolume;
use crate::host::global_mount::{remove_whole, write_synced};
use crate::manifest::objects::VolumeMode;
use crate::types::parse_record;

/// The directory of the records, below the root directory.
pub(super) const DIRECTORY: &str = "plugins/podfs/local-volumes";
/// What follows the name of the PersistentVolume in the name of its record.
pub(super) const SUFFIX: &str = ".json";

/// A PersistentVolume whose erasure has begun.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ErasureRecord {
    /// The name of the PersistentVolume.
    pub(super) volume: String,
    /// Its uid.
    pub(super) uid: String,
    /// The uid of the claim that had it.
    pub(super) claim: String,
    pub(super) path: PathBuf,
    /// Whether it is a device.
    pub(super) is_device: bool,
    pub(super) identity: DiskIdentity,
    /// How many bytes of the device are zero.
    pub(super) erased: u64,
    /// Whether everything is erased, and synced to the disk.
    pub(super) is_done: bool,
}

/// The records of a node. A record that this version of podfs cannot read is `None`.
#[derive(Debug)]
pub(super) struct Records {
    directory: PathBuf,
    pub(super) by_name: BTreeMap<String, Option<ErasureRecord>>,
}

impl ErasureRecord {
    /// The record of a volume before its erasure; `None` if podfs may not erase it.
    pub(super) fn of(volume: &LocalVolume) -> Option<ErasureRecord> {
        Some(ErasureRecord {
            volume: volume.name.clone(),
            uid: volume.uid.clone(),
            claim: volume.claim.clone()?,
            path: volume.path.clone()?,
            is_device: volume.mode == VolumeMode::Block,
            identity: volume.own.clone()?,
            erased: 0,
            is_done: false,
        })
    }
}

impl Records {
    /// Reads the records below a root directory.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub(super) fn read(root: &Path) -> io::Result<Records> {
        let directory = root.join(DIRECTORY);
        let mut by_name = BTreeMap::new();
        let entries = match fs::read_dir(&directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Records { directory, by_name }),
            Err(error) => return Err(error),
        };
        for entry in entries {
            let entry = entry?;
            let file = entry.file_name().to_string_lossy().into_owned();
            // A file whose name begins with a dot was never complete.
            if let Some(name) = file.strip_suffix(SUFFIX).filter(|name| !name.starts_with('.')) {
                let record = fs::read(entry.path()).ok().and_then(|bytes| parse_record::<ErasureRecord>(&bytes).ok());
                by_name.insert(name.to_owned(), record.filter(|record| record.volume == name));
            }
        }
        Ok(Records { directory, by_name })
    }

    /// The file for the record of a PersistentVolume.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.directory.join(format!("{name}{SUFFIX}"))
    }

    /// Removes a record.
    ///
    /// # Errors
    /// When the file cannot be removed.
    pub(super) fn remove(&mut self, name: &str) -> io::Result<()> {
        remove_whole(&self.file(name))?;
        self.by_name.remove(name);
        Ok(())
    }
}

/// Writes a record to its file, and syncs it to the disk.
///
/// # Errors
/// When it cannot be written.
pub(super) fn write(file: &Path, record: &ErasureRecord) -> io::Result<()> {
    if let Some(directory) = file.parent() {
        DirBuilder::new().recursive(true).mode(0o750).create(directory)?;
    }
    write_synced(file, &serde_json::to_vec(record)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::golden::{golden, values};

    #[test]
    fn a_record_has_the_bytes_that_other_versions_read() {
        let [record] = &values::<ErasureRecord>(golden!("erasure.json"))[..] else { panic!("one line") };
        assert_eq!((record.volume.as_str(), record.erased, record.is_done), ("pv-1", 4096, false));
    }

    #[test]
    fn a_record_that_only_another_version_can_read_is_known_by_its_name_and_stays() {
        let root = tempfile::tempdir().expect("a directory");
        let file = root.path().join(DIRECTORY).join("pv-1.json");
        fs::create_dir_all(file.parent().expect("a directory")).expect("made");
        let later = golden!("erasure.json").replacen('{', r#"{"version":2,"#, 1);
        for unknown in [later.as_str(), r#"{"volume":"pv-1","steps":[]}"#, ""] {
            fs::write(&file, unknown).expect("written");
            let records = Records::read(root.path()).expect("read");
            assert_eq!(records.by_name.get("pv-1"), Some(&None), "{unknown}");
            assert_eq!(fs::read_to_string(&file).expect("it stays"), unknown);
        }
    }
}
