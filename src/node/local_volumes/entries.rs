//! The entries of the directories. The scan reads directories and the mount table, and opens no mount and no device, so a
//! mount or device that hangs does not delay the scan.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;

use podfs_fuse::mount::table::{FS_TYPE, MountTableEntry, mounts};

use super::ClassDirectory;
use super::error::EntryProblem;
use crate::manifest::objects::VolumeMode;

/// The content of the directories at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct DirectoryScan {
    /// The entries, by their path without symbolic links.
    pub(super) entries: BTreeMap<PathBuf, DiskEntry>,
    /// The directories that podfs could read, without symbolic links.
    pub(super) read: BTreeSet<PathBuf>,
    /// Why podfs could not read the other directories, one sentence each.
    pub(super) unread: Vec<String>,
}

/// An entry of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DiskEntry {
    /// The StorageClass of its directory.
    pub(super) class: String,
    /// Its volume mode, or why podfs does not offer it.
    pub(super) mode: Result<VolumeMode, EntryProblem>,
}

/// Scans the directories.
///
/// # Errors
/// When the mount table cannot be read.
pub(super) fn scan(directories: &[ClassDirectory]) -> io::Result<DirectoryScan> {
    // The table is read before the directories. A mount that appears after that leads to another scan.
    let mut mounted = BTreeMap::new();
    for mount in mounts()? {
        // The topmost mount of a place comes last.
        mounted.insert(mount.at.clone(), mount);
    }
    let mut scan = DirectoryScan::default();
    for ClassDirectory { class, directory } in directories {
        let listed = fs::canonicalize(directory).and_then(|real| Ok((fs::read_dir(&real)?, real)));
        let listed = listed.and_then(|(entries, real)| Ok((entries.collect::<Result<Vec<_>, _>>()?, real)));
        match listed {
            Ok((entries, real)) => {
                for entry in entries {
                    let path = entry.path();
                    let mode = mode(&entry, mounted.get(&path));
                    scan.entries.insert(path, DiskEntry { class: class.clone(), mode });
                }
                scan.read.insert(real);
            }
            Err(cause) => scan.unread.push(format!(
                "the volumes of StorageClass {class} cannot be found: {}: {cause}; podfs looks again",
                directory.display()
            )),
        }
    }
    Ok(scan)
}

fn mode(entry: &fs::DirEntry, mounted: Option<&MountTableEntry>) -> Result<VolumeMode, EntryProblem> {
    let path = entry.path();
    if path.to_str().is_none_or(|text| text.chars().any(char::is_control)) {
        return Err(EntryProblem::Name);
    }
    let kind = entry.file_type()?;
    if kind.is_symlink() {
        return Err(EntryProblem::Link);
    }
    if kind.is_dir() {
        return match mounted {
            None => Err(EntryProblem::NoMount),
            Some(mounted) if mounted.fs_type == "autofs" || mounted.fs_type == FS_TYPE => {
                Err(EntryProblem::NoStorage(mounted.fs_type.clone()))
            }
            Some(mounted) if mounted.read_only => Err(EntryProblem::ReadOnly),
            Some(_) => Ok(VolumeMode::Filesystem),
        };
    }
    // If a device is bound over a file, the path leads to the device, but the directory lists the file.
    let found = fs::symlink_metadata(&path)?;
    match found.file_type().is_block_device() {
        true => Ok(VolumeMode::Block),
        false => Err(EntryProblem::Neither),
    }
}
