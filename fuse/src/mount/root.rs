//! Root directories of new mount namespaces: an empty, read-only file system with at most one other mount in it.

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

use super::private::{Reach, Shape, set_attributes};

/// A mount in the root directory.
pub(crate) struct Inside<'a> {
    /// The mount, attached nowhere yet.
    pub(crate) mount: &'a OwnedFd,
    /// Its name in the root directory.
    pub(crate) name: &'a CStr,
    /// The type of its root.
    pub(crate) shape: Shape,
}

/// Makes `root`, which is attached nowhere yet, the root directory of the calling thread's mount namespace, and takes every
/// other mount but `inside` out of the namespace. The namespace begins as a copy of another one, and no other process is in
/// it.
///
/// # Errors
/// Where the root directory cannot be changed (the first file system of the kernel, `initramfs`).
pub(crate) fn become_root(root: &OwnedFd, inside: Option<Inside<'_>>) -> io::Result<()> {
    // First of all, nothing that happens here reaches the host.
    mount_change(c"/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)?;
    attach(root, CWD, c"/")?;
    if let Some(Inside { mount, name, shape }) = inside {
        match shape {
            Shape::Directory => mkdirat(root, name, Mode::from_raw_mode(0o555))?,
            Shape::File => mknodat(root, name, FileType::RegularFile, Mode::from_raw_mode(0o444), 0)?,
        }
        attach(mount, root.as_fd(), name)?;
    }
    set_attributes(root, libc::MOUNT_ATTR_RDONLY, Reach::Itself)?;
    fchdir(root)?;
    // The old root is put on top of the new one, and taken away from there with all that is mounted in it.
    pivot_root(c".", c".")?;
    unmount(c".", UnmountFlags::DETACH)?;
    Ok(chdir(c"/")?)
}

/// A new file system, attached nowhere yet.
pub(crate) fn file_system(
    kind: &str,
    (key, value): (&str, &str),
    attributes: MountAttrFlags,
) -> Result<OwnedFd, Errno> {
    let context = fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(context.as_fd(), "source", "podfs-server")?;
    fsconfig_set_string(context.as_fd(), key, value)?;
    fsconfig_create(context.as_fd())?;
    let nothing_runs = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC
        | attributes;
    fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, nothing_runs)
}

fn attach(mount: &OwnedFd, directory: BorrowedFd<'_>, at: &CStr) -> Result<(), Errno> {
    move_mount(mount, c"", directory, at, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
}
