//! Mount points: empty directories and files on which volumes are mounted.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::CWD;
use rustix::mount::{MoveMountFlags, move_mount};

use super::MountError;
use super::directories::Directories;
use super::private::MountPointType;
use super::table::{FS_TYPE, MountTableEntry, mount_id, mount_with_id, mounts_at};
use super::visible::{KnownMount, VisibleMount, detach, is_dead, may_be_mount_point};

/// How to handle an old podfs mount at a mount point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OldMountPolicy {
    /// Cover a dead mount by the new one, and unmount any other. The caller has the lock of the pod, so the supervisor of the mount
    /// has ended. Containers that have mounted the directory above (`HostToContainer`) get the new mount. They would not if podfs
    /// unmounted the dead one first.
    Cover,
    /// Unmount it only if its server is dead.
    RemoveDead,
}

/// The object below a new mount.
enum CoveredObject {
    /// The directory or file itself.
    Nothing,
    /// A mount whose server is dead.
    Dead,
}

/// An empty directory or file on which a volume can be mounted.
#[derive(Debug)]
pub struct MountPoint {
    path: PathBuf,
    placement: Placement,
}

/// Where a new mount goes if a mount is at the mount point already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Placement {
    /// On top of it.
    Top,
    /// Beneath it, so that the new mount appears when the old one is unmounted (Linux 6.5); on earlier kernels, on top of it.
    Beneath,
}

/// The flag of move_mount(2) that puts the mount beneath the topmost one of its target (linux/mount.h).
const MOVE_MOUNT_BENEATH: MoveMountFlags = MoveMountFlags::from_bits_retain(0x200);

impl MountPoint {
    /// Prepares the directory `path` as a mount point. Makes missing directories, adds them to `directories`, and handles old podfs
    /// mounts there as `leftovers` says.
    ///
    /// # Errors
    /// When another file system is mounted there, it is not an empty directory, or a directory cannot be made.
    pub fn prepare(path: &Path, leftovers: OldMountPolicy, directories: &mut Directories) -> Result<Self, MountError> {
        Self::prepare_shape(path, MountPointType::Directory, leftovers, directories)
    }

    /// Like [`Self::prepare`], for a directory or a file.
    ///
    /// # Errors
    /// Those of [`Self::prepare`]. A file has to be empty, too.
    pub fn prepare_shape(
        path: &Path,
        shape: MountPointType,
        leftovers: OldMountPolicy,
        directories: &mut Directories,
    ) -> Result<Self, MountError> {
        let absolute = std::path::absolute(path).map_err(|cause| MountError::at("find", path, cause))?;
        match shape {
            MountPointType::Directory => directories.make(&absolute)?,
            MountPointType::File => directories.make_file(&absolute)?,
        }
        let path = resolve(&absolute).map_err(|cause| MountError::at("find", &absolute, cause))?;
        let point = Self { path, placement: Placement::Top };
        match (point.clear(leftovers)?, shape) {
            // The directory below a dead mount is not readable.
            (CoveredObject::Dead, _) => {}
            (CoveredObject::Nothing, MountPointType::Directory) => point.check_empty()?,
            (CoveredObject::Nothing, MountPointType::File) => point.check_empty_file()?,
        }
        Ok(point)
    }

    /// The mount point of an existing mount.
    ///
    /// # Errors
    /// When the directories above it cannot be read.
    pub fn of_mount(path: &Path) -> Result<Self, MountError> {
        let absolute = std::path::absolute(path).map_err(|cause| MountError::at("find", path, cause))?;
        let path = resolve(&absolute).map_err(|cause| MountError::at("find", &absolute, cause))?;
        Ok(Self { path, placement: Placement::Top })
    }

    /// The mount point of a recorded mount. `path` has no symbolic links; it may not exist any more.
    pub fn recorded(path: &Path) -> Self {
        Self { path: path.to_owned(), placement: Placement::Top }
    }

    /// The mount point of `old`, for a mount that [takes its place](VisibleMount::take_place_of).
    ///
    /// # Errors
    /// Those of [`Self::of_mount`].
    pub fn beneath(old: &VisibleMount) -> Result<Self, MountError> {
        Ok(Self { placement: Placement::Beneath, ..Self::of_mount(old.path())? })
    }

    /// The path, without symbolic links.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Attaches `clone`, a mount of a FUSE file system, here. It does not read the mount table, which has all mounts of the node: a
    /// pod may have thousands of volumes.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn attach(&self, clone: &OwnedFd) -> Result<VisibleMount, MountError> {
        self.move_here(clone)?;
        Ok(self.visible(KnownMount::of_fuse(clone)))
    }

    /// Attaches `clone`, a bind mount, here.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn attach_bind(&self, clone: &OwnedFd) -> Result<VisibleMount, MountError> {
        self.move_here(clone)?;
        let entry = mount_id(clone.as_fd()).ok().and_then(|id| mount_with_id(id).ok()).flatten();
        Ok(self.visible(entry.map(KnownMount::from)))
    }

    fn move_here(&self, clone: &OwnedFd) -> Result<(), MountError> {
        let of_descriptor = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        if self.placement == Placement::Beneath
            && move_mount(clone, c"", CWD, &self.path, of_descriptor | MOVE_MOUNT_BENEATH).is_ok()
        {
            return Ok(());
        }
        move_mount(clone, c"", CWD, &self.path, of_descriptor)
            .map_err(|errno| MountError::at("mount on", &self.path, errno))
    }

    /// The topmost mount here, if its server is not dead.
    ///
    /// # Errors
    /// When the mount table cannot be read.
    pub fn find(&self) -> Result<Option<VisibleMount>, MountError> {
        let top = self.mounts()?.pop().filter(|_| !is_dead(&self.path));
        Ok(top.map(|top| self.visible(Some(top.into()))))
    }

    /// The mount of the file system with this device number. If it is not here, because another process has unmounted it, the
    /// result is [lost](VisibleMount::is_lost).
    ///
    /// # Errors
    /// When the mount table cannot be read.
    pub fn find_of(&self, device: &str) -> Result<VisibleMount, MountError> {
        let entry = self.mounts()?.into_iter().rfind(|mount| mount.device == device);
        let is_gone = entry.is_none();
        let mut visible = self.visible(entry.map(KnownMount::from));
        if is_gone {
            visible.lose();
        }
        Ok(visible)
    }

    fn mounts(&self) -> Result<Vec<MountTableEntry>, MountError> {
        mounts_at(&self.path).map_err(|cause| MountError::at("look at", &self.path, cause))
    }

    fn visible(&self, mount: Option<KnownMount>) -> VisibleMount {
        VisibleMount::new(self.path.clone(), mount)
    }

    fn clear(&self, leftovers: OldMountPolicy) -> Result<CoveredObject, MountError> {
        // Without this check, podfs would read the mount table for each volume.
        if !may_be_mount_point(&self.path) {
            return Ok(CoveredObject::Nothing);
        }
        loop {
            match self.mounts()?.last() {
                None => return Ok(CoveredObject::Nothing),
                Some(top) if top.fs_type == FS_TYPE => match (is_dead(&self.path), leftovers) {
                    (true, OldMountPolicy::Cover) => return Ok(CoveredObject::Dead),
                    (true, OldMountPolicy::RemoveDead) | (false, OldMountPolicy::Cover) => detach(&self.path)?,
                    (false, OldMountPolicy::RemoveDead) => return self.occupied(),
                },
                Some(_) => return self.occupied(),
            }
        }
    }

    fn occupied(&self) -> Result<CoveredObject, MountError> {
        let problem = "is already a mount point; unmount it or choose another directory";
        Err(MountError::Occupied { path: self.path.clone(), problem })
    }

    fn check_empty(&self) -> Result<(), MountError> {
        let occupied = |problem| Err(MountError::Occupied { path: self.path.clone(), problem });
        match fs::read_dir(&self.path).map(|mut entries| entries.next().is_none()) {
            Ok(true) => Ok(()),
            Ok(false) => {
                occupied("is not empty; a volume would hide its content, so empty it or choose another directory")
            }
            Err(error) if error.kind() == ErrorKind::NotADirectory => {
                occupied("is not a directory; remove it or choose another mount point")
            }
            Err(cause) => Err(MountError::at("read", &self.path, cause)),
        }
    }

    fn check_empty_file(&self) -> Result<(), MountError> {
        let occupied = |problem| Err(MountError::Occupied { path: self.path.clone(), problem });
        match fs::symlink_metadata(&self.path) {
            Ok(found) if found.is_file() && found.len() == 0 => Ok(()),
            Ok(found) if found.is_file() => {
                occupied("is not empty; a volume would hide its content, so empty it or choose another file")
            }
            Ok(_) => {
                occupied("is not a regular file, and the volume is a file; remove it or choose another mount point")
            }
            Err(cause) => Err(MountError::at("look at", &self.path, cause)),
        }
    }
}

/// The path without symbolic links. It needs no request to a mount at the last element, which may be dead.
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

#[cfg(test)]
mod tests {
    use rustix::fs::{AtFlags, Mode, OFlags, open};

    use super::*;
    use crate::mount::bind::bind;
    use crate::mount::private::ContainerAccess;
    use crate::mount::visible::take_away;

    #[test]
    fn a_mount_takes_the_place_of_another_one_and_the_directory_below_never_shows() {
        let base = tempfile::tempdir().expect("a directory");
        let (at, first, second) = (base.path().join("at"), base.path().join("first"), base.path().join("second"));
        for directory in [&at, &first, &second] {
            fs::create_dir(directory).expect("a directory");
            fs::write(directory.join(directory.file_name().expect("a name")), "").expect("a file");
        }
        let clone = |directory: &Path| {
            let source = open(directory, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).expect("open");
            bind(source.as_fd(), ContainerAccess::ReadWrite).expect("a clone")
        };
        let old = MountPoint::of_mount(&at).expect("a point").attach_bind(&clone(&first)).expect("mounted");
        let kept = open(&at, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).expect("open");
        let point = MountPoint::beneath(&old).expect("a point");
        let mut new = point.attach_bind(&clone(&second)).expect("mounted");
        new.take_place_of(old).expect("exchanged");
        assert!(at.join("second").exists() && !at.join("first").exists());
        assert!(rustix::fs::statat(&kept, "first", AtFlags::empty()).is_ok(), "an open directory stays what it was");
        new.unmount().expect("unmounted");
        assert!(at.join("at").exists(), "no mount is left");
    }

    #[test]
    fn a_file_volume_is_mounted_on_a_file_that_is_removed_later() {
        let base = tempfile::tempdir().expect("a directory");
        let (source, at) = (base.path().join("source"), base.path().join("made/point"));
        fs::write(&source, "hello").expect("written");
        let mut directories = Directories::default();
        let point = MountPoint::prepare_shape(&at, MountPointType::File, OldMountPolicy::Cover, &mut directories)
            .expect("a point");
        let file = fs::File::open(&source).expect("a file");
        let clone = bind(file.as_fd(), ContainerAccess::ReadOnly).expect("a clone");
        let visible = point.attach_bind(&clone).expect("attached");
        assert_eq!(fs::read_to_string(&at).expect("shown"), "hello");
        let refused = fs::write(&at, "x").expect_err("read-only");
        assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
        visible.unmount().expect("unmounted");
        drop(directories);
        assert_eq!(fs::read_dir(base.path()).expect("a listing").count(), 1);
    }

    #[test]
    fn a_recorded_mount_is_unmounted_and_another_shape_is_refused() {
        let base = tempfile::tempdir().expect("a directory");
        let base = base.path().canonicalize().expect("a real path");
        let (source, at) = (base.join("source"), base.join("point"));
        fs::create_dir(&source).expect("a directory");
        let mut directories = Directories::default();
        let point = MountPoint::prepare(&at, OldMountPolicy::Cover, &mut directories).expect("a point");
        let opened = fs::File::open(&source).expect("a directory");
        let mut visible =
            point.attach_bind(&bind(opened.as_fd(), ContainerAccess::ReadWrite).expect("a clone")).expect("attached");
        visible.lose();
        drop(visible);
        MountPoint::prepare(&at, OldMountPolicy::Cover, &mut directories).expect_err("it is no mount of podfs");
        take_away(&at).expect("taken away");
        take_away(&at).expect("nothing is left to take away");
        let mut others = Directories::default();
        let error = MountPoint::prepare_shape(&at, MountPointType::File, OldMountPolicy::Cover, &mut others);
        assert!(error.expect_err("a directory").to_string().contains("is not a regular file"));
    }
}
