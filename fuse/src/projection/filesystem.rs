//! The FUSE side of a projection: requests in, answers out, everything else in [`tree`](super::tree).
//!
//! The answers make a warm volume silent. `ENOSYS` to OPEN, OPENDIR, FLUSH and the xattr requests
//! is remembered by the kernel for the whole connection, and entries, attributes, links and absent
//! names are cached without end: the tree changes only through the kernel's own calls on the private
//! mount, so the kernel's caches are right by themselves.

use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

use fuser::{
    AccessFlags, BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty,
    ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};

use super::tree::{Attributes, NodeId, NodeKind, Tree};
use super::undo::Undo;
use crate::server::activity::Activity;
use crate::server::trace::Trace;

/// How long the kernel may keep what it was told: in practice, for ever.
const FOREVER: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

/// `st_blksize`, and what `st_blocks` is rounded up to, as on tmpfs.
const BLOCK: u64 = 4096;

/// A tree that the session thread reads and the control thread announces changes to.
#[derive(Clone)]
pub struct SharedTree(Arc<Mutex<Tree>>);

impl SharedTree {
    /// Shares `tree`.
    pub fn new(tree: Tree) -> Self {
        Self(Arc::new(Mutex::new(tree)))
    }

    /// The tree, for a short time: no request is answered meanwhile.
    pub fn lock(&self) -> MutexGuard<'_, Tree> {
        self.0.lock().expect("a thread that panics ends the process")
    }
}

/// The file system of one projection.
pub struct ProjectionFilesystem {
    tree: SharedTree,
    activity: Arc<Activity>,
    undo: Arc<Undo>,
    trace: Option<Trace>,
}

impl ProjectionFilesystem {
    /// Serves `tree`, keeps account in `activity`, and reports each to `trace`.
    pub fn new(tree: SharedTree, activity: Arc<Activity>, undo: Arc<Undo>, trace: Option<Trace>) -> Self {
        Self { tree, activity, undo, trace }
    }

    /// Runs one request against the tree.
    fn serve<T>(
        &self,
        operation: &str,
        request: &Request,
        (node, name): (INodeNo, Option<&OsStr>),
        answer: impl FnOnce(&mut Tree) -> Result<T, nix::errno::Errno>,
    ) -> Result<T, Errno> {
        self.activity.count();
        let mut tree = self.tree.lock();
        let Some(trace) = &self.trace else {
            return answer(&mut tree).map_err(errno);
        };
        let path = trace_path(&tree, node, name);
        let line = trace.begin();
        let outcome = answer(&mut tree);
        line.end(operation, &path, request.pid(), request.uid(), outcome.as_ref().err().copied());
        outcome.map_err(errno)
    }

    /// A request that always fails the same way.
    fn refuse(
        &self,
        operation: &str,
        request: &Request,
        at: (INodeNo, Option<&OsStr>),
        with: nix::errno::Errno,
    ) -> Errno {
        self.serve(operation, request, at, |_| Err::<(), _>(with)).err().unwrap_or(Errno::EIO)
    }
}

impl Filesystem for ProjectionFilesystem {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Each is worth having alone; an older kernel lacks some of them.
        let wanted = [
            InitFlags::FUSE_NO_OPEN_SUPPORT,
            InitFlags::FUSE_NO_OPENDIR_SUPPORT,
            InitFlags::FUSE_CACHE_SYMLINKS,
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_EXPLICIT_INVAL_DATA,
            InitFlags::FUSE_HAS_RESEND,
        ];
        // With ID-mapped mounts the kernel no longer tells who asks, and a trace is there to tell.
        let idmap = self.trace.is_none().then_some(InitFlags::FUSE_ALLOW_IDMAP);
        for capability in wanted.into_iter().chain(idmap) {
            let _unsupported = config.add_capabilities(capability);
        }
        Ok(())
    }

    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.serve("LOOKUP", request, (parent, Some(name)), |tree| tree.lookup(NodeId(parent.0), name)) {
            Ok(attributes) => reply.entry(&FOREVER, &file_attr(&attributes), Generation(0)),
            Err(error) if error.code() == Errno::ENOENT.code() => reply.entry(&FOREVER, &absent(), Generation(0)),
            Err(error) => reply.error(error),
        }
    }

    fn forget(&self, request: &Request, node: INodeNo, count: u64) {
        let _answered_by_silence = self.serve("FORGET", request, (node, None), |tree| {
            tree.forget(NodeId(node.0), count);
            Ok(())
        });
    }

    fn getattr(&self, request: &Request, node: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.serve("GETATTR", request, (node, None), |tree| tree.attributes(NodeId(node.0))) {
            Ok(attributes) => reply.attr(&FOREVER, &file_attr(&attributes)),
            Err(error) => reply.error(error),
        }
    }

    fn readlink(&self, request: &Request, node: INodeNo, reply: ReplyData) {
        match self.serve("READLINK", request, (node, None), |tree| tree.read_link(NodeId(node.0)).map(str::to_owned)) {
            Ok(target) => reply.data(target.as_bytes()),
            Err(error) => reply.error(error),
        }
    }

    fn read(
        &self,
        request: &Request,
        node: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match self.serve("READ", request, (node, None), |tree| tree.content(NodeId(node.0))) {
            Ok((image, content)) => {
                let bytes = &image.bytes()[content];
                let start = usize::try_from(offset).map_or(bytes.len(), |offset| offset.min(bytes.len()));
                let end = bytes.len().min(start.saturating_add(size as usize));
                reply.data(&bytes[start..end]);
            }
            Err(error) => reply.error(error),
        }
    }

    fn readdir(&self, request: &Request, node: INodeNo, _: FileHandle, cookie: u64, mut reply: ReplyDirectory) {
        let listed = self.serve("READDIR", request, (node, None), |tree| {
            tree.list(NodeId(node.0), cookie, |(node, next, kind, name)| {
                reply.add(INodeNo(node.0), next, file_type(kind), name)
            })
        });
        match listed {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error),
        }
    }

    fn statfs(&self, request: &Request, node: INodeNo, reply: ReplyStatfs) {
        match self.serve("STATFS", request, (node, None), |tree| Ok(tree.usage())) {
            Ok(usage) => {
                reply.statfs(usage.bytes.div_ceil(BLOCK), 0, 0, usage.nodes, 0, BLOCK as u32, 255, BLOCK as u32)
            }
            Err(error) => reply.error(error),
        }
    }

    fn mkdir(&self, request: &Request, parent: INodeNo, name: &OsStr, _: u32, _: u32, reply: ReplyEntry) {
        match self.serve("MKDIR", request, (parent, Some(name)), |tree| tree.make_directory(NodeId(parent.0), name)) {
            Ok(attributes) => reply.entry(&FOREVER, &file_attr(&attributes), Generation(0)),
            Err(error) => reply.error(error),
        }
    }

    fn setattr(
        &self,
        request: &Request,
        node: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let changed = self.serve("SETATTR", request, (node, None), |tree| match (mode, uid, gid, size) {
            (Some(mode), None, None, None) => tree.set_mode(NodeId(node.0), (mode & 0o7777) as u16),
            _ => Err(nix::errno::Errno::EROFS),
        });
        match changed {
            Ok(attributes) => reply.attr(&FOREVER, &file_attr(&attributes)),
            Err(error) => reply.error(error),
        }
    }

    fn symlink(&self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let made = self.serve("SYMLINK", request, (parent, Some(name)), |tree| {
            tree.make_link(NodeId(parent.0), name, target.as_os_str())
        });
        match made {
            Ok(attributes) => reply.entry(&FOREVER, &file_attr(&attributes), Generation(0)),
            Err(error) => reply.error(error),
        }
    }

    fn rename(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let renamed = self.serve("RENAME", request, (parent, Some(name)), |tree| match flags.is_empty() {
            true => tree.rename(NodeId(parent.0), name, NodeId(new_parent.0), new_name),
            false => Err(nix::errno::Errno::EROFS),
        });
        empty(renamed, reply);
    }

    fn unlink(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        empty(self.serve("UNLINK", request, (parent, Some(name)), |tree| tree.unlink(NodeId(parent.0), name)), reply);
    }

    fn rmdir(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let removed =
            self.serve("RMDIR", request, (parent, Some(name)), |tree| tree.remove_directory(NodeId(parent.0), name));
        empty(removed, reply);
    }

    // What the kernel need not ask again.

    fn open(&self, request: &Request, node: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.error(self.refuse("OPEN", request, (node, None), UNNEEDED));
    }

    fn opendir(&self, request: &Request, node: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.error(self.refuse("OPENDIR", request, (node, None), UNNEEDED));
    }

    fn flush(&self, request: &Request, node: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.error(self.refuse("FLUSH", request, (node, None), UNNEEDED));
    }

    fn fsync(&self, request: &Request, node: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply.error(self.refuse("FSYNC", request, (node, None), UNNEEDED));
    }

    fn fsyncdir(&self, request: &Request, node: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply.error(self.refuse("FSYNCDIR", request, (node, None), UNNEEDED));
    }

    fn access(&self, request: &Request, node: INodeNo, _: AccessFlags, reply: ReplyEmpty) {
        reply.error(self.refuse("ACCESS", request, (node, None), UNNEEDED));
    }

    fn lseek(&self, request: &Request, node: INodeNo, _: FileHandle, _: i64, _: i32, reply: ReplyLseek) {
        reply.error(self.refuse("LSEEK", request, (node, None), UNNEEDED));
    }

    fn getxattr(&self, request: &Request, node: INodeNo, _: &OsStr, _: u32, reply: ReplyXattr) {
        reply.error(self.refuse("GETXATTR", request, (node, None), UNNEEDED));
    }

    fn listxattr(&self, request: &Request, node: INodeNo, _: u32, reply: ReplyXattr) {
        reply.error(self.refuse("LISTXATTR", request, (node, None), UNNEEDED));
    }

    fn setxattr(&self, request: &Request, node: INodeNo, _: &OsStr, _: &[u8], _: i32, _: u32, reply: ReplyEmpty) {
        reply.error(self.refuse("SETXATTR", request, (node, None), UNNEEDED));
    }

    fn removexattr(&self, request: &Request, node: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        reply.error(self.refuse("REMOVEXATTR", request, (node, None), UNNEEDED));
    }

    // What no step ever is.

    fn mknod(&self, request: &Request, parent: INodeNo, name: &OsStr, _: u32, _: u32, _: u32, reply: ReplyEntry) {
        reply.error(self.refuse("MKNOD", request, (parent, Some(name)), READ_ONLY));
    }

    fn create(&self, request: &Request, parent: INodeNo, name: &OsStr, _: u32, _: u32, _: i32, reply: ReplyCreate) {
        reply.error(self.refuse("CREATE", request, (parent, Some(name)), READ_ONLY));
    }

    fn link(&self, request: &Request, _: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        reply.error(self.refuse("LINK", request, (parent, Some(name)), READ_ONLY));
    }

    fn write(
        &self,
        request: &Request,
        node: INodeNo,
        _: FileHandle,
        _: u64,
        _: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        reply.error(self.refuse("WRITE", request, (node, None), READ_ONLY));
        self.undo.file(node);
    }

    fn fallocate(&self, request: &Request, node: INodeNo, _: FileHandle, _: u64, _: u64, _: i32, reply: ReplyEmpty) {
        reply.error(self.refuse("FALLOCATE", request, (node, None), READ_ONLY));
    }
}

/// Told once, remembered by the kernel for the life of the connection.
const UNNEEDED: nix::errno::Errno = nix::errno::Errno::ENOSYS;
const READ_ONLY: nix::errno::Errno = nix::errno::Errno::EROFS;

fn empty(outcome: Result<(), Errno>, reply: ReplyEmpty) {
    match outcome {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(error),
    }
}

fn trace_path(tree: &Tree, node: INodeNo, name: Option<&OsStr>) -> String {
    let path = tree.path(NodeId(node.0));
    match name {
        Some(name) => format!("{}/{}", path.trim_end_matches('/'), name.to_string_lossy()),
        None => path,
    }
}

fn errno(errno: nix::errno::Errno) -> Errno {
    Errno::from_i32(errno as i32)
}

fn file_type(kind: NodeKind) -> FileType {
    match kind {
        NodeKind::Directory => FileType::Directory,
        NodeKind::File => FileType::RegularFile,
        NodeKind::Link => FileType::Symlink,
    }
}

fn file_attr(attributes: &Attributes) -> FileAttr {
    let blocks = match attributes.kind {
        NodeKind::File => attributes.size.div_ceil(BLOCK) * (BLOCK / 512),
        NodeKind::Directory | NodeKind::Link => 0,
    };
    FileAttr {
        ino: INodeNo(attributes.node.0),
        size: attributes.size,
        blocks,
        atime: attributes.time,
        mtime: attributes.time,
        ctime: attributes.time,
        crtime: attributes.time,
        kind: file_type(attributes.kind),
        perm: attributes.mode,
        nlink: attributes.links,
        uid: attributes.uid,
        gid: attributes.gid,
        rdev: 0,
        blksize: BLOCK as u32,
        flags: 0,
    }
}

/// A reply with node id 0: the name is absent, and the kernel may remember that.
fn absent() -> FileAttr {
    file_attr(&Attributes {
        node: NodeId(0),
        kind: NodeKind::File,
        mode: 0,
        size: 0,
        links: 0,
        uid: 0,
        gid: 0,
        time: SystemTime::UNIX_EPOCH,
    })
}
