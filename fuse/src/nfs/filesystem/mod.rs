//! The file system of one export. It answers the kernel's requests by calls to the NFS server.
//!
//! It behaves as Linux' own client does (`nfs(5)`), where FUSE allows it:
//!
//! 1. *Close-to-open.* An open sees the content of the last close, by any client: OPEN fetches the attributes, and the kernel
//!    keeps its pages only if they have the file's current content. close(2) and fsync(2) wait until the NFS server has all data on
//!    disk, and return write errors.
//! 2. The kernel checks permissions by mode (`default_permissions`), and OPEN and OPENDIR ask the NFS server, too: the NFS server decides
//!    what root may do. Where the NFS server takes all users for one, the kernel cannot know what they may do: there it checks nothing,
//!    and the NFS server alone decides (`rights`). Reads and writes have the credential of the open.
//! 3. A call that makes or removes a file takes effect once, even if the NFS server or this process is killed in between
//!    (`client_state::calls`). If podfs does not know whether the call took effect, it examines the outcome (`call_effects`).
//! 4. A file that is removed while it is open gets another name until it is closed (`silly`).
//! 5. If the NFS server does not know a handle any more, podfs looks the file up by the name under which it was found
//!    (`stale_handles`).
//!
//! | module | owns |
//! |---|---|
//! | `look` | names, attributes, links, the file system as a whole |
//! | `rights` | what the server lets a user do |
//! | `change` | requests that make, remove or change names and attributes |
//! | `data` | open files and their content |
//! | `list` | open directories |
//! | `locking` | locks |
//! | `store` | accepted data on its way to the server |
//! | `silly` | files that are removed while they are open |
//! | `at_once` | requests of one file that run at once, and changes that outlive their request |
//! | `call_effects` | whether a call had its effect |
//! | `stale_handles` | handles that the server does not know any more |
//! | `nfs_request` | a request that a task answers |
//! | `attributes` | attributes as the kernel has them |

mod at_once;
pub mod attributes;
mod call_effects;
mod change;
mod data;
mod list;
mod locking;
mod look;
pub mod nfs_request;
mod rights;
mod silly;
mod stale_handles;
mod store;

use std::cell::{Cell, OnceCell, RefCell};
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use podfs_nfs::export::{CallOptions, Export};
use podfs_nfs::rpc::Credential;
use podfs_nfs::server::NfsServer;
use podfs_nfs::v3::{Attributes, FsStat, WccData};
use rustix::io::Errno;

use super::client_state::ClientState;
use super::client_state::calls::seed;
use super::client_state::freshness::{AttributeChange, CallSequence};
use super::client_state::node::{NewNfsNode, NfsNode};
use super::client_state::state::{RootCell, no_memory};
use super::options::ExportOptions;
use super::writeback::log::{InheritedRecord, Log};
use super::writeback::{WriteParameters, Writeback};
use crate::caller::credentials::{ActAs, Credentials};
use crate::region::Region;
use crate::region::cells::OwnedCell;
use crate::session::abi::init;
use crate::session::{Answer, FuseOperation, NodeId, Notifier, PageInvalidator, Request, WantedFeatures};
use at_once::{ChangesUnderWay, Removals};
use attributes::AttributeConverter;
use nfs_request::NfsRequest;
use store::ExportStore;

/// The result of a request.
#[derive(Debug)]
pub enum NfsAnswer {
    /// An `Answer`, which the session encodes.
    Plain(Answer),
    /// The bytes of the answer.
    Bytes(Vec<u8>),
    /// Bytes of a reply of the server, which are not copied.
    Data(podfs_nfs::rpc::Slice),
}

impl From<Answer> for NfsAnswer {
    fn from(answer: Answer) -> Self {
        Self::Plain(answer)
    }
}

/// The file system of one export.
pub struct NfsFilesystem {
    options: ExportOptions,
    export: Export,
    /// The address of the server's MOUNT service.
    mountd: Cell<Option<SocketAddr>>,
    state: ClientState,
    credentials: Credentials,
    order: CallSequence,
    converter: AttributeConverter,
    notifier: Notifier,
    invalidator: PageInvalidator,
    writeback: OnceCell<Writeback<ExportStore>>,
    /// Files whose names are being removed.
    removals: Removals,
    /// Changes that podfs makes to their end.
    changes: ChangesUnderWay,
    /// The root's attributes and figures, for a successor.
    root: RefCell<OwnedCell<RootCell>>,
    /// The server's last answer to FSSTAT.
    last_fsstat: Cell<Option<FsStat>>,
    /// A number that no other volume has.
    seed: u64,
    /// The log has a warning about locks.
    is_locking_logged: Cell<bool>,
    /// The log has a warning about a directory whose listing does not end.
    is_loop_logged: Cell<bool>,
    /// The server has READDIRPLUS.
    has_readdirplus: Cell<bool>,
}

/// The features that a session with this file system negotiates.
pub fn wanted_features(options: &ExportOptions) -> WantedFeatures {
    let mut flags = init::ASYNC_READ
        | init::ASYNC_DIO
        | init::PARALLEL_DIROPS
        | init::CACHE_SYMLINKS
        // Only this file system knows whether it has changed a file itself.
        | init::EXPLICIT_INVAL_DATA
        // The NFS server removes setuid and setgid from a file that is written.
        | init::HANDLE_KILLPRIV_V2
        | init::HAS_RESEND;
    if options.with_attributes {
        flags |= init::DO_READDIRPLUS | init::READDIRPLUS_AUTO;
    }
    if options.callers == ActAs::CallerInItsNamespace {
        flags |= init::ALLOW_IDMAP;
    }
    // Without these flags, the kernel itself keeps the locks, for this mount alone.
    if !options.local_locks.posix {
        flags |= init::POSIX_LOCKS;
    }
    if !options.local_locks.flock {
        flags |= init::FLOCK_LOCKS;
    }
    WantedFeatures { flags, max_stack_depth: 0 }
}

/// The parts of a new file system.
pub struct NfsFilesystemSetup {
    /// The options of the mount.
    pub options: ExportOptions,
    /// The export.
    pub export: Export,
    /// The volume's region.
    pub region: Arc<Region>,
    /// The client's state, new or inherited.
    pub state: ClientState,
    /// The root's attributes and figures.
    pub root: OwnedCell<RootCell>,
    /// Sends notifications to the kernel.
    pub notifier: Notifier,
}

impl NfsFilesystem {
    /// Serves an export. Accepted data goes through `log`. The records `inherited` are in it already, and podfs sends them again.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn start(setup: NfsFilesystemSetup, log: Log, inherited: Vec<InheritedRecord>) -> io::Result<Rc<Self>> {
        let NfsFilesystemSetup { options, export, region, state, root, notifier } = setup;
        let parameters = WriteParameters { wsize: export.limits().write as usize, stable: options.stable };
        let filesystem = Rc::new(Self {
            converter: AttributeConverter { fsid: root.get().fsid, block: export.limits().write.next_power_of_two() },
            credentials: Credentials::new(options.callers),
            order: CallSequence::default(),
            invalidator: PageInvalidator::start("nfs-drop")?,
            notifier,
            writeback: OnceCell::new(),
            removals: Removals::default(),
            changes: ChangesUnderWay::default(),
            root: RefCell::new(root),
            last_fsstat: Cell::new(None),
            seed: seed(&region),
            is_locking_logged: Cell::new(false),
            is_loop_logged: Cell::new(false),
            has_readdirplus: Cell::new(options.with_attributes),
            mountd: Cell::new(options.mountd),
            options,
            export,
            state,
        });
        let writeback = Writeback::new(log, inherited, ExportStore::new(&filesystem), parameters);
        assert!(filesystem.writeback.set(writeback).is_ok(), "it is set once");
        Ok(filesystem)
    }

    /// The server.
    pub fn server(&self) -> &Rc<NfsServer> {
        self.export.server()
    }

    /// Records that the server's mountd has moved.
    pub fn move_mountd(&self, address: SocketAddr) {
        self.mountd.set(Some(address));
    }

    /// Answers one request.
    ///
    /// # Errors
    /// The errno for the caller.
    pub async fn answer(
        self: &Rc<Self>,
        request: &Request<'_>,
        nfs_request: &Rc<NfsRequest>,
    ) -> Result<NfsAnswer, Errno> {
        if let FuseOperation::IoCtl = request.operation {
            return Err(Errno::NOTTY);
        }
        let node = &self.state.nodes.get(request.node)?;
        match request.operation {
            FuseOperation::Lookup { name } => self.lookup(node, name.as_encoded_bytes(), nfs_request).await,
            FuseOperation::GetAttr { .. } => self.attributes(node).await,
            FuseOperation::Access { mask } => self.access(node, mask, nfs_request).await,
            FuseOperation::ReadLink => self.read_link(node, nfs_request).await,
            FuseOperation::StatFs => self.status().await,

            FuseOperation::SetAttr(arguments) => self.set_attributes(node, arguments, nfs_request).await,
            FuseOperation::Symlink { name, target } => {
                self.make_link(node, name.as_encoded_bytes(), target.as_encoded_bytes(), nfs_request).await
            }
            FuseOperation::MkNod { name, arguments } => {
                self.make_node(node, name.as_encoded_bytes(), arguments, nfs_request).await
            }
            FuseOperation::MkDir { name, arguments } => {
                self.make_directory(node, name.as_encoded_bytes(), arguments.mode, nfs_request).await
            }
            FuseOperation::Unlink { name } => self.unlink(node, name.as_encoded_bytes(), nfs_request).await,
            FuseOperation::RmDir { name } => self.remove_directory(node, name.as_encoded_bytes(), nfs_request).await,
            FuseOperation::Rename { name, new_parent, new_name, flags } => {
                let to = self.state.nodes.get(new_parent)?;
                let (name, new_name) = (name.as_encoded_bytes(), new_name.as_encoded_bytes());
                self.rename((node, name), (&to, new_name), flags, nfs_request).await
            }
            FuseOperation::Link { node: old, name } => {
                self.link(&self.state.nodes.get(old)?, node, name.as_encoded_bytes(), nfs_request).await
            }

            FuseOperation::Open { flags } => self.open(node, flags, nfs_request).await,
            FuseOperation::Create { name, arguments } => {
                self.create(node, name.as_encoded_bytes(), arguments, nfs_request).await
            }
            FuseOperation::Read(arguments) => self.read(arguments).await,
            FuseOperation::Write { arguments, data } => self.write(arguments, data).await,
            FuseOperation::FSync(arguments) => self.sync(arguments).await,
            FuseOperation::Flush(arguments) => self.flush(arguments, nfs_request).await,
            FuseOperation::Release(arguments) => Ok(self.release(arguments.fh)),

            FuseOperation::OpenDir => self.open_directory(node, nfs_request).await,
            FuseOperation::ReadDir(arguments) => self.read_directory(arguments, false).await,
            FuseOperation::ReadDirPlus(arguments) => self.read_directory(arguments, true).await,
            FuseOperation::ReleaseDir(arguments) => Ok(self.release(arguments.fh)),

            FuseOperation::GetLock(_) => Err(self.no_locks()),
            FuseOperation::SetLock { arguments, .. } => self.set_lock(arguments),

            // The kernel remembers `ENOSYS`, and handles the call by itself.
            _ => Err(Errno::NOSYS),
        }
    }

    /// Handles FORGET.
    pub fn forget(&self, node: NodeId, lookups: u64) {
        self.state.nodes.forget(node, lookups, |node| self.writeback().is_dirty(node));
    }

    /// Forgets the inherited state of a request that is answered.
    pub fn end(&self, nfs_request: &NfsRequest) {
        nfs_request.mark_answered();
        if nfs_request.resent {
            self.state.calls.end(nfs_request.unique);
        }
    }

    /// The options of the mount.
    pub fn options(&self) -> &ExportOptions {
        &self.options
    }

    /// The path of a node, or of the entry `entry` in it, below the export, for messages.
    pub fn path(&self, node: NodeId, entry: Option<&[u8]>) -> String {
        const DEEPEST: usize = 64;
        let mut parts: Vec<Vec<u8>> = entry.map(<[u8]>::to_vec).into_iter().collect();
        let mut name = self.state.nodes.get(node).ok().and_then(|node| node.name());
        while let Some(known) = name.take().filter(|_| parts.len() < DEEPEST) {
            parts.push(known.name.to_vec());
            name = self.state.nodes.get(known.parent).ok().and_then(|parent| parent.name());
        }
        parts.reverse();
        format!("/{}", String::from_utf8_lossy(&parts.join(&b'/')))
    }

    /// Accepted data that the server has not committed.
    pub fn writeback(&self) -> &Writeback<ExportStore> {
        self.writeback.get().expect("it is set before the first request")
    }

    /// Waits until all accepted data is on the server's disk, or has failed.
    pub async fn write_all(&self) {
        for node in self.state.nodes.all() {
            self.writeback().settle_on_disk(node.id).await;
        }
    }

    /// The credential of a call for this request.
    fn credential(&self, nfs_request: &NfsRequest) -> Credential {
        self.credentials.of(nfs_request.caller)
    }

    /// The credential for calls that every user may make.
    fn root_credential() -> Credential {
        Credential::root()
    }

    fn refuse_if_read_only(&self) -> Result<(), Errno> {
        if self.options.read_only { Err(Errno::ROFS) } else { Ok(()) }
    }

    /// Fetches the current attributes of a node.
    async fn fetch_attributes(&self, node: &Rc<NfsNode>) -> Result<Attributes, Errno> {
        const ATTEMPTS: usize = 3;
        let root_credential = Self::root_credential();
        let options = CallOptions::new(&root_credential);
        for _ in 0..ATTEMPTS {
            self.settle(node).await;
            let query = self.order.next();
            let asking =
                self.with_handle(node, &root_credential, async |handle| self.export.getattr(options, &handle).await);
            let found = asking.await.map_err(|error| error.errno())?;
            if found.kind != node.kind {
                return Err(Errno::STALE);
            }
            if self.learn(node, &found, query) != AttributeChange::Outdated {
                return Ok(found);
            }
        }
        // The file is being changed all the time. The attributes of the last change are as new as any.
        node.freshness.borrow().attributes().copied().ok_or(Errno::IO)
    }

    /// Waits until the server has the accepted data of a file.
    async fn settle(&self, node: &NfsNode) {
        let writeback = self.writeback();
        if !writeback.has_data(node.id) {
            return;
        }
        if self.may_be_lost(node) {
            // Writers get the errors.
            writeback.settle_on_disk(node.id).await;
        } else {
            writeback.settle(node.id).await;
        }
    }

    /// Whether the server may have restarted, and lost accepted data of a file. Until podfs has sent that data again, the server's
    /// attributes and bytes are those from before it.
    fn may_be_lost(&self, node: &NfsNode) -> bool {
        self.writeback().has_data(node.id) && node.freshness.borrow().epoch() != self.epoch()
    }

    /// A number that changes each time that the connection to the server was lost and made again.
    fn epoch(&self) -> u64 {
        self.export.server().reconnects()
    }

    /// Caches attributes. `query` is the number of the call that returned them.
    fn learn(&self, node: &NfsNode, found: &Attributes, query: u64) -> AttributeChange {
        if self.may_be_lost(node) {
            return AttributeChange::Outdated;
        }
        let caching = &self.options.caching;
        let change = node.freshness.borrow_mut().learn(found, query, Instant::now(), caching);
        self.react(node, change);
        if node.id == NodeId::ROOT {
            self.root.borrow().set(found);
        }
        change
    }

    /// Caches the attributes before and after a change that podfs made.
    fn changed(&self, node: &NfsNode, around: &WccData) {
        let caching = &self.options.caching;
        let number = self.order.next();
        let change = node.freshness.borrow_mut().changed_here(around, true, number, Instant::now(), caching);
        self.react(node, change);
    }

    /// After a change by another client, the kernel's pages have the old content. If the file is open, the kernel drops them now;
    /// otherwise at the next OPEN.
    fn react(&self, node: &NfsNode, change: AttributeChange) {
        if change == AttributeChange::Changed && node.is_open() {
            let mut freshness = node.freshness.borrow_mut();
            if let Some(found) = freshness.attributes().copied() {
                freshness.begins_to_drop_pages(&found);
            }
            self.invalidator.drop_content(&self.notifier, node.id);
        }
    }

    /// Completes the state that a dead server has left: the kernel drops the pages of open files, because podfs does not know
    /// which content they have, and podfs writes the accepted data.
    pub async fn resume_inherited(self: Rc<Self>) {
        let files = self.state.files.all().into_iter().filter(|open| open.listing.is_none());
        let nodes: Vec<_> = files.map(|open| Rc::clone(&open.node)).collect();
        for node in nodes {
            if let Ok(found) = self.fetch_attributes(&node).await {
                node.freshness.borrow_mut().begins_to_drop_pages(&found);
            }
            self.invalidator.drop_content(&self.notifier, node.id);
        }
        self.write_all().await;
        for node in self.state.nodes.all().into_iter().filter(|node| !node.is_open()) {
            self.writeback().forget_failure(node.id);
        }
        self.drop_unneeded();
    }

    /// Drops closed files and forgotten nodes without data to write.
    fn drop_unneeded(&self) {
        self.state.files.drop_closed(|node| self.writeback().has_data(node));
        self.state.nodes.drop_forgotten(|node| self.writeback().is_dirty(node));
    }
}

/// The fields of a node with this handle and these attributes.
fn new_node(handle: podfs_nfs::v3::NfsFileHandle, attributes: &Attributes) -> NewNfsNode {
    NewNfsNode { handle, kind: attributes.kind, fileid: attributes.fileid }
}

/// A cell for the root's attributes.
///
/// # Errors
/// When there is no memory.
pub fn root_record(region: &Arc<Region>, found: &Attributes) -> Result<OwnedCell<RootCell>, Errno> {
    OwnedCell::new(region, |cell: &RootCell| cell.set(found)).map_err(no_memory)
}
