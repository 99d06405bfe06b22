//! The directory of a view: a directory of the user's own that is empty, or one that podfs makes and removes.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use podfs_fuse::mount::table::mounts_at;

use super::ViewError;
use super::fusermount::{self, FS_TYPE};
use crate::render::directory::{DirectoryError, prepare};

/// A directory to mount a view at. When it is dropped, podfs removes the directory if podfs made it.
pub(super) struct ViewMountPoint {
    path: PathBuf,
    is_made: bool,
}

impl ViewMountPoint {
    /// Checks the directory, or makes it. If a view whose process has ended is mounted there, podfs unmounts it.
    ///
    /// # Errors
    /// When another view is mounted there, when the directory is not empty or belongs to another user, or when the kernel refuses.
    pub(super) fn prepare(directory: &Path) -> Result<ViewMountPoint, ViewError> {
        let path = resolve(directory).map_err(|reason| unusable(directory, reason))?;
        let mounted = mounts_at(&path).map_err(|reason| unusable(&path, reason))?.pop();
        let is_dead = fs::metadata(&path).is_err_and(|error| error.raw_os_error() == Some(libc::ENOTCONN));
        match mounted.map(|mounted| mounted.fs_type == FS_TYPE) {
            Some(true) if is_dead => fusermount::unmount(&path)?,
            Some(true) => return Err(ViewError::Occupied(path)),
            Some(false) if is_dead => return Err(ViewError::Dead(path)),
            _ => {}
        }
        let user = rustix::process::geteuid();
        if let Ok(metadata) = fs::metadata(&path)
            && metadata.is_dir()
            && metadata.uid() != user.as_raw()
            && !user.is_root()
        {
            return Err(ViewError::NotOwned { path, owner: metadata.uid() });
        }
        let is_made = prepare(&path)?;
        Ok(ViewMountPoint { path, is_made })
    }

    /// Absolute, without symbolic links.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Unmounts the view if it is still mounted, and removes the directory if podfs made it.
    ///
    /// # Errors
    /// When the mount table cannot be read, or fusermount3 fails.
    pub(super) fn clear(self) -> Result<(), ViewError> {
        let mounted = mounts_at(&self.path).map_err(|reason| unusable(&self.path, reason))?;
        if mounted.last().is_some_and(|mounted| mounted.fs_type == FS_TYPE) {
            fusermount::unmount(&self.path)?;
        }
        Ok(())
    }
}

impl Drop for ViewMountPoint {
    fn drop(&mut self) {
        if self.is_made {
            // The kernel refuses if another process has made a file in the directory or mounted something there.
            let _not_empty = fs::remove_dir(&self.path);
        }
    }
}

/// The path as the mount table has it. podfs does not resolve the last name, because a view without a process may be mounted
/// there, and such a view answers no request.
fn resolve(directory: &Path) -> io::Result<PathBuf> {
    match (directory.parent(), directory.file_name()) {
        (Some(parent), Some(name)) => {
            let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
            let path = parent.canonicalize()?.join(name);
            let is_link = fs::symlink_metadata(&path).is_ok_and(|found| found.is_symlink());
            if is_link { path.canonicalize() } else { Ok(path) }
        }
        _ => directory.canonicalize(),
    }
}

fn unusable(path: &Path, reason: io::Error) -> ViewError {
    DirectoryError::Unusable { path: path.to_owned(), reason }.into()
}
