//! Directories that stay open, because the next lookup is often in one of the last.

use std::ffi::OsStr;
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::sync::{Arc, MutexGuard};

use lru::LruCache;

use super::super::hashing::HashKey;
use super::super::node::Node;
use super::super::node_names::DirectoryName;
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
    pub found_by: Option<DirectoryName>,
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
        let opened = OpenedDirectory { file, _node: Arc::clone(node), found_by: None };
        // The replaced directory is dropped after the lock on the directories is released.
        let _before = self.open_directories().push(node.id, opened);
    }

    /// Records the name by which a LOOKUP found the directory `node`.
    pub(super) fn note_found_by(&self, node: &Node, parent: &Node, name: &OsStr) {
        let mut directories = self.open_directories();
        if let Some(opened) = directories.peek_mut(&node.id)
            && opened.found_by.as_ref().is_none_or(|by| by.parent != parent.id || by.name != name)
        {
            opened.found_by = Some(DirectoryName { parent: parent.id, name: name.to_owned() });
        }
    }

    /// Forgets which directory was found by a name. A caller has renamed it, so the kernel finds the directory by another name now, and
    /// does not look that name up.
    pub(super) fn forget_found_by(&self, parent: NodeId, name: &OsStr) {
        let mut directories = self.open_directories();
        let is_here = |by: &mut DirectoryName| by.parent == parent && by.name == name;
        directories.iter_mut().for_each(|(_, opened)| drop(opened.found_by.take_if(is_here)));
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
