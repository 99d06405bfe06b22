//! Namespaces: no network, and a root directory with nothing in it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{CWD, Mode, OFlags, open};
use rustix::io::Errno;
use rustix::mount::{MountAttrFlags, OpenTreeFlags, open_tree};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

use crate::mount::private::{Reach, Shape, set_attributes};
use crate::mount::root::{Inside, become_root, file_system};

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
/// Descriptors of sources go on working: looking up a name needs no mount namespace, and what the host mounts below them
/// later is found.
///
/// # Errors
/// Without `CAP_SYS_ADMIN`, and where the root cannot be changed (the first file system of the kernel, `initramfs`). The
/// process is then where it was.
pub fn leave_files(processes: bool) -> io::Result<()> {
    let root = file_system("tmpfs", ("mode", "0555"), MountAttrFlags::empty())?;
    let processes = if processes { Some(process_files()?) } else { None };
    let inside = processes.as_ref().map(|mount| Inside { mount, name: c"proc", shape: Shape::Directory });
    let home = open("/proc/self/ns/mnt", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    // SAFETY: this is the only thread, so no other thread shares the root or the working directory.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }?;
    become_root(&root, inside).inspect_err(|_| {
        // It has all capabilities that it had when it left, so it may come back.
        let _lost = move_into_link_name_space(home.as_fd(), Some(LinkNameSpaceType::Mount));
    })
}

/// `/proc` without anything but processes: `/proc/sys` and the like would let root change the host.
fn process_files() -> Result<OwnedFd, Errno> {
    file_system("proc", ("subset", "pid"), MountAttrFlags::MOUNT_ATTR_RDONLY).or_else(|_| {
        // The kernel refuses a container a new `/proc` if parts of the container's own one are covered.
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let clone = open_tree(CWD, c"/proc", flags | OpenTreeFlags::AT_RECURSIVE)?;
        let read_only = set_attributes(&clone, libc::MOUNT_ATTR_RDONLY, Reach::Itself);
        read_only.map(|()| clone).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
    })
}
