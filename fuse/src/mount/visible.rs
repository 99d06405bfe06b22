//! Mount points, and the mounts of volumes on them.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxAttributes, StatxFlags, open, statx};
use rustix::io::Errno;
use rustix::mount::{MoveMountFlags, UnmountFlags, move_mount};

use super::MountError;
use super::directories::Directories;
use super::private::{AttributeScope, MountPointType, set_attributes};
use super::table::{FS_TYPE, MountTableEntry, mount_id, mount_with_id, mounts_at};

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
        Ok(Self { placement: Placement::Beneath, ..Self::of_mount(&old.path)? })
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
        let mut visible = self.visible(entry.map(KnownMount::from));
        visible.mounted = visible.mount.is_some();
        Ok(visible)
    }

    fn mounts(&self) -> Result<Vec<MountTableEntry>, MountError> {
        mounts_at(&self.path).map_err(|cause| MountError::at("look at", &self.path, cause))
    }

    fn visible(&self, mount: Option<KnownMount>) -> VisibleMount {
        VisibleMount { path: self.path.clone(), mount, mounted: true, covers: 0 }
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

/// Unmounts every mount at `path`, lazily. An earlier podfs has recorded the path.
///
/// # Errors
/// When the kernel refuses, or the mount table cannot be read.
pub fn take_away(path: &Path) -> Result<(), MountError> {
    let mounts = mounts_at(path).map_err(|cause| MountError::at("look at", path, cause))?;
    mounts.iter().try_for_each(|_| detach(path))
}

/// Like [`take_away`], for a part of a volume. Mounts of containers in the part stay mounted in the volume.
///
/// # Errors
/// Those of [`take_away`].
pub fn take_away_part(path: &Path) -> Result<(), MountError> {
    let mounts = mounts_at(path).map_err(|cause| MountError::at("look at", path, cause))?;
    mounts.iter().try_for_each(|_| {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let slave = AttributeScope::AllBelow { propagation: libc::MS_SLAVE };
        // As a peer, the mount would propagate its unmounts to the volume.
        let separated =
            open(path, flags, Mode::empty()).map_err(Into::into).and_then(|top| set_attributes(&top, 0, slave));
        separated.map_err(|cause| MountError::at("change the propagation of", path, cause))?;
        detach(path)
    })
}

/// A mount that containers see. To drop it unmounts it.
#[derive(Debug)]
pub struct VisibleMount {
    path: PathBuf,
    /// The mount itself; `None` if it was not in the mount table.
    mount: Option<KnownMount>,
    /// Whether it is mounted, unless another process has unmounted it unnoticed.
    mounted: bool,
    /// The number of podfs mounts below it, to unmount after it.
    covers: u32,
}

/// A mount, as it was when it was attached or found.
#[derive(Debug)]
struct KnownMount {
    /// The id of statx(2).
    id: u64,
    /// The device number of its file system, in the format of the mount table.
    device: String,
    /// Whether it is read-only, if the mount table was read.
    read_only: Option<bool>,
}

impl KnownMount {
    /// The open mount `mount`. For FUSE, statx(2) and the mount table give the same device number.
    fn of_fuse(mount: &OwnedFd) -> Option<Self> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let found = statx(mount, c"", flags, StatxFlags::MNT_ID).ok()?;
        let device = format!("{}:{}", found.stx_dev_major, found.stx_dev_minor);
        Some(Self { id: found.stx_mnt_id, device, read_only: None })
    }
}

impl From<MountTableEntry> for KnownMount {
    fn from(MountTableEntry { id, device, read_only, .. }: MountTableEntry) -> Self {
        Self { id, device, read_only: Some(read_only) }
    }
}

/// The state of the path of a visible mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Presence {
    /// The mount is visible.
    Visible,
    /// A file system of this type is mounted over it.
    Covered(String),
    /// The mount was unmounted.
    Gone,
}

impl VisibleMount {
    /// The mount point.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it was read-only when it was found; `None` if it was not in the mount table, or was mounted by this process.
    pub fn is_read_only(&self) -> Option<bool> {
        self.mount.as_ref()?.read_only
    }

    /// The state of its path in the mount table. The kernel reuses ids of mounts, so this compares the device number, too.
    pub fn presence(&self, table: &[MountTableEntry]) -> Presence {
        let Some(known) = self.mount.as_ref().filter(|_| self.mounted) else { return Presence::Gone };
        let is_known =
            |entry: &MountTableEntry| entry.id == known.id && entry.device == known.device && entry.at == self.path;
        if !table.iter().any(is_known) {
            return Presence::Gone;
        }
        let over = table.iter().find(|entry| entry.parent == known.id && entry.at == self.path);
        over.map_or(Presence::Visible, |over| Presence::Covered(over.fs_type.clone()))
    }

    /// Opens the root of the mount, without a request to its server.
    ///
    /// # Errors
    /// When its path cannot be opened, or another process has unmounted or covered the mount.
    pub fn open(&self) -> Result<OwnedFd, MountError> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let root = open(&self.path, flags, Mode::empty()).map_err(|errno| MountError::at("open", &self.path, errno))?;
        let id = mount_id(root.as_fd()).map_err(|errno| MountError::at("look at", &self.path, errno))?;
        match &self.mount {
            Some(known) if self.mounted && known.id == id => Ok(root),
            _ => Err(MountError::at("open the volume at", &self.path, Errno::STALE)),
        }
    }

    /// Notes that another process has unmounted it. So to drop this does not unmount later mounts at its path.
    pub fn lose(&mut self) {
        self.mounted = false;
    }

    /// Whether another process has unmounted it, as [`Self::lose`] notes.
    pub fn is_lost(&self) -> bool {
        !self.mounted
    }

    /// Replaces this mount, which is lost, by `again` at the same path.
    pub fn replace(&mut self, again: VisibleMount) {
        let covers = self.covers;
        *self = again;
        self.covers += covers;
    }

    /// Unmounts it; lazily if it is busy: then it disappears from the path at once, and processes keep their open files on it.
    ///
    /// # Errors
    /// When the kernel refuses. Then the mount stays.
    pub fn unmount(mut self) -> Result<(), MountError> {
        if self.mounted {
            self.mounted = false;
            unmount_or_detach(&self.path)?;
        }
        (0..self.covers).try_for_each(|_| unmount_or_detach(&self.path))?;
        uncover(&self.path)
    }

    /// Like [`Self::unmount`], but processes that wait for an answer get an error at once. It does not need the mount's server,
    /// which may be unable to end.
    ///
    /// # Errors
    /// Those of [`Self::unmount`].
    pub fn unmount_and_abort(self) -> Result<(), MountError> {
        // `MNT_FORCE` aborts the connection, even while processes use the mount. If it does not unmount the mount, `unmount` does.
        if self.mounted {
            let _gone =
                rustix::mount::unmount(&self.path, UnmountFlags::FORCE | UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
        }
        self.unmount()
    }

    /// Makes this mount, which was attached [beneath](MountPoint::beneath) `old`, the visible one at their path. Processes keep
    /// their open files on `old`, and its clones elsewhere stay. Before Linux 6.5, `old` stays mounted below this mount.
    ///
    /// # Errors
    /// When the kernel does not unmount `old`.
    pub fn take_place_of(&mut self, mut old: VisibleMount) -> Result<(), MountError> {
        let detached = match old.open() {
            Ok(_) => detach(&old.path).inspect(|()| old.mounted = false),
            Err(_) => Ok(()),
        };
        // What is left of the old mount goes with this one.
        self.cover(old);
        detached
    }

    /// Notes that this is mounted on `below`. [`Self::unmount`] unmounts both (see [`OldMountPolicy::Cover`]).
    pub fn cover(&mut self, mut below: VisibleMount) {
        self.covers += u32::from(below.mounted) + below.covers;
        below.mounted = false;
    }
}

impl Drop for VisibleMount {
    fn drop(&mut self) {
        if self.mounted {
            let _ = detach(&self.path);
        }
    }
}

/// Unmounts dead podfs mounts at `path`. It reads the mount table, which has all mounts of the node, only if a mount is left there:
/// a caller may unmount thousands of volumes.
fn uncover(path: &Path) -> Result<(), MountError> {
    while may_be_mount_point(path) {
        let mounts = mounts_at(path).map_err(|cause| MountError::at("look at", path, cause))?;
        match mounts.last() {
            Some(top) if top.fs_type == FS_TYPE && is_dead(path) => detach(path)?,
            _ => return Ok(()),
        }
    }
    Ok(())
}

/// Whether `path` is a mount point; `true` if statx(2) fails, except with `ENOENT`. It needs no request to a file system.
fn may_be_mount_point(path: &Path) -> bool {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
    match statx(CWD, path, flags, StatxFlags::empty()) {
        Ok(found) => found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT),
        Err(Errno::NOENT) => false,
        Err(_) => true,
    }
}

/// Whether the server of the mount at `path` is dead.
pub fn is_dead(path: &Path) -> bool {
    matches!(rustix::fs::statfs(path), Err(Errno::NOTCONN | Errno::CONNABORTED))
}

fn unmount_or_detach(path: &Path) -> Result<(), MountError> {
    match rustix::mount::unmount(path, UnmountFlags::NOFOLLOW) {
        Ok(()) => Ok(()),
        // Another process has unmounted it.
        Err(Errno::INVAL | Errno::NOENT) => Ok(()),
        Err(_busy) => detach(path),
    }
}

/// Unmounts the topmost mount at `path` lazily: it disappears from the path at once, and processes keep their open files on it.
///
/// # Errors
/// When nothing is mounted there, or the kernel refuses.
pub fn detach(path: &Path) -> Result<(), MountError> {
    rustix::mount::unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)
        .map_err(|errno| MountError::at("unmount", path, errno))
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
    use super::*;
    use crate::mount::bind::bind;
    use crate::mount::private::ContainerAccess;

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
            crate::mount::bind::bind(source.as_fd(), crate::mount::private::ContainerAccess::ReadWrite)
                .expect("a clone")
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
        visible.mounted = false;
        drop(visible);
        MountPoint::prepare(&at, OldMountPolicy::Cover, &mut directories).expect_err("it is no mount of podfs");
        take_away(&at).expect("taken away");
        take_away(&at).expect("nothing is left to take away");
        let mut others = Directories::default();
        let error = MountPoint::prepare_shape(&at, MountPointType::File, OldMountPolicy::Cover, &mut others);
        assert!(error.expect_err("a directory").to_string().contains("is not a regular file"));
    }
}
