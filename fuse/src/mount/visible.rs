//! The mounts of volumes that containers see, and how podfs unmounts them.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxAttributes, StatxFlags, open, statx};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;

use super::MountError;
use super::private::{AttributeScope, set_attributes};
use super::table::{FS_TYPE, MountTableEntry, mount_id, mounts_at};

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
pub(super) struct KnownMount {
    /// The id of statx(2).
    id: u64,
    /// The device number of its file system, in the format of the mount table.
    device: String,
    /// Whether it is read-only, if the mount table was read.
    read_only: Option<bool>,
}

impl KnownMount {
    /// The open mount `mount`. For FUSE, statx(2) and the mount table give the same device number.
    pub(super) fn of_fuse(mount: &OwnedFd) -> Option<Self> {
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
    /// The mount that was just attached or found at `path`.
    pub(super) fn new(path: PathBuf, mount: Option<KnownMount>) -> Self {
        Self { path, mount, mounted: true, covers: 0 }
    }

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

    /// Makes this mount, which was attached [beneath](super::point::MountPoint::beneath) `old`, the visible one at their path. Processes keep
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

    /// Notes that this is mounted on `below`. [`Self::unmount`] unmounts both (see [`OldMountPolicy::Cover`](super::point::OldMountPolicy::Cover)).
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
pub(super) fn may_be_mount_point(path: &Path) -> bool {
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
