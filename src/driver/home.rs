//! The home of a volume: a directory of the pod in which a driver mounts the volume, with a record of the driver's calls.
//!
//! The driver mounts at `<root>/pods/UID/plugins/KIND/NAME/mount`. The record beside it is `vol_data.json`, in the kubelet's format
//! with additional fields. NAME is the name of the PersistentVolume, or of the volume in the pod.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use podfs_fuse::mount::table::mounts;
use serde::{Deserialize, Serialize};

use crate::volume::Csi;
use crate::volume::csi::sha256;

/// The directory of a pod for the files of drivers and of kinds of volumes.
const PLUGINS: &str = "plugins";
const RECORD: &str = "vol_data.json";
const TARGET: &str = "mount";
/// Most bytes of the name of a user. The kernel allows 255, and the temporary file of [`replace`] has a longer name.
const LONGEST_NAME: usize = 240;
/// The extension of the temporary file of [`replace`].
const NEXT: &str = "next";

/// The directory in which a driver mounts a volume for a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverHome(PathBuf);

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
    /// The directory in which the driver mounts it for the node, if it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_mount: Option<PathBuf>,
    /// The capacity of the PersistentVolume at the last call to grow the volume, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capacity: Option<u64>,
    /// The size to which the driver has grown it on this node, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expanded: Option<u64>,
    /// Whether podfs has called the driver to attach it.
    pub attached: bool,
    /// Whether podfs has called the driver to mount it at the home.
    pub published: bool,
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

    /// All homes of a pod with their records. A record is empty if its process was killed while it wrote the first one.
    pub fn all(pod: &Path) -> Vec<(DriverHome, DriverRecord)> {
        let entries = |directory: &Path| {
            let entries = directory.read_dir().into_iter().flatten().flatten();
            entries.map(|entry| entry.path()).filter(|path| path.is_dir() && !path.is_symlink()).collect::<Vec<_>>()
        };
        let homes = entries(&pod.join(PLUGINS)).into_iter().flat_map(|kind| entries(&kind)).map(DriverHome);
        let begun = |home: &DriverHome| home.0.join(RECORD).with_extension(NEXT).exists().then(DriverRecord::default);
        homes.filter_map(|home| home.read().or_else(|| begun(&home)).map(|record| (home, record))).collect()
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

    /// The directory on which the driver mounts.
    pub fn target(&self) -> PathBuf {
        self.0.join(TARGET)
    }

    /// Whether a file system is mounted there.
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

    /// The record of the driver's calls; `None` if there were none, or all are undone.
    pub fn read(&self) -> Option<DriverRecord> {
        serde_json::from_slice(&fs::read(self.0.join(RECORD)).ok()?).ok()
    }

    /// Writes the record before a call of the driver.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn write(&self, record: &DriverRecord) -> io::Result<()> {
        replace(&self.0.join(RECORD), &serde_json::to_vec(record)?)
    }

    /// The file of the record. It exists as long as podfs has to undo a call.
    pub(super) fn record_file(&self) -> PathBuf {
        self.0.join(RECORD)
    }

    /// Removes the home, when there is no call to undo.
    ///
    /// # Errors
    /// When it has files of other programs, or a mount.
    pub fn remove(&self) -> io::Result<()> {
        absent_is_fine(remove_mount_point(&self.target()))?;
        remove_replaced(&self.0.join(RECORD))?;
        absent_is_fine(fs::remove_dir(&self.0))?;
        // The directory above may have homes of other volumes.
        let _ = self.0.parent().map(fs::remove_dir);
        Ok(())
    }

    /// The root directory of the home.
    pub(super) fn root(&self) -> Option<PathBuf> {
        self.0.ancestors().nth(5).map(Path::to_owned)
    }

    /// A unique file name for it among all homes of the node.
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

/// Replaces a file atomically: if this process is killed, the file has the old or the new content.
pub(super) fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let next = path.with_extension(NEXT);
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&next)?;
    file.write_all(content)?;
    fs::rename(&next, path)
}

/// Removes a file of [`replace`], and the temporary file of a killed process.
pub(super) fn remove_replaced(path: &Path) -> io::Result<()> {
    absent_is_fine(fs::remove_file(path.with_extension(NEXT)))?;
    absent_is_fine(fs::remove_file(path))
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
        let base = tempfile::tempdir().expect("a directory");
        let home = DriverHome::of(base.path(), "kubernetes.io~csi", "a");
        home.make_target().expect("made");
        fs::write(home.path().join("vol_data.next"), "{").expect("written");
        assert_eq!(DriverHome::all(base.path()), [(home.clone(), DriverRecord::default())]);
        home.remove().expect("removed");
        assert!(!home.path().exists());
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
}
