//! Bind mounts, for what cannot be served over FUSE: sockets, devices and kernel file systems.

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::mount::{OpenTreeFlags, open_tree};

use super::MountError;
use super::private::{Access, Reach, set_attributes};

/// A clone of what `source` is open on, with every mount below it, attached nowhere yet (`rbind`). It can be
/// attached like a clone of a private mount.
///
/// The clone follows what is mounted and unmounted on the host (`MS_SLAVE`), and nothing done to it reaches the host:
/// without that, unmounting it would unmount on the host what is mounted below the source.
///
/// # Errors
/// When the process may not mount, or the source cannot be cloned.
pub fn bind(source: BorrowedFd<'_>, access: Access) -> Result<OwnedFd, MountError> {
    const CLONE: OpenTreeFlags = OpenTreeFlags::OPEN_TREE_CLONE
        .union(OpenTreeFlags::OPEN_TREE_CLOEXEC)
        .union(OpenTreeFlags::AT_EMPTY_PATH)
        .union(OpenTreeFlags::AT_RECURSIVE);
    clone(source, CLONE, access)
}

/// As [`bind()`], without the mounts below it (`bind`); what is mounted below the source later appears below the clone.
///
/// # Errors
/// As [`bind()`].
pub fn bind_alone(source: BorrowedFd<'_>, access: Access) -> Result<OwnedFd, MountError> {
    const CLONE: OpenTreeFlags =
        OpenTreeFlags::OPEN_TREE_CLONE.union(OpenTreeFlags::OPEN_TREE_CLOEXEC).union(OpenTreeFlags::AT_EMPTY_PATH);
    clone(source, CLONE, access)
}

fn clone(source: BorrowedFd<'_>, how: OpenTreeFlags, access: Access) -> Result<OwnedFd, MountError> {
    let failed = |cause: std::io::Error| MountError::new("cannot bind the source", cause);
    let clone = open_tree(source, c"", how).map_err(|errno| failed(errno.into()))?;
    let flags = if access == Access::ReadOnly { libc::MOUNT_ATTR_RDONLY } else { 0 };
    set_attributes(&clone, flags, Reach::AllBelow { propagation: libc::MS_SLAVE }).map_err(failed)?;
    Ok(clone)
}
