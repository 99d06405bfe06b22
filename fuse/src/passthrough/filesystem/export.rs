//! File handles of callers (`open_by_handle_at(2)`).
//!
//! The kernel makes a handle from a node's number. When it has forgotten the node, it looks up the name `.` in the node with that
//! number (`FUSE_EXPORT_SUPPORT`). For a directory it also looks up the name `..`, up to a directory that it knows, and finds each
//! name in a listing.
//!
//! A lookup in a node that the volume does not have fails with `ESTALE`; [`Nodes`](super::super::nodes::Nodes) says how long the
//! volume has a node. So by a handle, a caller opens only files that were looked up in this volume before.
//!
//! A directory that was moved out of the source still opens by its handle, but its `..` is outside of the source. So the server
//! answers `..` only with a directory from which `..` leads to the source.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags, openat, statx};
use rustix::io::Errno;

use super::super::node::Node;
use super::PassthroughFilesystem;
use crate::session::{Answer, NodeId};

/// The most levels that podfs goes up from a directory to find the source.
const LEVELS: usize = 2048;
/// The flags to open a directory on the way up to the source.
const UP: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

impl PassthroughFilesystem {
    /// Answers with `node` itself, whose number the kernel has from a handle.
    pub(super) fn look_up_itself(&self, node: &Arc<Node>) -> Result<Answer, Errno> {
        let (found, entry) = self.enter(self.open_file_again(node, OFlags::PATH)?, node, false)?;
        if found.id != node.id {
            self.forget(found.id, 1);
            return Err(Errno::STALE);
        }
        Ok(Answer::Entry(entry))
    }

    /// Answers with the directory that the directory `node` is in.
    pub(super) fn look_up_parent(&self, node: &Arc<Node>) -> Result<Answer, Errno> {
        if node.id == NodeId::ROOT {
            return Err(Errno::STALE);
        }
        let parent = openat(&*self.directory(node)?, c"..", UP, Mode::empty())?;
        if !self.leads_to_source(&parent)? {
            return Err(Errno::STALE);
        }
        self.enter(parent, node, false).map(|(_, entry)| Answer::Entry(entry))
    }

    /// Whether a directory is the source or below it.
    fn leads_to_source(&self, directory: &OwnedFd) -> Result<bool, Errno> {
        let source = self.nodes.get(NodeId::ROOT).and_then(|root| root.held()).ok_or(Errno::STALE)?;
        let source = Location::of(source.as_fd())?;
        let mut above: Option<OwnedFd> = None;
        let mut last = None;
        for _ in 0..LEVELS {
            let at = above.as_ref().unwrap_or(directory);
            let location = Location::of(at.as_fd())?;
            if location == source {
                return Ok(true);
            }
            // At the top, `..` leads nowhere else.
            if last == Some(location) {
                break;
            }
            last = Some(location);
            above = Some(openat(at, c"..", UP, Mode::empty())?);
        }
        Ok(false)
    }
}

/// The identity of a directory. Two directories that exist at the same time have different ones.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Location {
    mount: u64,
    device: (u32, u32),
    ino: u64,
}

impl Location {
    fn of(directory: BorrowedFd<'_>) -> Result<Self, Errno> {
        let wanted = StatxFlags::INO | StatxFlags::MNT_ID;
        let found = statx(directory, c"", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, wanted)?;
        let device = (found.stx_dev_major, found.stx_dev_minor);
        Ok(Self { mount: found.stx_mnt_id, device, ino: found.stx_ino })
    }
}
