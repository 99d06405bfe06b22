//! The home of a volume: a directory of the pod in which a driver mounts the volume, with a record of podfs's calls to the driver.
//!
//! The driver mounts at `<root>/pods/UID/plugins/KIND/NAME/mount`. The record beside it is `vol_data.json`, in the kubelet's format
//! with additional fields. NAME is the name of the PersistentVolume, or of the volume in the pod.

use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use podfs_fuse::mount::table::mounts;
use rustix::fs::{FlockOperation, flock};
use rustix::io::{Errno, retry_on_intr};
use serde::{Deserialize, Serialize};
use tracing::warn;

use super::unfinished::CallRecord;
use crate::host::global_mount::{remove_whole, unfinished, write_synced};
use crate::types::{UnusableRecord, parse_record};
use crate::volume::Csi;
use crate::volume::csi::sha256;

/// The directory of a pod for the files of drivers and of kinds of volumes.
const PLUGINS: &str = "plugins";
const RECORD: &str = "vol_data.json";
const TARGET: &str = "mount";
/// Most bytes of the file name of a home among the users of a node mount. The kernel allows 255, and the temporary file of a
/// record has a longer name.
const LONGEST_NAME: usize = 240;
/// The extension of the temporary files of older versions.
const NEXT: &str = "next";

/// The directory in which a driver mounts a volume for a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverHome(PathBuf);

/// The lock of a home, while podfs calls the driver. No other thread and no other process calls the driver for the volume meanwhile.
#[derive(Debug)]
pub(super) struct HomeLock {
    _directory: File,
}

/// The calls of podfs to a driver, for the process that undoes them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DriverRecord {
    /// The driver's name.
    pub driver_name: String,
    /// The driver's handle of the volume.
    pub volume_handle: String,
    /// The name of the PersistentVolume, or of the volume in the pod.
    #[serde(rename = "specVolID")]
    pub spec_vol_id: String,
    /// The name of the node.
    pub node_name: String,
    /// The name of the VolumeAttachment.
    #[serde(rename = "attachmentID")]
    pub attachment_id: String,
    /// `Persistent` or `Ephemeral`.
    pub volume_lifecycle_mode: String,
    /// The name of the volume in the pod.
    pub volume: String,
    /// The program of a FlexVolume driver.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub executable: Option<PathBuf>,
    /// The directory in which the driver mounts the volume for the node, if the driver does so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_mount: Option<PathBuf>,
    /// The capacity of the PersistentVolume at the last call to grow the volume, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capacity: Option<u64>,
    /// The size to which the driver has grown the volume on this node, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expanded: Option<u64>,
    /// Whether podfs has called the driver to attach the volume.
    pub attached: bool,
    /// Whether podfs has called the driver to mount the volume at the home.
    pub published: bool,
    /// Whether it has done so read-only; none in the record of an earlier version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub published_read_only: Option<bool>,
}

/// The record of a driver's volume is damaged, or cannot be read.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot read the record of a driver's volume, {}: {cause}; unmount the volume with the driver's tools, then delete the file",
    .path.display()
)]
pub struct DriverRecordError {
    path: PathBuf,
    #[source]
    cause: UnusableRecord,
}

impl DriverHome {
    /// The home of the volume with this name and kind in the directory of a pod. Slashes in the name become `~`.
    pub fn of(pod: &Path, kind: &str, name: &str) -> DriverHome {
        DriverHome(pod.join(PLUGINS).join(kind).join(name.replace('/', "~")))
    }

    /// The home in this directory.
    pub(super) fn at(path: PathBuf) -> DriverHome {
        DriverHome(path)
    }

    /// All homes of a pod with their records. The record is empty if it is damaged, or if podfs was killed while it wrote the home's
    /// first record.
    pub fn all(pod: &Path) -> Vec<(DriverHome, DriverRecord)> {
        let entries = |directory: &Path| {
            let entries = directory.read_dir().into_iter().flatten().flatten();
            entries.map(|entry| entry.path()).filter(|path| path.is_dir() && !path.is_symlink()).collect::<Vec<_>>()
        };
        let homes = entries(&pod.join(PLUGINS)).into_iter().flat_map(|kind| entries(&kind)).map(DriverHome);
        let first = |home: &DriverHome| {
            home.unfinished_records().iter().any(|file| file.exists()) || CallRecord::of_home(home.path()).exists()
        };
        let record = |home: &DriverHome| match home.read() {
            Ok(None) => first(home).then(DriverRecord::default),
            read => Some(read.ok().flatten().unwrap_or_default()),
        };
        homes.filter_map(|home| record(&home).map(|record| (home, record))).collect()
    }

    /// The home of the CSI volume at this path of a pod:
    /// `<pod>/volumes/kubernetes.io~csi/<name>/mount`, or `<pod>/volumeDevices/kubernetes.io~csi/<name>`.
    pub fn of_csi(path: &Path) -> Option<DriverHome> {
        let of = |name: &Path, kind: &str| {
            let of_csi = name.parent().filter(|above| above.ends_with(Path::new(kind).join(Csi::DIRECTORY)))?;
            Some(DriverHome::of(of_csi.ancestors().nth(2)?, Csi::DIRECTORY, name.file_name()?.to_str()?))
        };
        let mounted = path.parent().filter(|_| path.ends_with("mount"));
        mounted.and_then(|name| of(name, "volumes")).or_else(|| of(path, "volumeDevices"))
    }

    /// Its directory.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Takes the lock for calls to the driver. Waits while another thread or process has it.
    ///
    /// # Errors
    /// When the home does not exist.
    pub(super) fn lock(&self) -> io::Result<HomeLock> {
        loop {
            let directory = File::open(&self.0)?;
            retry_on_intr(|| flock(&directory, FlockOperation::LockExclusive))?;
            if let Some(lock) = self.lock_of(directory)? {
                return Ok(lock);
            }
        }
    }

    /// Takes the lock, unless another thread or process has it.
    ///
    /// # Errors
    /// When the home does not exist.
    pub(super) fn try_lock(&self) -> io::Result<Option<HomeLock>> {
        let directory = File::open(&self.0)?;
        match retry_on_intr(|| flock(&directory, FlockOperation::NonBlockingLockExclusive)) {
            Err(Errno::WOULDBLOCK) => Ok(None),
            locked => locked.map_err(io::Error::from).and_then(|()| self.lock_of(directory)),
        }
    }

    /// The lock of this locked directory, unless the process that had the lock before has removed the home meanwhile.
    fn lock_of(&self, directory: File) -> io::Result<Option<HomeLock>> {
        let (locked, present) = (directory.metadata()?, fs::metadata(&self.0)?);
        let is_present = (locked.dev(), locked.ino()) == (present.dev(), present.ino());
        Ok(is_present.then_some(HomeLock { _directory: directory }))
    }

    /// Whether the driver of the home is a CSI driver.
    pub(super) fn is_of_csi(&self) -> bool {
        self.0.parent().is_some_and(|kind| kind.ends_with(Csi::DIRECTORY))
    }

    /// The directory on which the driver mounts.
    pub fn target(&self) -> PathBuf {
        self.0.join(TARGET)
    }

    /// Whether a file system is mounted at the target.
    ///
    /// # Errors
    /// When the mount table cannot be read.
    pub fn is_mounted(&self) -> io::Result<bool> {
        is_mount(&self.target())
    }

    /// Makes the directory on which the driver mounts.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn make_target(&self) -> io::Result<PathBuf> {
        let target = self.target();
        make_directory(&target)?;
        Ok(target)
    }

    /// The record of the calls to the driver; `None` if there were none, or all are undone.
    ///
    /// # Errors
    /// When the record is damaged, or cannot be read.
    pub fn read(&self) -> Result<Option<DriverRecord>, DriverRecordError> {
        let read = match fs::read(self.record_file()) {
            Ok(bytes) => parse_record(&bytes).map(Some),
            Err(error) => absent_is_fine(Err(error)).map(|()| None).map_err(UnusableRecord::from),
        };
        read.map_err(|cause| DriverRecordError { path: self.record_file(), cause })
    }

    /// The record of an earlier podfs for a new call to the driver. podfs writes a new record in place of a damaged one.
    ///
    /// # Errors
    /// When only another version of podfs can use the record.
    pub(super) fn read_or_begin(&self) -> Result<DriverRecord, DriverRecordError> {
        match self.read() {
            Err(error) if error.cause.is_of_other_version() => Err(error),
            Err(error) => {
                warn!("{error}; podfs calls the driver as for a new volume");
                Ok(DriverRecord::default())
            }
            Ok(read) => Ok(read.unwrap_or_default()),
        }
    }

    /// Writes the record before a call to the driver.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn write(&self, record: &DriverRecord) -> io::Result<()> {
        write_synced(&self.record_file(), &serde_json::to_vec(record)?)
    }

    /// The temporary files of the record, of this and of older versions.
    fn unfinished_records(&self) -> [PathBuf; 2] {
        [unfinished(&self.record_file()), self.record_file().with_extension(NEXT)]
    }

    /// The file of the record. It exists as long as podfs has to undo a call.
    pub(super) fn record_file(&self) -> PathBuf {
        self.0.join(RECORD)
    }

    /// Removes the home, if there is no call to undo.
    ///
    /// # Errors
    /// When it has files of other programs, or a mount.
    pub fn remove(&self) -> io::Result<()> {
        absent_is_fine(remove_mount_point(&self.target()))?;
        CallRecord::of_home(&self.0).end();
        remove_record(&self.record_file())?;
        absent_is_fine(fs::remove_dir(&self.0))?;
        // The directory above may have homes of other volumes.
        let _ = self.0.parent().map(fs::remove_dir);
        Ok(())
    }

    /// The root directory of the home.
    pub(super) fn root(&self) -> Option<PathBuf> {
        self.0.ancestors().nth(5).map(Path::to_owned)
    }

    /// A file name for the home that is unique among all homes of the node.
    pub(super) fn user_name(&self) -> String {
        let last: Vec<_> = self.0.iter().rev().take(4).map(|part| part.to_string_lossy().into_owned()).collect();
        let name = match last.as_slice() {
            [name, kind, _, pod] => format!("{pod}~{kind}~{name}"),
            _ => self.0.display().to_string().replace('/', "~"),
        };
        if name.len() > LONGEST_NAME { sha256(&[&name]) } else { name }
    }
}

/// Whether a file system is mounted at a path.
///
/// # Errors
/// When the mount table cannot be read.
pub(super) fn is_mount(path: &Path) -> io::Result<bool> {
    Ok(mounts()?.iter().any(|mounted| mounted.at == path))
}

/// Makes a directory, and those above it.
pub(super) fn make_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o750).create(path)
}

/// Removes a file, and the temporary file of a process, of this or an older version, that was killed while it wrote the file.
pub(super) fn remove_record(path: &Path) -> io::Result<()> {
    absent_is_fine(fs::remove_file(path.with_extension(NEXT)))?;
    remove_whole(path)
}

/// Removes the mount point of a driver, which may be a file.
fn remove_mount_point(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path)?.is_dir() {
        true => fs::remove_dir(path),
        false => fs::remove_file(path),
    }
}

pub(super) fn absent_is_fine(outcome: io::Result<()>) -> io::Result<()> {
    match outcome {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        outcome => outcome,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::golden::{golden, values};

    #[test]
    fn the_home_of_a_volume_is_found_by_the_path_that_shows_it() {
        let home = DriverHome::of(Path::new("/k/pods/u"), "kubernetes.io~csi", "pv-1");
        for (path, expected) in [
            ("/k/pods/u/volumes/kubernetes.io~csi/pv-1/mount", Some(home.clone())),
            ("/k/pods/u/volumeDevices/kubernetes.io~csi/pv-1", Some(home)),
            ("/k/pods/u/volumes/kubernetes.io~nfs/pv-1", None),
            ("/k/pods/u/volumes/kubernetes.io~csi/pv-1", None),
            ("/mount", None),
        ] {
            assert_eq!(DriverHome::of_csi(Path::new(path)), expected, "{path}");
        }
    }

    #[test]
    fn a_home_whose_first_record_was_being_written_is_found_and_removed() {
        for unfinished in [".vol_data.json.new", "vol_data.next"] {
            let base = tempfile::tempdir().expect("a directory");
            let home = DriverHome::of(base.path(), "kubernetes.io~csi", "a");
            home.make_target().expect("made");
            fs::write(home.path().join(unfinished), "{").expect("written");
            assert_eq!(DriverHome::all(base.path()), [(home.clone(), DriverRecord::default())]);
            home.remove().expect("removed");
            assert!(!home.path().exists());
        }
    }

    #[test]
    fn a_damaged_record_is_reported_and_its_home_stays() {
        let base = tempfile::tempdir().expect("a directory");
        let home = DriverHome::of(base.path(), "kubernetes.io~csi", "a");
        home.make_target().expect("made");
        fs::write(home.record_file(), "{").expect("written");
        assert_eq!(DriverHome::all(base.path()), [(home.clone(), DriverRecord::default())]);
        let error = crate::driver::undo(&home).expect_err("podfs does not know the calls").to_string();
        assert!(
            error.starts_with(&format!(
                "cannot read the record of a driver's volume, {}: ",
                home.path().join(RECORD).display()
            )),
            "{error}"
        );
        assert!(home.record_file().exists());
        home.write(&home.read_or_begin().expect("it is damaged")).expect("written anew");
        assert_eq!(home.read().expect("a record"), Some(DriverRecord::default()));
    }

    #[test]
    fn a_home_is_found_by_its_record_and_gone_with_it() {
        let base = tempfile::tempdir().expect("a directory");
        let pod = base.path().join("pods/uid-1");
        let home = DriverHome::of(&pod, "kubernetes.io~csi", "a/b");
        assert_eq!(home.path(), pod.join("plugins/kubernetes.io~csi/a~b"));
        home.make_target().expect("made");
        assert_eq!(DriverHome::all(&pod), []);
        let record = DriverRecord { driver_name: "d".to_owned(), volume: "v".to_owned(), ..DriverRecord::default() };
        home.write(&record).expect("written");
        assert_eq!(DriverHome::all(&pod), [(home.clone(), record)]);
        assert_eq!(home.user_name(), "uid-1~kubernetes.io~csi~a~b");
        let long = DriverHome::of(&pod, "kubernetes.io~csi", &"v".repeat(253)).user_name();
        assert!(long.len() == 64 && long != home.user_name(), "{long}");
        home.remove().expect("removed");
        home.remove().expect("removed already");
        assert!(!pod.join("plugins/kubernetes.io~csi").exists());
    }

    #[test]
    fn a_record_has_the_bytes_that_other_versions_read() {
        let records = values::<DriverRecord>(golden!("driver-records.jsonl"));
        assert_eq!((records[0].capacity, records[0].published_read_only), (Some(1024), Some(true)));
        assert_eq!(records[1], DriverRecord::default());
    }

    #[test]
    fn a_record_of_another_version_is_refused_and_stays() {
        let base = tempfile::tempdir().expect("a directory");
        let home = DriverHome::of(base.path(), "kubernetes.io~csi", "a");
        home.make_target().expect("made");
        let later =
            golden!("driver-records.jsonl").lines().next().expect("a line").replacen('{', r#"{"version":2,"#, 1);
        fs::write(home.record_file(), &later).expect("written");
        let refusals = [
            home.read().expect_err("unknown").to_string(),
            home.read_or_begin().expect_err("unknown").to_string(),
            crate::driver::undo(&home).expect_err("unknown").to_string(),
        ];
        for refused in refusals {
            assert!(
                refused.contains("it has version 2, and this podfs reads version 1; use the podfs that"),
                "{refused}"
            );
        }
        assert_eq!(fs::read_to_string(home.record_file()).expect("it stays"), later);
        assert!(home.target().exists());
    }
}
