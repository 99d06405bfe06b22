//! A rendering as files below a directory: names, links, contents and modes. Owner and group are those of the user that runs
//! podfs, because only root could give files to others.

use std::fs::{self, DirBuilder, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use super::model::{EntryKind, RenderedEntry, Rendering, visible};

/// Why files cannot be written. Its text is one sentence for the user.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// The directory has entries.
    #[error("{}: is not empty; remove it, or give another directory", .0.display())]
    NotEmpty(PathBuf),
    /// The path leads to something other than a directory.
    #[error("{}: is not a directory", .0.display())]
    NotADirectory(PathBuf),
    /// The directory cannot be made or read.
    #[error("{}: cannot be used: {reason}", path.display())]
    Unusable {
        /// The directory.
        path: PathBuf,
        /// The kernel's reason.
        #[source]
        reason: io::Error,
    },
    /// An entry cannot be written.
    #[error("{}: cannot be written: {reason}", path.display())]
    Unwritten {
        /// The entry.
        path: PathBuf,
        /// The kernel's reason.
        #[source]
        reason: io::Error,
    },
}

/// Writes the files below `directory`, which must be empty or absent. podfs makes an absent directory so that only its owner may
/// enter it. Secret files are empty unless they are to be revealed.
///
/// # Errors
/// When the directory cannot be used, or the kernel refuses to write an entry.
pub fn write(rendering: &Rendering<'_>, reveal: bool, directory: &Path) -> Result<(), DirectoryError> {
    prepare(directory)?;
    let mut directories = Vec::new();
    for (place, entries) in rendering.with_entries() {
        for entry in entries {
            let path = match (directory.join(&place.path), entry.path.as_str()) {
                (path, "") => path,
                (path, below) => path.join(below),
            };
            let written = write_entry(&path, entry, reveal);
            written.map_err(|reason| DirectoryError::Unwritten { path: path.clone(), reason })?;
            if matches!(entry.kind, EntryKind::Directory) && path != directory {
                directories.push((path, entry.mode));
            }
        }
    }
    // A directory gets its mode after its entries, because the mode may forbid to add entries.
    for (path, mode) in directories.into_iter().rev() {
        let set = fs::set_permissions(&path, Permissions::from_mode(mode.into()));
        set.map_err(|reason| DirectoryError::Unwritten { path, reason })?;
    }
    Ok(())
}

/// Makes a directory that only its owner may enter, unless there is an empty one. Returns whether podfs made it.
///
/// # Errors
/// When something else is at the path, or the kernel refuses.
pub fn prepare(directory: &Path) -> Result<bool, DirectoryError> {
    let unusable = |reason| DirectoryError::Unusable { path: directory.to_owned(), reason };
    match DirBuilder::new().mode(0o700).create(directory) {
        Ok(()) => return Ok(true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(reason) => return Err(unusable(reason)),
    }
    if !directory.is_dir() {
        return Err(DirectoryError::NotADirectory(directory.to_owned()));
    }
    match fs::read_dir(directory).map_err(unusable)?.next() {
        None => Ok(false),
        Some(_) => Err(DirectoryError::NotEmpty(directory.to_owned())),
    }
}

fn write_entry(path: &Path, entry: &RenderedEntry<'_>, reveal: bool) -> io::Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    match &entry.kind {
        EntryKind::Directory => match fs::create_dir(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
            made => made,
        },
        EntryKind::Link(target) => symlink(target, path),
        EntryKind::File { content, is_secret } => {
            // A file that a container mounts over a file of another volume replaces that file.
            match fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
            file.write_all(visible(content, *is_secret, reveal).unwrap_or_default())?;
            file.set_permissions(Permissions::from_mode(entry.mode.into()))
        }
    }
}
