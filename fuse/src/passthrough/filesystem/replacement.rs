//! Names in directories that the host has replaced while the kernel still has their names cached.
//!
//! A directory that was removed has no names, so each request that finds or makes a name in it fails with `ENOENT`. If the name of the
//! directory leads to another file by now, a caller that came by that name must get what is there. The answer is `ESTALE` then: the
//! kernel looks up each name of the path again. A process whose working directory it is comes back with the same request, and gets
//! `ENOENT` ([`ReplacedFiles`](super::super::replaced::ReplacedFiles)). An OPENDIR of a directory that was removed is answered in the same
//! way, and the second one opens the directory. So is a LINK of a file that has no name any more.
//!
//! mkdir(2), mknod(2), symlink(2) and link(2) look the new name up before they make it, and the kernel returns an error of that lookup
//! to the caller. So LOOKUP answers `ESTALE` only for a name that the new directory has.

use std::ffi::CString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags, openat, statx};
use rustix::io::Errno;

use super::super::attributes::attributes_of;
use super::super::handle::FileHandle;
use super::super::node::Node;
use super::super::node_names::DirectoryName;
use super::PassthroughFilesystem;
use crate::session::{Answer, Filesystem, FuseOperation, NodeId, Request};

/// The most directories above a removed one whose names are looked up again.
const LEVELS: usize = 64;

impl PassthroughFilesystem {
    /// The outcome of a request: `ESTALE` if the kernel has to look the path up again.
    pub(super) fn looked_at_again(
        &self,
        request: &Request<'_>,
        outcome: Result<Answer, Errno>,
    ) -> Result<Answer, Errno> {
        match outcome {
            Err(Errno::STALE) => self.replaced.found_stale(request),
            // ext4 refuses files without a name in a removed directory in this way.
            Err(Errno::NOENT | Errno::PERM) if self.is_replaced(request) => return Err(Errno::STALE),
            _ => self.replaced.answered(request, outcome.is_ok()),
        }
        outcome
    }

    /// Whether to send the thread back: its request failed because the directory was replaced.
    fn is_replaced(&self, request: &Request<'_>) -> bool {
        if let FuseOperation::Link { node, .. } = request.operation
            && self.is_removed(node)
        {
            // A caller that came by a path gets the file that has the name now. One with a descriptor comes back.
            let sends_back = self.replaced.sends_back(request);
            if sends_back {
                self.replaced.found_stale(request);
            }
            return sends_back;
        }
        // No other process changes the source, or each look at it may be a message to another machine.
        if self.options.has_exclusive_source() || self.is_remote() {
            return false;
        }
        let replacement = |id| self.open_replacement(&*self.nodes.get(id)?, LEVELS);
        let is_elsewhere = match request.operation {
            FuseOperation::Lookup { name } => replacement(request.node)
                .is_some_and(|now| statx(now, name, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::empty()).is_ok()),
            FuseOperation::Rename { new_parent, .. } => {
                replacement(request.node).or_else(|| replacement(new_parent)).is_some()
            }
            FuseOperation::TmpFile { .. } => replacement(request.node).is_some(),
            _ => request.operation.entry().is_some() && replacement(request.node).is_some(),
        };
        is_elsewhere && self.replaced.sends_back(request)
    }

    /// Whether a known file has no name any more.
    fn is_removed(&self, node: NodeId) -> bool {
        let file = self.nodes.get(node).and_then(|node| self.descriptor(&node).ok());
        file.is_some_and(|file| attributes_of(file.as_fd()).is_ok_and(|found| found.stx_nlink == 0))
    }

    /// Whether to send the thread of an OPENDIR back: the directory is removed, and its name leads to another file.
    pub(super) fn is_directory_replaced(&self, directory: &Node, request: &Request<'_>) -> bool {
        self.open_replacement(directory, LEVELS).is_some() && self.replaced.sends_back(request)
    }

    /// A descriptor of the file to which the name of `directory` leads now, if that is another file.
    fn open_replacement(&self, directory: &Node, levels: usize) -> Option<OwnedFd> {
        let levels = levels.checked_sub(1).filter(|_| directory.id != NodeId::ROOT)?;
        let DirectoryName { parent, name } = self.open_directories().peek(&directory.id)?.found_by.clone()?;
        let parent = self.nodes.get(parent)?;
        let name = CString::new(name.as_bytes()).ok()?;
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open = |above: BorrowedFd<'_>| openat(above, &*name, flags, Mode::empty()).ok();
        let known = directory.handle()?;
        let above = self.directory(&parent);
        match above.as_ref().map_err(|errno| *errno).and_then(|above| FileHandle::of_name(above.as_fd(), &name)) {
            Ok((found, _)) if found == *known => None,
            Ok(_) => open(above.ok()?.as_fd()),
            // The directory above may be replaced, too.
            Err(Errno::NOENT | Errno::STALE) => open(self.open_replacement(&parent, levels)?.as_fd()),
            Err(_) => None,
        }
    }
}
