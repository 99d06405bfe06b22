//! The number of FUSE requests that wait, from the kernel's control file system for FUSE (fusectl).
//!
//! Where fusectl is not mounted at its usual path, as in most containers, podfs mounts it without attaching the mount
//! (`fsmount(2)`).

use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;

use rustix::fs::{CWD, Mode, OFlags, fstatfs, openat};
use rustix::io::{Errno, read};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};

/// The usual mount point of fusectl.
const PLACE: &str = "/sys/fs/fuse/connections";
/// `FUSE_CTL_SUPER_MAGIC`.
const MAGIC: i64 = 0x6573_5543;

/// How many requests of a FUSE connection wait in the kernel or in the server; `None` if fusectl cannot be read.
pub(super) fn waiting(connection: u32) -> Option<usize> {
    static ROOT: OnceLock<Option<OwnedFd>> = OnceLock::new();
    let root = ROOT.get_or_init(|| mounted().or_else(|_| mount()).ok()).as_ref()?;
    let file = openat(root, format!("{connection}/waiting"), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let mut text = [0; 32];
    let length = read(file, &mut text).ok()?;
    str::from_utf8(&text[..length]).ok()?.trim().parse().ok()
}

/// The root of fusectl at its usual mount point.
fn mounted() -> Result<OwnedFd, Errno> {
    let root = openat(CWD, PLACE, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    if fstatfs(&root)?.f_type == MAGIC { Ok(root) } else { Err(Errno::NOENT) }
}

/// The root of a new mount of fusectl, which is attached nowhere.
fn mount() -> Result<OwnedFd, Errno> {
    let context = fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(context.as_fd())?;
    let attributes =
        MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)
}
