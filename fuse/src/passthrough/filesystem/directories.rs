//! Directories that stay open, because the next lookup is often in one of the last.

use std::ffi::OsStr;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, MutexGuard};

use lru::LruCache;
use rustix::fs::{FileType, Mode, OFlags, openat};

use super::super::handle::FileHandle;
use super::super::hashing::HashKey;
use super::super::node::Node;
use super::PassthroughFilesystem;
use crate::session::NodeId;

/// The most directories that stay open.
const OPEN_DIRECTORIES: NonZeroUsize = NonZeroUsize::new(512).expect("it is not zero");

/// The directories that stay open. One that was used long ago makes room for the next.
pub(super) type OpenedDirectories = LruCache<NodeId, OpenedDirectory, HashKey>;

/// A directory that stays open. It keeps its node, so that the server need not make the node anew for each request.
pub(super) struct OpenedDirectory {
    pub file: Arc<OwnedFd>,
    _node: Arc<Node>,
    /// The directory and the name in it by which the last LOOKUP found this one.
    pub place: Option<(NodeId, Box<OsStr>)>,
}

/// A table without directories.
pub(super) fn no_directories() -> OpenedDirectories {
    LruCache::with_hasher(OPEN_DIRECTORIES, HashKey::default())
}

impl PassthroughFilesystem {
    pub(super) fn open_directories(&self) -> MutexGuard<'_, OpenedDirectories> {
        self.directories.lock().expect("a thread that panics ends the process")
    }

    /// Keeps a directory open for the next lookups in it.
    pub(super) fn keep_directory(&self, node: &Arc<Node>, file: Arc<OwnedFd>) {
        let opened = OpenedDirectory { file, _node: Arc::clone(node), place: None };
        // The replaced directory is dropped after the lock on the directories is released.
        let _before = self.open_directories().push(node.id, opened);
    }

    /// Records the name by which a LOOKUP found the directory `node`.
    pub(super) fn note_place(&self, node: &Node, parent: &Node, name: &OsStr) {
        let mut directories = self.open_directories();
        if let Some(opened) = directories.peek_mut(&node.id)
            && opened.place.as_ref().is_none_or(|(known, by)| *known != parent.id || **by != *name)
        {
            opened.place = Some((parent.id, name.into()));
        }
    }

    /// Records the name of a node without a lasting handle, so that the server finds the node again when its descriptor is closed.
    pub(super) fn record_place(&self, node: &Node, parent: &Node, name: &OsStr) {
        if node.handle().is_none() && (node.kind != FileType::Directory || has_lasting_number(node)) {
            node.set_place(parent.id, name);
        }
    }

    /// As [`Self::record_place`], for the file that has just been moved to `name`.
    pub(super) fn record_move(&self, directory: BorrowedFd<'_>, parent: &Node, name: &OsStr) {
        if parent.handle().is_some() {
            return;
        }
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let Ok(file) = openat(directory, name, flags, Mode::empty()) else { return };
        let identity = self.mounts.identify(file.as_fd(), Some(parent));
        if let Some(node) = identity.ok().and_then(|(identity, _)| self.nodes.find(&identity)) {
            self.record_place(&node, parent, name);
        }
    }

    /// Forgets which directory was found by a name. A caller has renamed it, so the kernel finds the directory by another name now, and
    /// does not look that name up.
    pub(super) fn forget_place(&self, parent: NodeId, name: &OsStr) {
        let mut directories = self.open_directories();
        let is_here = |(known, by): &mut (NodeId, Box<OsStr>)| *known == parent && **by == *name;
        directories.iter_mut().for_each(|(_, opened)| drop(opened.place.take_if(is_here)));
    }

    /// Closes a directory that the kernel has forgotten.
    pub(super) fn forget_directory(&self, node: NodeId) {
        let mut directories = self.open_directories();
        // A LOOKUP may just have found the directory again, and opened it.
        let gone = if self.nodes.is_known(node) { None } else { directories.pop(&node) };
        drop(directories);
        drop(gone);
    }
}

/// Whether the file system will give the directory the same inode number again. A server of FUSE that leaves the numbers to libfuse has
/// another one after each time that the kernel forgets the directory: the number by which the server knows it.
fn has_lasting_number(directory: &Node) -> bool {
    let Some(held) = directory.held() else { return directory.place().is_some() };
    let number = FileHandle::of(held.as_fd()).ok().and_then(|(handle, _)| handle.fuse_node());
    number.is_some_and(|number| !directory.has_number(number))
}
