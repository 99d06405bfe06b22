//! The file system of one passthrough volume: requests in, system calls on the source, answers out.
//!
//! Containment: the source is reached through descriptors only. A name is one component, opened with `O_PATH` and
//! `O_NOFOLLOW` in an open directory, or looked at there in the same way (`SourceMounts::identify_name`); the kernel gets the
//! target of a symbolic link, and follows it in the caller's mount namespace. The server makes file handles only of files that
//! it reached in this way, and such a handle opens only its own file. The server opens no file by a path that a caller wrote.
//!
//! | file | requests |
//! |---|---|
//! | `account` | the room of a volume with a limit: checks, and charges of what other requests make and remove |
//! | `export` | file handles of callers |
//! | `look` | reading names, attributes, links, extended attributes and figures of the file system |
//! | `change` | making, removing and changing names and attributes |
//! | `data` | open files and their data |
//! | `directories` | directories that stay open for the next lookups |
//! | `holding` | descriptors that nodes without lasting handles keep, and how the server finds such nodes again |
//! | `list` | directories and their entries |
//! | `locking` | locks |
//! | `replacement` | names in directories that the host has replaced |
//! | `reopening` | open files and locks that went with a server and its keeper |
//! | `outcome` | whether a dead server has executed a request |
//! | `setid` | setuid and setgid bits that files lose when they are changed |
//! | `silly` | RMDIR of directories at an NFS server whose files were just removed |

mod account;
mod change;
mod data;
mod directories;
mod export;
mod holding;
mod list;
mod locking;
mod look;
mod outcome;
mod reopening;
mod replacement;
mod setid;
mod silly;

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use rustix::fs::{AtFlags, FileType, OFlags, Statx, StatxFlags, statx};
use rustix::io::Errno;

use super::acting::{self, Identities};
use super::attributes::{CacheTimeouts, attr, attributes_of, bytes_taken, is_on_disk, kind};
use super::cached_listings::CachedListings;
use super::data_path::DataPath;
use super::descriptor::{proc_path, reopen};
use super::devices::device_of;
use super::listing::lists_reliably;
use super::locks::LockWaits;
use super::mounts::SourceMounts;
use super::node::{FileIdentity, Node};
use super::node_names::HeldNodes;
use super::nodes::{NewNode, Nodes};
use super::open_files::OpenFiles;
use super::options::{CacheMode, PassthroughOptions};
use super::pruner::Pruner;
use super::readdirplus::ReaddirplusPolicy;
use super::replaced::ReplacedFiles;
use super::share::{DescriptorPermit, Share};
use super::tables::FilesystemTables;
use super::unopened::UnopenedListings;
use super::usage::QuotaUsage;
use crate::caller::credentials::ActAs;
use crate::region::Region;
use crate::session::abi::{EntryOut, Kstatfs, XATTR_SIZE_MAX, init};
use crate::session::{
    Answer, Exchange, Filesystem, FuseOperation, KernelReferences, NodeId, Notifier, REQUEST_SIZE, Request,
    RootQuestion, Session, WantedFeatures,
};
use crate::trace::Trace;
use directories::{OpenedDirectories, no_directories};
use holding::close_surplus;

/// With these the kernel asks the server for locks; otherwise it keeps them by itself.
const LOCKS: u64 = init::POSIX_LOCKS | init::FLOCK_LOCKS;

/// The file system of one volume.
pub struct PassthroughFilesystem {
    options: PassthroughOptions,
    data_path: DataPath,
    device: Arc<OwnedFd>,
    notifier: Notifier,
    pruner: Pruner,
    region: Arc<Region>,
    validity: CacheTimeouts,
    mounts: SourceMounts,
    nodes: Nodes,
    directories: Mutex<OpenedDirectories>,
    held: HeldNodes,
    replaced: ReplacedFiles,
    files: OpenFiles,
    /// Whether the kernel opens directories without OPENDIR.
    lists_unopened: bool,
    unopened: UnopenedListings,
    /// `None` if the kernel keeps listings for ever or not at all, or if their changes cannot be detected on this source.
    cached_listings: Option<CachedListings>,
    readdirplus: ReaddirplusPolicy,
    /// Whether the kernel keeps locks by itself.
    kernel_keeps_locks: bool,
    waits: Arc<LockWaits>,
    usage: Option<QuotaUsage>,
    /// The share of descriptors that the volume may have.
    descriptors: Share,
    /// Whether some open files must still be reopened.
    is_reopening: AtomicBool,
    /// Whether podfs has logged that callers cannot connect to a socket.
    is_socket_reported: AtomicBool,
    /// Whether podfs has logged that too many callers wait for locks.
    are_waits_reported: AtomicBool,
    /// `Some` if the source is on another machine.
    identities: Option<Identities>,
    /// The source's last answer to `statfs(2)`.
    status: Mutex<Kstatfs>,
    trace: Arc<Trace>,
}

/// The features that a session with this file system negotiates.
pub fn wanted(source: &OwnedFd, options: &PassthroughOptions) -> WantedFeatures {
    let flags = init::ASYNC_READ
        | init::EXPORT_SUPPORT
        | init::DONT_MASK
        | init::DO_READDIRPLUS
        | init::READDIRPLUS_AUTO
        | init::ASYNC_DIO
        | init::PARALLEL_DIROPS
        | init::POSIX_ACL
        | init::HANDLE_KILLPRIV_V2
        | init::SETXATTR_EXT
        | init::PASSTHROUGH
        | init::HAS_RESEND;
    // With ID-mapped mounts requests do not carry the caller's uid, which a trace shows. A source on another machine needs the
    // uid too, unless podfs reads it in the caller's own namespace.
    let needs_uid = options.trace || matches!(options.remote, Some(ActAs::Caller | ActAs::Nobody));
    let idmap = if needs_uid { 0 } else { init::ALLOW_IDMAP };
    let locks = if options.has_exclusive_source() { 0 } else { LOCKS };
    // With this flag the kernel drops its cached data of a file that a process has changed on the source.
    let auto_invalidate = if options.cache == CacheMode::Always { 0 } else { init::AUTO_INVAL_DATA };
    WantedFeatures { flags: flags | idmap | locks | auto_invalidate, max_stack_depth: stack_depth(source) }
}

/// The depth to which this file system may be stacked. Files of an overlay can be backing files if this file system may be
/// stacked one deeper. Then it cannot be a layer of an overlay any more, so podfs sets that depth only when needed.
fn stack_depth(source: &OwnedFd) -> u32 {
    match rustix::fs::fstatfs(source) {
        Ok(status) if status.f_type == libc::OVERLAYFS_SUPER_MAGIC => 2,
        _ => 1,
    }
}

/// The listings that the kernel may cache although the source may change.
fn cached_listings(options: &PassthroughOptions, nodes: &Nodes, files: &OpenFiles) -> Option<CachedListings> {
    let root = nodes.get(NodeId::ROOT)?;
    let source = root.held()?;
    // statfs(2) of a network file system waits for its server, which may not answer when this server starts.
    let may_cache = options.cache == CacheMode::Auto && is_on_disk(&*source) && lists_reliably(&source);
    may_cache.then(|| CachedListings::with_open(files.open_directories()))
}

impl PassthroughFilesystem {
    /// The file system with the state in `tables`, for requests of `session`.
    pub fn new(
        session: &Session,
        region: Arc<Region>,
        tables: FilesystemTables,
        mut options: PassthroughOptions,
        trace: Arc<Trace>,
    ) -> Self {
        let FilesystemTables { data_path, mounts, nodes, files, usage, share, status } = tables;
        // Before Linux 6.9 requests of a dead server end with an error, and some of them were executed: the kernel has to look
        // again.
        if options.has_exclusive_source() && session.accepted() & init::HAS_RESEND == 0 {
            options.cache = CacheMode::Auto;
        }
        let root = nodes.get(NodeId::ROOT).and_then(|root| root.held());
        // The device of the source gets the first number of its mount, also if the kernel knows the root from an earlier server that
        // recorded no devices.
        if let (Some(node), Some(root)) = (nodes.get(NodeId::ROOT), &root)
            && let Ok(found) = statx(&**root, c"", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::INO)
        {
            node.mount.ino(device_of(&found), found.stx_ino);
        }
        let held = HeldNodes::default();
        for node in nodes.held() {
            close_surplus(&nodes, held.used(node));
        }
        Self {
            held,
            validity: CacheTimeouts::of(&options, root.as_deref()),
            lists_unopened: options.has_exclusive_source() && root.as_deref().is_some_and(lists_reliably),
            unopened: UnopenedListings::default(),
            cached_listings: cached_listings(&options, &nodes, &files),
            data_path,
            device: session.device(),
            notifier: session.notifier(),
            pruner: Pruner::new(session.notifier()),
            region,
            is_reopening: AtomicBool::new(!files.to_be_reopened().is_empty()),
            nodes,
            mounts,
            directories: Mutex::new(no_directories()),
            replaced: ReplacedFiles::default(),
            files,
            readdirplus: ReaddirplusPolicy::default(),
            kernel_keeps_locks: session.accepted() & LOCKS == 0,
            waits: Arc::default(),
            usage,
            descriptors: share,
            is_socket_reported: AtomicBool::new(false),
            are_waits_reported: AtomicBool::new(false),
            identities: options.remote.map(Identities::new),
            status: Mutex::new(status),
            options,
            trace,
        }
    }

    fn dispatch(&self, request: &Request<'_>, exchange: &mut Exchange<'_>) -> Result<Answer, Errno> {
        let caller = request.caller;
        if let FuseOperation::Forget { lookups } = request.operation {
            self.forget(request.node, lookups);
            return Ok(Answer::Silence);
        }
        if let FuseOperation::BatchForget { nodes } = request.operation {
            nodes.iter().for_each(|one| self.forget(one.nodeid, one.nlookup));
            return Ok(Answer::Silence);
        }
        if let FuseOperation::IoCtl = request.operation {
            return Err(Errno::NOTTY);
        }
        let node = &self.node(request.node)?;
        let _caller = self.identities.as_ref().map(|identities| identities.acting_as(caller));
        match request.operation {
            FuseOperation::Lookup { name } => match name.as_bytes() {
                b"." => self.look_up_itself(node),
                b".." => self.look_up_parent(node),
                _ => self.lookup(node, name),
            },
            FuseOperation::GetAttr { handle } => self.attributes(node, handle),
            FuseOperation::Statx { handle } => self.statx(node, handle),
            FuseOperation::ReadLink => self.read_link(node, exchange.buffer),
            FuseOperation::StatFs => self.status(node),
            FuseOperation::GetXattr { name, size } => self.xattr(node, name, size, exchange.buffer),
            FuseOperation::ListXattr { size } => self.xattr_names(node, size, caller, exchange.buffer),

            FuseOperation::SetAttr(arguments) => self.set_attributes(node, arguments, caller),
            FuseOperation::Symlink { name, target } => self.make_link(node, name, target, caller, exchange),
            FuseOperation::MkNod { name, arguments } => self.make_node(node, name, arguments, caller, exchange),
            FuseOperation::MkDir { name, arguments } => self.make_directory(node, name, arguments, caller, exchange),
            FuseOperation::Unlink { name } => self.unlink(node, name, exchange),
            FuseOperation::RmDir { name } => self.remove_directory(node, name, exchange),
            FuseOperation::Rename { name, new_parent, new_name, flags } => {
                self.rename((node, name), (&self.node(new_parent)?, new_name), flags, caller, exchange)
            }
            FuseOperation::Link { node: old, name } => self.link(&self.node(old)?, node, name, exchange),
            FuseOperation::SetXattr { name, value, arguments } => {
                self.set_xattr(node, name, value, arguments, exchange)
            }
            FuseOperation::RemoveXattr { name } => self.remove_xattr(node, name, caller, exchange),

            FuseOperation::Open { flags } => self.open(node, flags, caller, exchange),
            FuseOperation::Create { name, arguments } => self.create(node, name, arguments, caller, exchange),
            FuseOperation::TmpFile { arguments } => self.create_unnamed(node, arguments, caller, exchange),
            FuseOperation::Read(arguments) => self.read(arguments, exchange.buffer),
            FuseOperation::Write { arguments, data } => self.write(arguments, data, caller, exchange),
            FuseOperation::Release(arguments) => self.release(arguments.fh),
            FuseOperation::FSync(arguments) => self.sync(arguments),
            FuseOperation::FAllocate(arguments) => self.allocate(arguments),
            FuseOperation::Seek(arguments) => self.seek(arguments),
            FuseOperation::CopyFileRange { arguments, wide } => self.copy(arguments, wide),

            FuseOperation::OpenDir => self.open_directory(node, request, exchange),
            FuseOperation::ReadDir(arguments) => self.read_directory(node, arguments, exchange.buffer),
            FuseOperation::ReadDirPlus(arguments) => self.read_directory_plus(node, arguments, exchange.buffer),
            FuseOperation::ReleaseDir(arguments) => self.release_directory(arguments.fh),
            FuseOperation::FSyncDir(arguments) => self.sync_directory(node, arguments),

            FuseOperation::Flush(arguments) => self.flush(node, arguments),
            FuseOperation::GetLock(arguments) => self.find_lock(node, arguments),
            FuseOperation::SetLock { arguments, wait } => self.set_lock(node, arguments, wait, exchange),

            // The kernel remembers `ENOSYS`, and then acts as for file systems without this operation.
            _ => Err(Errno::NOSYS),
        }
    }

    fn node(&self, id: NodeId) -> Result<Arc<Node>, Errno> {
        self.nodes.get(id).ok_or(Errno::STALE)
    }

    fn forget(&self, node: NodeId, lookups: u64) {
        if self.nodes.forget(node, lookups) {
            self.held.forget(node);
            self.forget_directory(node);
            if self.lists_unopened {
                let _listing = self.unopened.take(node);
            }
            if let Some(cached) = &self.cached_listings {
                cached.forget(node);
            }
        }
    }

    /// A descriptor of the node, which may be `O_PATH`.
    fn descriptor(&self, node: &Arc<Node>) -> Result<Arc<OwnedFd>, Errno> {
        if let Some(held) = node.held() {
            if node.handle().is_none() && node.id != NodeId::ROOT {
                close_surplus(&self.nodes, self.held.used(node.id));
            }
            return Ok(held);
        }
        if node.kind != FileType::Directory {
            if let Some(Ok(file)) = node.open().as_ref().map(|open| open.file()) {
                return Ok(file);
            }
            return self.open_file_again(node, OFlags::PATH).map(Arc::new);
        }
        if let Some(directory) = self.open_directories().get(&node.id) {
            return Ok(Arc::clone(&directory.file));
        }
        let directory = Arc::new(node.reopen(OFlags::PATH)?);
        self.keep_directory(node, Arc::clone(&directory));
        Ok(directory)
    }

    /// A descriptor that is not `O_PATH`, if callers have the file open.
    fn open_descriptor(&self, node: &Node) -> Option<Arc<OwnedFd>> {
        node.open().as_ref()?.file().ok()
    }

    /// A descriptor of a directory, to find a name in.
    fn directory(&self, node: &Arc<Node>) -> Result<Arc<OwnedFd>, Errno> {
        if node.kind == FileType::Directory { self.descriptor(node) } else { Err(Errno::NOTDIR) }
    }

    /// As [`Node::reopen`], also when the file has no name any more, and its open files keep it or a LOOKUP has just found it.
    fn open_file_again(&self, node: &Node, flags: OFlags) -> Result<OwnedFd, Errno> {
        match node.reopen(flags) {
            Err(Errno::STALE) => {
                let open = node.open().as_ref().map(|open| open.file()).transpose()?;
                let file = open.or_else(|| self.replaced.kept(node.id)).ok_or(Errno::STALE)?;
                reopen(file.as_fd(), flags)
            }
            opened => opened,
        }
    }

    /// The node of the file that `file` is open on, and the answer with it. The answer gives the node to the kernel once more,
    /// which will forget it once more. A file that the request has just `made` is not charged yet.
    fn enter(&self, file: OwnedFd, parent: &Node, made: bool) -> Result<(Arc<Node>, EntryOut), Errno> {
        let (node, found) = self.enter_open(&file, parent, made)?;
        if node.kind == FileType::Directory {
            self.keep_directory(&node, Arc::new(file));
        } else if node.handle().is_some() && self.replaced.is_active() {
            self.replaced.keep(node.id, file);
        } else {
            self.keep_open(&node, || Ok(file))?;
        }
        let entry = self.validity.for_node(&node, &found).entry(node.id, attr(&found, &node.mount));
        Ok((node, entry))
    }

    /// As [`Self::enter`], for a file on the mount of `parent` whose identity is a handle.
    fn enter_identified(
        &self,
        identity: FileIdentity,
        found: &Statx,
        parent: &Node,
        made: bool,
    ) -> Result<(Arc<Node>, EntryOut), Errno> {
        let charge = if made { 0 } else { bytes_taken(found) };
        let node =
            self.nodes.enter(NewNode { identity, mount: Arc::clone(&parent.mount), kind: kind(found), charge })?;
        if node.kind == FileType::Directory {
            // Opens the directory while it has its name: it may be a caller's working directory when it is removed. If this
            // fails, the next request about the directory returns the error.
            let _open = self.descriptor(&node);
        }
        let entry = self.validity.for_node(&node, found).entry(node.id, attr(found, &node.mount));
        Ok((node, entry))
    }

    /// As [`Self::enter`], for a caller that keeps `file` open.
    fn enter_open(&self, file: &OwnedFd, parent: &Node, made: bool) -> Result<(Arc<Node>, Statx), Errno> {
        let (identity, mount) = self.mounts.identify(file.as_fd(), Some(parent))?;
        self.separate_replaced(&identity, file.as_fd());
        let found = attributes_of(file.as_fd())?;
        let charge = if made { 0 } else { bytes_taken(&found) };
        let node = self.nodes.enter(NewNode { identity, mount, kind: kind(&found), charge })?;
        if node.kind == FileType::Directory {
            self.keep_open(&node, || reopen(file.as_fd(), OFlags::PATH))?;
        }
        Ok((node, found))
    }

    /// The permission for one more descriptor of the volume. Never refuses a request for which a dead server may have opened a file already.
    fn descriptor_permit(&self, exchange: &Exchange<'_>) -> Result<DescriptorPermit, Errno> {
        if exchange.is_resent() { Ok(self.descriptors.take_anyway()) } else { self.descriptors.take() }
    }

    /// A socket that the kernel sees here for the first time was made on the source. A listener on it cannot be reached through
    /// this mount, because connect(2) goes by the inode. A socket that was made through this mount works.
    fn warn_of_socket(&self, node: &Node, parent: &Node, name: &OsStr) {
        let Some(advice) = &self.options.socket_advice else { return };
        if node.kind == FileType::Socket && node.is_new() && !self.is_socket_reported.swap(true, Ordering::Relaxed) {
            let (volume, path) = (self.options.name.as_str(), self.host_path(parent.id, Some(name)));
            tracing::warn!(
                volume,
                "volume {volume:?}: connect(2) through FUSE cannot reach the socket {}; {advice}",
                path.escape_debug()
            );
        }
    }

    /// Returns the path on the host of the file that a request is about, for messages.
    fn host_path(&self, node: NodeId, name: Option<&OsStr>) -> String {
        let node = self.nodes.get(node).and_then(|node| self.descriptor(&node).ok());
        let path = node.and_then(|file| std::fs::read_link(proc_path(file.as_fd())).ok()).unwrap_or_default();
        name.map_or(path.clone(), |name| path.join(name)).to_string_lossy().into_owned()
    }
}

impl Filesystem for PassthroughFilesystem {
    fn answer(&self, request: &Request<'_>, exchange: &mut Exchange<'_>) -> Result<Answer, Errno> {
        let line = self.trace.begin(|| self.host_path(request.node, request.operation.entry()));
        let outcome = self.dispatch(request, exchange);
        if let Some(line) = line {
            let error = outcome.as_ref().err().map(|errno| nix::errno::Errno::from_raw(errno.raw_os_error()));
            line.end(request.name(), request.caller, error);
        }
        match (&request.operation, self.looked_at_again(request, outcome)) {
            (FuseOperation::Lookup { name }, Err(Errno::NOENT)) if *name != ".." => {
                self.validity.absence().map(Answer::Entry)
            }
            (_, outcome) => outcome,
        }
    }

    fn begin_thread(&self) {
        acting::begin_thread();
    }

    fn may_wait(&self, operation: &FuseOperation<'_>) -> bool {
        if self.is_remote() {
            return true;
        }
        matches!(
            operation,
            FuseOperation::FSync(_)
                | FuseOperation::FSyncDir(_)
                | FuseOperation::FAllocate(_)
                | FuseOperation::CopyFileRange { .. }
                | FuseOperation::SetAttr(_)
                | FuseOperation::Read(_)
                | FuseOperation::Write { .. }
        )
    }

    /// If the kernel reads and writes the source by itself, the longest requests set extended attributes.
    fn longest_request(&self) -> usize {
        match self.data_path {
            DataPath::Kernel => XATTR_SIZE_MAX as usize + 8192,
            DataPath::Server => REQUEST_SIZE,
        }
    }

    fn interrupt(&self, unique: u64) {
        self.waits.interrupt(unique);
    }

    fn is_remote(&self) -> bool {
        self.options.remote.is_some()
    }

    fn release_references(&self, granted: KernelReferences) {
        if let Some(handle) = granted.handle {
            let _of_a_file = self.release(handle).or_else(|_| self.release_directory(handle));
        }
        if let Some(node) = granted.node {
            self.forget(node, 1);
        }
    }

    fn answer_from_cache(&self, question: RootQuestion) -> Option<Answer> {
        self.remembered(question)
    }
}

/// Checks that a name is one component, as the kernel promises: the server looks up no other names.
fn component(name: &OsStr) -> Result<&OsStr, Errno> {
    match name.as_bytes() {
        b"" | b"." | b".." => Err(Errno::INVAL),
        bytes if bytes.contains(&b'/') => Err(Errno::INVAL),
        _ => Ok(name),
    }
}
