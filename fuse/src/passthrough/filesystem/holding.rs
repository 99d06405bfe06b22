//! Nodes without lasting file handles: the descriptors that they keep, and the names by which the server finds them again
//! ([`node_names`](super::super::node_names)).

use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{FileType, Mode, OFlags, openat};
use rustix::io::Errno;

use super::super::attributes::attributes_of;
use super::super::handle::FileHandle;
use super::super::node::{FileIdentity, Node};
use super::super::nodes::Nodes;
use super::PassthroughFilesystem;
use crate::session::NodeId;

impl PassthroughFilesystem {
    /// Keeps a node open if it has no handle that opens it again. If this fails, the kernel must not get the node.
    pub(super) fn keep_open(
        &self,
        node: &Arc<Node>,
        open: impl FnOnce() -> Result<OwnedFd, Errno>,
    ) -> Result<(), Errno> {
        if node.handle().is_some() {
            return Ok(());
        }
        if node.held().is_none() {
            let mut taken = self.descriptors.take();
            // The server cannot close the descriptors of all nodes, so one may not be enough.
            while taken.is_err() {
                let Some(oldest) = self.held.pop_oldest() else { break };
                close_surplus(&self.nodes, Some(oldest));
                taken = self.descriptors.take();
            }
            let kept = taken.and_then(|taken| Ok((open()?, taken)));
            let (file, taken) = kept.inspect_err(|_| self.forget(node.id, 1))?;
            node.hold(file, taken);
        }
        if node.id != NodeId::ROOT {
            close_surplus(&self.nodes, self.held.used(node.id));
        }
        Ok(())
    }

    /// Separates the node of a deleted file from `file`, which has got its inode number. The descriptor that the node keeps prevents that
    /// on file systems of the kernel. A server of FUSE is not told of it, and may give the number to another file at once.
    pub(super) fn separate_replaced(&self, identity: &FileIdentity, file: BorrowedFd<'_>) {
        if matches!(identity, FileIdentity::Handle { .. }) {
            return;
        }
        let Some((node, held)) = self.nodes.find(identity).and_then(|node| Some((Arc::clone(&node), node.held()?)))
        else {
            return;
        };
        // The kernel has both inodes now, so another handle is that of another inode. It may be a hard link of the same file.
        let handle = |file: BorrowedFd<'_>| FileHandle::of(file).ok().map(|(handle, _)| handle);
        let is_gone = || match attributes_of(held.as_fd()) {
            Ok(found) => found.stx_nlink == 0,
            Err(errno) => [Errno::NOENT, Errno::STALE].contains(&errno),
        };
        if handle(held.as_fd()) != handle(file) && is_gone() {
            node.forget_name();
            self.nodes.separate(&node);
        }
    }

    /// Records the name of a node without a lasting handle, so that the server finds the node again when its descriptor is closed.
    pub(super) fn record_name(&self, node: &Node, parent: &Node, name: &OsStr) {
        if node.handle().is_none() && (node.kind != FileType::Directory || has_lasting_number(node)) {
            node.record_name(parent.id, name);
        }
    }

    /// As [`Self::record_name`], for the file that has just been moved to `name`.
    pub(super) fn record_move(&self, directory: BorrowedFd<'_>, parent: &Node, name: &OsStr) {
        if parent.handle().is_some() {
            return;
        }
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let Ok(file) = openat(directory, name, flags, Mode::empty()) else { return };
        let identity = self.mounts.identify(file.as_fd(), Some(parent));
        if let Some(node) = identity.ok().and_then(|(identity, _)| self.nodes.find(&identity)) {
            self.record_name(&node, parent, name);
        }
    }
}

/// Closes the descriptor of a node that the server finds again by its name.
pub(super) fn close_surplus(nodes: &Nodes, surplus: Option<NodeId>) {
    if let Some(node) = surplus.and_then(|node| nodes.get(node)) {
        node.let_go_if_named();
    }
}

/// Whether the file system will give the directory the same inode number again. A server of FUSE that leaves the numbers to libfuse has
/// another one after each time that the kernel forgets the directory: the number by which the server knows it.
fn has_lasting_number(directory: &Node) -> bool {
    let Some(held) = directory.held() else { return directory.directory_name().is_some() };
    let number = FileHandle::of(held.as_fd()).ok().and_then(|(handle, _)| handle.fuse_node());
    number.is_some_and(|number| !directory.has_number(number))
}
