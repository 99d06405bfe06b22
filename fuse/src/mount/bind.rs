//! Bind mounts, for sources that FUSE cannot serve: sockets, devices and kernel file systems.

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::mount::{OpenTreeFlags, open_tree};

use super::MountError;
use super::private::{AttributeScope, ContainerAccess, set_attributes};

/// The propagation of later mounts between a source and its clone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClonePropagation {
    /// Mounts in the source appear in the clone (`MS_SLAVE`).
    Slave,
    /// If the source is a shared mount, the clone is its peer: mounts in each appear in the other.
    Peer,
}

/// A detached clone of the directory or file `source`, with every mount below it (`rbind`). The caller can attach it like a
/// clone of a private mount.
///
/// The clone gets mount events of the host and sends none to it (`MS_SLAVE`). Otherwise an unmount of the clone would also
/// unmount the host's mounts below the source.
///
/// # Errors
/// When the process may not mount, or the source cannot be cloned.
pub fn bind(source: BorrowedFd<'_>, access: ContainerAccess) -> Result<OwnedFd, MountError> {
    const CLONE: OpenTreeFlags = OpenTreeFlags::OPEN_TREE_CLONE
        .union(OpenTreeFlags::OPEN_TREE_CLOEXEC)
        .union(OpenTreeFlags::AT_EMPTY_PATH)
        .union(OpenTreeFlags::AT_RECURSIVE);
    clone(source, CLONE, access, ClonePropagation::Slave)
}

/// Like [`bind()`], but without the mounts below `source` (`bind`), and with this propagation.
///
/// # Errors
/// Those of [`bind()`].
pub fn bind_alone(
    source: BorrowedFd<'_>,
    access: ContainerAccess,
    propagation: ClonePropagation,
) -> Result<OwnedFd, MountError> {
    const CLONE: OpenTreeFlags =
        OpenTreeFlags::OPEN_TREE_CLONE.union(OpenTreeFlags::OPEN_TREE_CLOEXEC).union(OpenTreeFlags::AT_EMPTY_PATH);
    clone(source, CLONE, access, propagation)
}

fn clone(
    source: BorrowedFd<'_>,
    clone_flags: OpenTreeFlags,
    access: ContainerAccess,
    propagation: ClonePropagation,
) -> Result<OwnedFd, MountError> {
    let failed = |cause: std::io::Error| MountError::new("cannot bind the source", cause);
    let clone = open_tree(source, c"", clone_flags).map_err(|errno| failed(errno.into()))?;
    let flags = if access == ContainerAccess::ReadOnly { libc::MOUNT_ATTR_RDONLY } else { 0 };
    let scope = match propagation {
        ClonePropagation::Slave => AttributeScope::AllBelow { propagation: libc::MS_SLAVE },
        ClonePropagation::Peer => AttributeScope::Itself,
    };
    set_attributes(&clone, flags, scope).map_err(failed)?;
    Ok(clone)
}
