//! The root directory of a new mount namespace: an empty, read-only file system with at most one mount in it.

use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use std::io;

use rustix::fs::{CWD, FileType, Mode, mkdirat, mknodat};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags, UnmountFlags, fsconfig_create,
    fsconfig_set_string, fsmount, fsopen, mount_change, move_mount, unmount,
};
use rustix::process::{chdir, fchdir, pivot_root};

use super::private::{AttributeScope, MountPointType, set_attributes};

/// A mount in the root directory.
pub(crate) struct MountInRoot<'a> {
    /// The detached mount.
    pub(crate) mount: &'a OwnedFd,
    /// Its name in the root directory.
    pub(crate) name: &'a CStr,
    /// The type of its root.
    pub(crate) shape: MountPointType,
}

/// Makes the detached mount `root` the root directory of the calling thread's mount namespace, with `inside` in it, and unmounts
/// all other mounts of the namespace. The namespace must be a new copy of another one, without other processes.
///
/// # Errors
/// When the kernel cannot change the root directory (the first file system of the kernel, `initramfs`).
pub(crate) fn become_root(root: &OwnedFd, inside: Option<MountInRoot<'_>>) -> io::Result<()> {
    // Changes of private mounts do not propagate to the host.
    mount_change(c"/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)?;
    attach(root, CWD, c"/")?;
    if let Some(MountInRoot { mount, name, shape }) = inside {
        match shape {
            MountPointType::Directory => mkdirat(root, name, Mode::from_raw_mode(0o555))?,
            MountPointType::File => mknodat(root, name, FileType::RegularFile, Mode::from_raw_mode(0o444), 0)?,
        }
        attach(mount, root.as_fd(), name)?;
    }
    set_attributes(root, libc::MOUNT_ATTR_RDONLY, AttributeScope::Itself)?;
    fchdir(root)?;
    // pivot_root(2) puts the old root on top of the new one. There, it is unmounted with all its mounts.
    pivot_root(c".", c".")?;
    unmount(c".", UnmountFlags::DETACH)?;
    Ok(chdir(c"/")?)
}

/// A new, detached file system.
pub(crate) fn file_system(
    kind: &str,
    (key, value): (&str, &str),
    attributes: MountAttrFlags,
) -> Result<OwnedFd, Errno> {
    let context = fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(context.as_fd(), "source", "podfs-server")?;
    fsconfig_set_string(context.as_fd(), key, value)?;
    fsconfig_create(context.as_fd())?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC
        | attributes;
    fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)
}

fn attach(mount: &OwnedFd, directory: BorrowedFd<'_>, at: &CStr) -> Result<(), Errno> {
    move_mount(mount, c"", directory, at, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
}
