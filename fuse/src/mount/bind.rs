//! Bind mounts, for sources that FUSE cannot serve: sockets, devices and kernel file systems.

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::mount::{OpenTreeFlags, open_tree};

use super::MountError;
use super::private::{Access, Reach, set_attributes};

/// Which mounts that are made later appear in a clone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Propagation {
    /// Those in the source (`MS_SLAVE`).
    Slave,
    /// Also those in the clone appear in the source, if the source is a shared mount: they are peers.
    Peer,
}

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
    clone(source, CLONE, access, Propagation::Slave)
}

/// As [`bind()`], without the mounts below it (`bind`), and with this propagation.
///
/// # Errors
/// As [`bind()`].
pub fn bind_alone(source: BorrowedFd<'_>, access: Access, propagation: Propagation) -> Result<OwnedFd, MountError> {
    const CLONE: OpenTreeFlags =
        OpenTreeFlags::OPEN_TREE_CLONE.union(OpenTreeFlags::OPEN_TREE_CLOEXEC).union(OpenTreeFlags::AT_EMPTY_PATH);
    clone(source, CLONE, access, propagation)
}

fn clone(
    source: BorrowedFd<'_>,
    how: OpenTreeFlags,
    access: Access,
    propagation: Propagation,
) -> Result<OwnedFd, MountError> {
    let failed = |cause: std::io::Error| MountError::new("cannot bind the source", cause);
    let clone = open_tree(source, c"", how).map_err(|errno| failed(errno.into()))?;
    let flags = if access == Access::ReadOnly { libc::MOUNT_ATTR_RDONLY } else { 0 };
    let reach = match propagation {
        Propagation::Slave => Reach::AllBelow { propagation: libc::MS_SLAVE },
        Propagation::Peer => Reach::Itself,
    };
    set_attributes(&clone, flags, reach).map_err(failed)?;
    Ok(clone)
}
