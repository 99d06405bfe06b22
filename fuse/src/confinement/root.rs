//! Namespaces: without a network, and with an empty root directory.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{CWD, Mode, OFlags, open};
use rustix::io::Errno;
use rustix::mount::{MountAttrFlags, OpenTreeFlags, open_tree};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

use crate::mount::private::{AttributeScope, MountPointType, set_attributes};
use crate::mount::root::{MountInRoot, become_root, file_system};

/// Moves to a new network namespace without connections. Even its loopback device is down.
///
/// # Errors
/// Without `CAP_SYS_ADMIN`.
pub fn leave_network() -> io::Result<()> {
    // SAFETY: open sockets stay in their namespace, and no other code here uses the network.
    Ok(unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?)
}

/// Changes the root to an empty, read-only directory in a new mount namespace without other mounts. With `processes`, it has
/// `/proc`.
///
/// Descriptors of sources still work: a lookup needs no mount namespace, and it finds later mounts of the host below them.
///
/// # Errors
/// Without `CAP_SYS_ADMIN`, and where the root cannot be changed (the first file system of the kernel, `initramfs`). After an
/// error, the process is in its old namespace.
pub fn leave_files(processes: bool) -> io::Result<()> {
    let root = file_system("tmpfs", ("mode", "0555"), MountAttrFlags::empty())?;
    let processes = if processes { Some(process_files()?) } else { None };
    let inside = processes.as_ref().map(|mount| MountInRoot { mount, name: c"proc", shape: MountPointType::Directory });
    let old_namespace = open("/proc/self/ns/mnt", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    // SAFETY: this is the only thread, so no other thread shares the root or the working directory.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }?;
    become_root(&root, inside).inspect_err(|_| {
        // The process still has its capabilities, so it may return to its old namespace.
        let _lost = move_into_link_name_space(old_namespace.as_fd(), Some(LinkNameSpaceType::Mount));
    })
}

/// `/proc` with processes only: root could change the host by other files, such as `/proc/sys`.
fn process_files() -> Result<OwnedFd, Errno> {
    file_system("proc", ("subset", "pid"), MountAttrFlags::MOUNT_ATTR_RDONLY).or_else(|_| {
        // In a container whose `/proc` is covered in parts, the kernel refuses a new `/proc`.
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let clone = open_tree(CWD, c"/proc", flags | OpenTreeFlags::AT_RECURSIVE)?;
        let read_only = set_attributes(&clone, libc::MOUNT_ATTR_RDONLY, AttributeScope::Itself);
        read_only.map(|()| clone).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
    })
}
