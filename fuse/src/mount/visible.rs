//! Mount points: the directories that volumes appear at.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::CWD;
use rustix::io::Errno;
use rustix::mount::{MoveMountFlags, UnmountFlags, move_mount};

use super::MountError;
use super::directories::Directories;
use super::table::{FS_TYPE, mounts_at};

/// What to do with a podfs mount that is already at a mount point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leftovers {
    /// The caller holds the lock of this pod, so whoever mounted it is gone: take it away.
    Remove,
    /// Take it away only when its server is gone.
    RemoveDead,
}

/// An empty directory that a volume can be mounted on.
#[derive(Debug)]
pub struct MountPoint {
    path: PathBuf,
}

impl MountPoint {
    /// Makes `path` ready to be mounted on; what is missing of it is made as one of `directories`, and
    /// mounts that a podfs which is gone left there are taken away.
    ///
    /// # Errors
    /// When something else is mounted there, when it is not an empty directory, or when a directory
    /// cannot be made.
    pub fn prepare(path: &Path, leftovers: Leftovers, directories: &mut Directories) -> Result<Self, MountError> {
        let absolute = std::path::absolute(path).map_err(|cause| MountError::at("find", path, cause))?;
        directories.make(&absolute)?;
        let path = resolve(&absolute).map_err(|cause| MountError::at("find", &absolute, cause))?;
        let point = Self { path };
        point.clear(leftovers)?;
        point.check_empty()?;
        Ok(point)
    }

    /// The path, without symbolic links.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Shows `clone` here.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn attach(&self, clone: &OwnedFd) -> Result<VisibleMount, MountError> {
        move_mount(clone, c"", CWD, &self.path, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
            .map_err(|errno| MountError::at("mount on", &self.path, errno))?;
        Ok(VisibleMount { path: self.path.clone(), mounted: true })
    }

    fn clear(&self, leftovers: Leftovers) -> Result<(), MountError> {
        loop {
            let mounts = mounts_at(&self.path).map_err(|cause| MountError::at("look at", &self.path, cause))?;
            match mounts.last() {
                None => return Ok(()),
                Some(top) if top.fs_type == FS_TYPE && (leftovers == Leftovers::Remove || self.is_dead()) => {
                    detach(&self.path)?;
                }
                Some(_) => {
                    let problem = "is already a mount point; unmount it or choose another directory";
                    return Err(MountError::Occupied { path: self.path.clone(), problem });
                }
            }
        }
    }

    /// Whether nobody answers for what is mounted here any more.
    fn is_dead(&self) -> bool {
        matches!(rustix::fs::statfs(&self.path), Err(Errno::NOTCONN | Errno::CONNABORTED))
    }

    fn check_empty(&self) -> Result<(), MountError> {
        let occupied = |problem| Err(MountError::Occupied { path: self.path.clone(), problem });
        match fs::read_dir(&self.path).map(|mut entries| entries.next().is_none()) {
            Ok(true) => Ok(()),
            Ok(false) => {
                occupied("is not empty; a volume would hide what is in it, so empty it or choose another directory")
            }
            Err(error) if error.kind() == ErrorKind::NotADirectory => {
                occupied("is not a directory; remove it or choose another mount point")
            }
            Err(cause) => Err(MountError::at("read", &self.path, cause)),
        }
    }
}

/// A mount that containers see. Dropping it unmounts it.
#[derive(Debug)]
pub struct VisibleMount {
    path: PathBuf,
    mounted: bool,
}

impl VisibleMount {
    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Unmounts it, lazily when it is busy: it disappears from the path at once, and whoever is inside
    /// keeps what they have open.
    ///
    /// # Errors
    /// When the kernel refuses; the mount stays then.
    pub fn unmount(mut self) -> Result<(), MountError> {
        self.mounted = false;
        take_off(&self.path)
    }
}

impl Drop for VisibleMount {
    fn drop(&mut self) {
        if self.mounted {
            let _ = detach(&self.path);
        }
    }
}

fn take_off(path: &Path) -> Result<(), MountError> {
    match rustix::mount::unmount(path, UnmountFlags::NOFOLLOW) {
        Ok(()) => Ok(()),
        // Unmounted by somebody else: there is nothing left to do.
        Err(Errno::INVAL | Errno::NOENT) => Ok(()),
        Err(_busy) => detach(path),
    }
}

fn detach(path: &Path) -> Result<(), MountError> {
    rustix::mount::unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)
        .map_err(|errno| MountError::at("unmount", path, errno))
}

/// The path without symbolic links. The last element is not looked into: what is mounted there may
/// be dead.
fn resolve(path: &Path) -> io::Result<PathBuf> {
    match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) => {
            let resolved = fs::canonicalize(parent)?.join(name);
            if fs::symlink_metadata(&resolved).is_ok_and(|found| found.is_symlink()) {
                return fs::canonicalize(resolved);
            }
            Ok(resolved)
        }
        _ => fs::canonicalize(path),
    }
}
