//! The FUSE requests, answered from the tree.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use fuser::{
    AccessFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, LockOwner,
    OpenAccMode, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, Request,
};

use super::tree::{ViewNode, ViewNodeId, ViewNodeKind, ViewTree};

/// The time for which the kernel caches names and attributes that never change.
const FOR_EVER: Duration = Duration::from_secs(24 * 3600);
/// The kernel does not cache names and attributes that may change.
const NOT_AT_ALL: Duration = Duration::ZERO;
const BLOCK: u32 = 4096;

/// A tree as a file system.
pub(super) struct TreeFs {
    tree: Arc<Mutex<ViewTree>>,
    /// The listings of open directories, by handle, as they were at the open.
    listings: Mutex<HashMap<u64, Vec<ListedName>>>,
    next_handle: AtomicU64,
}

struct ListedName {
    number: ViewNodeId,
    kind: FileType,
    name: String,
}

impl TreeFs {
    pub(super) fn new(tree: Arc<Mutex<ViewTree>>) -> TreeFs {
        TreeFs { tree, listings: Mutex::default(), next_handle: AtomicU64::new(0) }
    }

    fn tree(&self) -> MutexGuard<'_, ViewTree> {
        self.tree.lock().expect("no thread panics with the tree")
    }

    fn listings(&self) -> MutexGuard<'_, HashMap<u64, Vec<ListedName>>> {
        self.listings.lock().expect("no thread panics with the listings")
    }
}

impl Filesystem for TreeFs {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let mut tree = self.tree();
        let names_stay = tree.node(ViewNodeId(parent.0)).is_some_and(|node| node.is_final);
        match name.to_str().and_then(|name| tree.look_up(ViewNodeId(parent.0), name)) {
            Some(node) => {
                let (attributes, entry) = (cache_time(node.is_final), cache_time(names_stay));
                reply.entry_with_ttls(&attributes, &entry, &attributes_of(node), Generation(0));
            }
            None => reply.error(Errno::ENOENT),
        }
    }

    fn forget(&self, _: &Request, number: INodeNo, lookups: u64) {
        self.tree().forget(ViewNodeId(number.0), lookups);
    }

    fn getattr(&self, _: &Request, number: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.tree().node(ViewNodeId(number.0)) {
            Some(node) => reply.attr(&cache_time(node.is_final), &attributes_of(node)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn readlink(&self, _: &Request, number: INodeNo, reply: ReplyData) {
        match self.tree().node(ViewNodeId(number.0)).map(|node| &node.kind) {
            Some(ViewNodeKind::Link(target)) => reply.data(target.as_bytes()),
            Some(_) => reply.error(Errno::EINVAL),
            None => reply.error(Errno::ENOENT),
        }
    }

    /// The kernel sends ACCESS only for [`Audience::Owner`](super::Audience::Owner), because otherwise it checks modes
    /// itself. The owner may read everything, may write nothing, and may run files that have an execute bit.
    fn access(&self, _: &Request, number: INodeNo, mask: AccessFlags, reply: ReplyEmpty) {
        match self.tree().node(ViewNodeId(number.0)) {
            None => reply.error(Errno::ENOENT),
            Some(_) if mask.contains(AccessFlags::W_OK) => reply.error(Errno::EROFS),
            Some(ViewNode { kind: ViewNodeKind::File(_), mode, .. })
                if mask.contains(AccessFlags::X_OK) && mode & 0o111 == 0 =>
            {
                reply.error(Errno::EACCES);
            }
            Some(_) => reply.ok(),
        }
    }

    fn open(&self, _: &Request, number: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        match self.tree().node(ViewNodeId(number.0)).map(|node| &node.kind) {
            Some(ViewNodeKind::File(_)) if flags.acc_mode() != OpenAccMode::O_RDONLY => reply.error(Errno::EROFS),
            // The file of a number never changes its content.
            Some(ViewNodeKind::File(_)) => reply.opened(FileHandle(0), FopenFlags::FOPEN_KEEP_CACHE),
            Some(_) => reply.error(Errno::EISDIR),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn read(
        &self,
        _: &Request,
        number: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match self.tree().node(ViewNodeId(number.0)).map(|node| &node.kind) {
            Some(ViewNodeKind::File(content)) => {
                let start = usize::try_from(offset).unwrap_or(usize::MAX).min(content.len());
                let end = start.saturating_add(size as usize).min(content.len());
                reply.data(&content[start..end]);
            }
            _ => reply.error(Errno::EINVAL),
        }
    }

    fn opendir(&self, _: &Request, number: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let Some(listed) = list(&self.tree(), ViewNodeId(number.0)) else { return reply.error(Errno::ENOTDIR) };
        let handle = self.next_handle.fetch_add(1, Ordering::Relaxed);
        self.listings().insert(handle, listed);
        reply.opened(FileHandle(handle), FopenFlags::empty());
    }

    fn readdir(&self, _: &Request, _: INodeNo, handle: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let listings = self.listings();
        let Some(listed) = listings.get(&handle.0) else { return reply.error(Errno::EBADF) };
        // The offset in an entry is the one at which the kernel continues: that of the next entry.
        for (entry, next) in listed.iter().zip(1..).skip(usize::try_from(offset).unwrap_or(usize::MAX)) {
            if reply.add(INodeNo(entry.number.0), next, entry.kind, &entry.name) {
                break;
            }
        }
        reply.ok();
    }

    fn releasedir(&self, _: &Request, _: INodeNo, handle: FileHandle, _: OpenFlags, reply: ReplyEmpty) {
        self.listings().remove(&handle.0);
        reply.ok();
    }
}

fn cache_time(is_final: bool) -> Duration {
    if is_final { FOR_EVER } else { NOT_AT_ALL }
}

fn list(tree: &ViewTree, number: ViewNodeId) -> Option<Vec<ListedName>> {
    let ViewNodeKind::Directory { entries, .. } = &tree.node(number)?.kind else { return None };
    // The kernel resolves `..` by itself, whatever number it has here.
    let dots = [".", ".."].map(|name| ListedName { number, kind: FileType::Directory, name: name.to_owned() });
    let listed = entries.iter().filter_map(|(name, number)| {
        Some(ListedName { number: *number, kind: file_type(tree.node(*number)?), name: name.clone() })
    });
    Some(dots.into_iter().chain(listed).collect())
}

fn file_type(node: &ViewNode) -> FileType {
    match node.kind {
        ViewNodeKind::Directory { .. } => FileType::Directory,
        ViewNodeKind::Link(_) => FileType::Symlink,
        ViewNodeKind::File(_) => FileType::RegularFile,
    }
}

fn attributes_of(node: &ViewNode) -> FileAttr {
    let (size, links) = match &node.kind {
        ViewNodeKind::Directory { .. } => (0, 2),
        ViewNodeKind::Link(target) => (target.len(), 1),
        ViewNodeKind::File(content) => (content.len(), 1),
    };
    let size = size as u64;
    FileAttr {
        ino: INodeNo(node.number.0),
        size,
        blocks: size.div_ceil(512),
        atime: node.modified,
        mtime: node.modified,
        ctime: node.modified,
        crtime: node.modified,
        kind: file_type(node),
        perm: node.mode,
        nlink: links,
        uid: node.uid,
        gid: node.gid,
        rdev: 0,
        blksize: BLOCK,
        flags: 0,
    }
}
