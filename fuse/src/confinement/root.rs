//! Namespaces: no network, and a root directory with nothing in it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{CWD, Mode, OFlags, mkdirat, open};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags,
    fsconfig_create, fsconfig_set_string, fsmount, fsopen, mount_change, move_mount, open_tree, unmount,
};
use rustix::process::{chdir, fchdir, pivot_root};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

use crate::mount::private::{Reach, set_attributes};

/// A new network namespace has no connection to anything; even its loopback device is down.
///
/// # Errors
/// Without `CAP_SYS_ADMIN`.
pub fn leave_network() -> io::Result<()> {
    // SAFETY: sockets that are open stay where they are; nothing else here has to do with the network.
    Ok(unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?)
}

/// Makes an empty, read-only directory the root, in a mount namespace that has nothing else. With `processes`, there is
/// `/proc` in it.
///
/// Descriptors of the host's directories go on working: looking up a name needs no mount namespace, and what the host
/// mounts below them later is found.
///
/// # Errors
/// Without `CAP_SYS_ADMIN`, and where the root cannot be changed (the first file system of the kernel, `initramfs`). The
/// process is then where it was.
pub fn leave_files(processes: bool) -> io::Result<()> {
    let root = mount("tmpfs", ("mode", "0555"), MountAttrFlags::empty())?;
    let processes = if processes { Some(process_files()?) } else { None };
    let home = open("/proc/self/ns/mnt", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    // SAFETY: this is the only thread, so nobody relies on sharing the root or the working directory.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }?;
    enter(&root, processes.as_ref()).inspect_err(|_| {
        // It has all capabilities that it had when it left, so it may come back.
        let _lost = move_into_link_name_space(home.as_fd(), Some(LinkNameSpaceType::Mount));
    })
}

/// The namespace begins as a copy of the host's; here everything of the host is taken out of it.
fn enter(root: &OwnedFd, processes: Option<&OwnedFd>) -> io::Result<()> {
    // First of all, nothing that happens here reaches the host.
    mount_change(c"/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)?;
    attach(root, CWD, c"/")?;
    if let Some(processes) = processes {
        mkdirat(root, c"proc", Mode::from_raw_mode(0o555))?;
        attach(processes, root.as_fd(), c"proc")?;
    }
    set_attributes(root, libc::MOUNT_ATTR_RDONLY, Reach::Itself)?;
    fchdir(root)?;
    // The old root is put on top of the new one, and taken away from there with all that is mounted in it.
    pivot_root(c".", c".")?;
    unmount(c".", UnmountFlags::DETACH)?;
    Ok(chdir(c"/")?)
}

/// `/proc` without anything but processes: `/proc/sys` and the like would let root change the host.
fn process_files() -> Result<OwnedFd, Errno> {
    mount("proc", ("subset", "pid"), MountAttrFlags::MOUNT_ATTR_RDONLY).or_else(|_| {
        // A container whose `/proc` is covered in parts may not have one that is not.
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let clone = open_tree(CWD, c"/proc", flags | OpenTreeFlags::AT_RECURSIVE)?;
        let read_only = set_attributes(&clone, libc::MOUNT_ATTR_RDONLY, Reach::Itself);
        read_only.map(|()| clone).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
    })
}

/// A new file system, attached nowhere yet.
fn mount(kind: &str, (key, value): (&str, &str), attributes: MountAttrFlags) -> Result<OwnedFd, Errno> {
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

fn attach(mount: &OwnedFd, directory: BorrowedFd<'_>, at: &std::ffi::CStr) -> Result<(), Errno> {
    move_mount(mount, c"", directory, at, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
}
