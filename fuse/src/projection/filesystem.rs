//! The FUSE side of a projection. It answers requests from a [`tree`](super::tree).
//!
//! A warm volume causes no requests. The kernel remembers `ENOSYS` to OPEN, OPENDIR, FLUSH and the xattr requests for the whole
//! connection, and caches entries, attributes, links and absent names without a time limit: the tree changes only through calls on
//! the private mount, so the kernel's caches are always correct.
//!
//! An audited projection answers OPEN, and causes no other requests when it is warm. The kernel still keeps the pages that it has
//! read, and sends no FLUSH; after the close it sends a RELEASE, for which no process waits.

use std::ffi::OsStr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

use nix::errno::Errno;

use super::tree::{NodeAttributes, NodeKind, ProjectionTree, TreeEntry};
use super::undo::Undo;
use crate::audit::Audit;
use crate::region::Region;
use crate::session::abi::{Attr, AttrOut, EntryOut, Kstatfs, OpenOut, ReadIn, SetattrIn, fattr, fopen, init};
use crate::session::{
    Answer, Caller, Exchange, Filesystem, FuseOperation, NodeId, ReaddirEntry, Request, WantedFeatures,
};
use crate::trace::Trace;

/// How long the kernel may cache answers, in seconds: ten years.
pub(crate) const FOREVER: u64 = 10 * 365 * 24 * 60 * 60;

/// `st_blksize`, and the granularity of `st_blocks`, as on tmpfs.
const BLOCK: u64 = 4096;

/// A tree that the session thread reads, and to which the control thread announces steps.
#[derive(Clone)]
pub struct SharedTree(Arc<Mutex<ProjectionTree>>);

impl SharedTree {
    /// Shares `tree`.
    pub fn new(tree: ProjectionTree) -> Self {
        Self(Arc::new(Mutex::new(tree)))
    }

    /// Locks the tree. The session answers no request meanwhile, so unlock it soon.
    pub fn lock(&self) -> MutexGuard<'_, ProjectionTree> {
        self.0.lock().expect("a thread that panics ends the process")
    }
}

/// The file system of one projection.
pub struct ProjectionFilesystem {
    tree: SharedTree,
    region: Arc<Region>,
    undo: Undo,
    trace: Arc<Trace>,
    audit: Option<Audit>,
}

/// The features that a session with this file system negotiates.
pub fn wanted(traced: bool) -> WantedFeatures {
    // Each of these features is useful alone. An older kernel lacks some of them.
    let flags = init::ASYNC_READ
        | init::NO_OPEN_SUPPORT
        | init::NO_OPENDIR_SUPPORT
        | init::CACHE_SYMLINKS
        | init::PARALLEL_DIROPS
        | init::EXPLICIT_INVAL_DATA
        | init::HAS_RESEND;
    // If ID-mapped mounts are allowed, requests do not have the caller's uid, which a trace shows.
    let idmap = if traced { 0 } else { init::ALLOW_IDMAP };
    WantedFeatures { flags: flags | idmap, max_stack_depth: 0 }
}

impl ProjectionFilesystem {
    /// Serves `tree`. It records applied steps in `region`, reports requests to the readers of `trace`, and opens to `audit`.
    pub(crate) fn new(
        tree: SharedTree,
        region: Arc<Region>,
        undo: Undo,
        trace: Arc<Trace>,
        audit: Option<Audit>,
    ) -> Self {
        Self { tree, region, undo, trace, audit }
    }

    /// Answers one request, and reports it.
    fn serve(&self, request: &Request<'_>, node: NodeId, exchange: &mut Exchange<'_>) -> Result<Answer, Errno> {
        let path = || trace_path(&self.tree.lock(), node, request.operation.entry());
        let Some(line) = self.trace.begin(path) else {
            return self.dispatch(request, node, exchange);
        };
        let outcome = self.dispatch(request, node, exchange);
        line.end(request.name(), request.caller, outcome.as_ref().err().copied());
        outcome
    }

    fn dispatch(&self, request: &Request<'_>, node: NodeId, exchange: &mut Exchange<'_>) -> Result<Answer, Errno> {
        match request.operation {
            FuseOperation::Lookup { name } => self.look_up(node, name, exchange).map(entry),
            FuseOperation::Forget { lookups } => {
                self.tree.lock().forget(node, lookups);
                Ok(Answer::Silence)
            }
            FuseOperation::GetAttr { .. } => self.tree.lock().attributes(node).map(attributes_answer),
            FuseOperation::ReadLink => {
                exchange.buffer.extend_from_slice(self.tree.lock().read_link(node)?.as_bytes());
                Ok(Answer::Buffer)
            }
            FuseOperation::Open { .. } => self.open(node, request.caller, exchange),
            FuseOperation::Release(_) => Ok(Answer::Done),
            FuseOperation::Read(arguments) => self.read(node, arguments, exchange),
            FuseOperation::ReadDir(arguments) => self.list(node, arguments, exchange.buffer),
            FuseOperation::StatFs => Ok(self.status()),

            // The steps of a commit.
            FuseOperation::MkDir { name, .. } => self.change(|tree| tree.make_directory(node, name)).map(entry),
            FuseOperation::SetAttr(arguments) => self.set_mode(node, arguments).map(attributes_answer),
            FuseOperation::Symlink { name, target } => {
                self.change(|tree| tree.make_link(node, name, target)).map(entry)
            }
            FuseOperation::Rename { name, new_parent, new_name, flags: 0 } => {
                self.change(|tree| tree.rename(node, name, new_parent, new_name)).map(|()| Answer::Done)
            }
            FuseOperation::Unlink { name } => self.change(|tree| tree.unlink(node, name)).map(|()| Answer::Done),
            FuseOperation::RmDir { name } => {
                self.change(|tree| tree.remove_directory(node, name)).map(|()| Answer::Done)
            }

            // Changes that are never steps.
            FuseOperation::Write { .. } => {
                self.undo.file(node);
                Err(Errno::EROFS)
            }
            FuseOperation::Rename { .. }
            | FuseOperation::MkNod { .. }
            | FuseOperation::Create { .. }
            | FuseOperation::TmpFile { .. }
            | FuseOperation::Link { .. }
            | FuseOperation::FAllocate(_) => Err(Errno::EROFS),

            // Each isatty(3) sends this request, because the kernel caches no answer.
            FuseOperation::IoCtl => Err(Errno::ENOTTY),
            // The kernel caches this answer for the whole connection, and does not send the request again.
            _ => Err(Errno::ENOSYS),
        }
    }

    /// Looks up a name. An earlier server may have counted the lookup without an answer; then this does not count it again.
    fn look_up(&self, node: NodeId, name: &OsStr, exchange: &Exchange<'_>) -> Result<NodeAttributes, Errno> {
        let mut tree = self.tree.lock();
        match exchange.earlier() {
            Some(_) => tree.entry(node, name),
            None => {
                let found = tree.lookup(node, name)?;
                exchange.begin(0);
                Ok(found)
            }
        }
    }

    /// Opens a file, with a line of the access log, unless an earlier server has written it.
    fn open(&self, node: NodeId, caller: Caller, exchange: &Exchange<'_>) -> Result<Answer, Errno> {
        let Some(audit) = &self.audit else { return Err(Errno::ENOSYS) };
        let key = self.tree.lock().key(node)?;
        if exchange.earlier().is_none() {
            audit.open(&key, caller, exchange.is_resent());
            exchange.begin(0);
        }
        Ok(Answer::Open(OpenOut { open_flags: fopen::KEEP_CACHE | fopen::NOFLUSH, ..Default::default() }))
    }

    /// Applies a step, and records it in the region before the answer.
    fn change<T>(&self, change: impl FnOnce(&mut ProjectionTree) -> Result<T, Errno>) -> Result<T, Errno> {
        let mut tree = self.tree.lock();
        let changed = change(&mut tree)?;
        while self.region.applied() < tree.applied() {
            self.region.apply();
        }
        Ok(changed)
    }

    /// Sends bytes to the kernel directly from the image.
    fn read(&self, node: NodeId, arguments: &ReadIn, exchange: &Exchange<'_>) -> Result<Answer, Errno> {
        let (image, content) = self.tree.lock().content(node)?;
        Ok(exchange.send(requested_part(image.served(content), arguments)))
    }

    fn list(&self, node: NodeId, arguments: &ReadIn, buffer: &mut Vec<u8>) -> Result<Answer, Errno> {
        self.tree.lock().list(node, arguments.offset, |listed| !push_if_it_fits(buffer, arguments, listed))?;
        Ok(Answer::Buffer)
    }

    fn status(&self) -> Answer {
        let usage = self.tree.lock().usage();
        file_system(usage.bytes, usage.nodes)
    }

    fn set_mode(&self, node: NodeId, arguments: &SetattrIn) -> Result<NodeAttributes, Errno> {
        let changes = arguments.valid & (fattr::MODE | fattr::UID | fattr::GID | fattr::SIZE);
        if changes != fattr::MODE {
            return Err(Errno::EROFS);
        }
        self.change(|tree| tree.set_mode(node, (arguments.mode & 0o7777) as u16))
    }
}

impl Filesystem for ProjectionFilesystem {
    fn answer(&self, request: &Request<'_>, exchange: &mut Exchange<'_>) -> Result<Answer, rustix::io::Errno> {
        let served = match request.operation {
            FuseOperation::BatchForget { nodes } => nodes.iter().try_fold(Answer::Silence, |_, one| {
                let operation = FuseOperation::Forget { lookups: one.nlookup };
                self.serve(&Request { operation, ..*request }, one.nodeid, exchange)
            }),
            _ => self.serve(request, request.node, exchange),
        };
        match (&request.operation, served) {
            // Node id 0: the name is absent, and the kernel may remember that.
            (FuseOperation::Lookup { .. }, Err(Errno::ENOENT)) => {
                Ok(Answer::Entry(EntryOut { entry_valid: FOREVER, ..Default::default() }))
            }
            (_, served) => served.map_err(|errno| rustix::io::Errno::from_raw_os_error(errno as i32)),
        }
    }

    fn begin_thread(&self) {}

    fn may_wait(&self, _: &FuseOperation<'_>) -> bool {
        false
    }

    /// Enough for two names with their structs. The server refuses WRITE anyway.
    fn longest_request(&self) -> usize {
        8192
    }

    /// No request waits here.
    fn interrupt(&self, _: u64) {}
}

fn trace_path(tree: &ProjectionTree, node: NodeId, name: Option<&OsStr>) -> String {
    let path = tree.path(node);
    match name {
        Some(name) => format!("{}/{}", path.trim_end_matches('/'), name.to_string_lossy()),
        None => path,
    }
}

/// The requested part of a file with these bytes.
pub(crate) fn requested_part<'a>(bytes: &'a [u8], arguments: &ReadIn) -> &'a [u8] {
    let start = usize::try_from(arguments.offset).map_or(bytes.len(), |offset| offset.min(bytes.len()));
    let end = bytes.len().min(start.saturating_add(arguments.size as usize));
    &bytes[start..end]
}

/// Adds an entry to a listing. Returns whether it had room.
pub(crate) fn push_if_it_fits(
    buffer: &mut Vec<u8>,
    arguments: &ReadIn,
    (node, next, kind, name): TreeEntry<'_>,
) -> bool {
    let listed = ReaddirEntry { ino: node.0, next, kind: directory_type(kind), name: OsStr::new(name) };
    let fits = buffer.len() + listed.length() <= arguments.size as usize;
    if fits {
        listed.push(buffer);
    }
    fits
}

/// The answer to statfs(2) for a number of bytes and nodes.
pub(crate) fn file_system(bytes: u64, nodes: u64) -> Answer {
    Answer::FileSystem(Kstatfs {
        blocks: bytes.div_ceil(BLOCK),
        files: nodes,
        bsize: BLOCK as u32,
        namelen: 255,
        frsize: BLOCK as u32,
        ..Default::default()
    })
}

pub(crate) fn entry(attributes: NodeAttributes) -> Answer {
    let nodeid = attributes.node;
    let attr = attr(&attributes);
    Answer::Entry(EntryOut { nodeid, entry_valid: FOREVER, attr_valid: FOREVER, attr, ..Default::default() })
}

pub(crate) fn attributes_answer(attributes: NodeAttributes) -> Answer {
    Answer::Attributes(AttrOut { attr_valid: FOREVER, attr: attr(&attributes), ..Default::default() })
}

fn attr(attributes: &NodeAttributes) -> Attr {
    let (kind, blocks) = match attributes.kind {
        NodeKind::File => (libc::S_IFREG, attributes.size.div_ceil(BLOCK) * (BLOCK / 512)),
        NodeKind::Directory => (libc::S_IFDIR, 0),
        NodeKind::Link => (libc::S_IFLNK, 0),
    };
    let time = attributes.time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
    Attr {
        ino: attributes.node.0,
        size: attributes.size,
        blocks,
        atime: time.as_secs(),
        mtime: time.as_secs(),
        ctime: time.as_secs(),
        atimensec: time.subsec_nanos(),
        mtimensec: time.subsec_nanos(),
        ctimensec: time.subsec_nanos(),
        mode: kind | u32::from(attributes.mode),
        nlink: attributes.links,
        uid: attributes.uid,
        gid: attributes.gid,
        blksize: BLOCK as u32,
        ..Default::default()
    }
}

/// `d_type` of `readdir(3)`.
fn directory_type(kind: NodeKind) -> u8 {
    match kind {
        NodeKind::Directory => libc::DT_DIR,
        NodeKind::File => libc::DT_REG,
        NodeKind::Link => libc::DT_LNK,
    }
}
