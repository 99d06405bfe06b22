//! The file system of one export: requests in, calls to the server, answers out.
//!
//! It behaves as Linux' own client does (`nfs(5)`), where FUSE lets it:
//!
//! 1. *Close-to-open.* An open sees the content of the last close, by any client: OPEN asks for the attributes, and the kernel
//!    keeps its pages only if they are of the file as it is. Closing and `fsync(2)` wait until the server has everything on disk,
//!    and return write errors.
//! 2. The kernel checks permissions by mode (`default_permissions`), and OPEN asks the server besides: the server decides what
//!    root may do. Reads and writes have the credential of the open.
//! 3. What makes or removes something takes effect once, also when the server or this process is killed in between
//!    (`client_state::calls`); where that is unknown, podfs looks at the outcome (`judge`).
//! 4. A file that is removed while it is open gets another name until it is closed (`silly`).
//! 5. A handle that the server does not know any more is looked for under the name it was found by (`heal`).
//!
//! | module | owns |
//! |---|---|
//! | `look` | names, attributes, links, the file system as a whole |
//! | `change` | what makes, removes or changes names and attributes |
//! | `data` | open files and their content |
//! | `list` | open directories |
//! | `locking` | locks |
//! | `store` | accepted data on its way to the server |
//! | `silly` | files that are removed while they are open |
//! | `judge` | whether a call had its effect |
//! | `heal` | handles that the server does not know any more |
//! | `turn` | one request being answered |
//! | `attributes` | attributes as the kernel has them |

pub mod attributes;
mod change;
mod data;
mod heal;
mod judge;
mod list;
mod locking;
mod look;
mod silly;
mod store;
pub mod turn;

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
use attributes::AttributeConverter;
use store::ExportStore;
use turn::NfsRequest;

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
    known: ClientState,
    credentials: Credentials,
    order: CallSequence,
    shown: AttributeConverter,
    notifier: Notifier,
    invalidator: PageInvalidator,
    writeback: OnceCell<Writeback<ExportStore>>,
    /// The root's attributes and figures, for a successor.
    root: RefCell<OwnedCell<RootCell>>,
    /// The server's last answer about the file system as a whole.
    whole: Cell<Option<FsStat>>,
    /// A number that no other volume has.
    seed: u64,
    /// A warning about locks was logged.
    locks_met: Cell<bool>,
    loops_met: Cell<bool>,
    /// The server has READDIRPLUS.
    has_attributes: Cell<bool>,
}

/// The features that a session with this file system negotiates.
pub fn wanted(options: &ExportOptions) -> WantedFeatures {
    let mut flags = init::ASYNC_READ
        | init::ASYNC_DIO
        | init::PARALLEL_DIROPS
        | init::CACHE_SYMLINKS
        // Only this file system knows whether it was itself that changed a file.
        | init::EXPLICIT_INVAL_DATA
        // The server takes setuid and setgid off a file that is written.
        | init::HANDLE_KILLPRIV_V2
        | init::HAS_RESEND;
    if options.with_attributes {
        flags |= init::DO_READDIRPLUS | init::READDIRPLUS_AUTO;
    }
    if options.callers == ActAs::CallerInItsNamespace {
        flags |= init::ALLOW_IDMAP;
    }
    // Without these flags the kernel keeps the locks by itself, for this mount alone.
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
    pub known: ClientState,
    /// The root's attributes and figures.
    pub root: OwnedCell<RootCell>,
    /// Sends notifications to the kernel.
    pub notifier: Notifier,
}

impl NfsFilesystem {
    /// Serves an export. Accepted data goes through `log`, and `inherited`, which is in it already, is sent again.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn start(beginning: NfsFilesystemSetup, log: Log, inherited: Vec<InheritedRecord>) -> io::Result<Rc<Self>> {
        let NfsFilesystemSetup { options, export, region, known, root, notifier } = beginning;
        let manner = WriteParameters { wsize: export.limits().write as usize, stable: options.stable };
        let filesystem = Rc::new(Self {
            shown: AttributeConverter { fsid: root.get().fsid, block: export.limits().write.next_power_of_two() },
            credentials: Credentials::new(options.callers),
            order: CallSequence::default(),
            invalidator: PageInvalidator::start("nfs-drop")?,
            notifier,
            writeback: OnceCell::new(),
            root: RefCell::new(root),
            whole: Cell::new(None),
            seed: seed(&region),
            locks_met: Cell::new(false),
            loops_met: Cell::new(false),
            has_attributes: Cell::new(options.with_attributes),
            mountd: Cell::new(options.mountd),
            options,
            export,
            known,
        });
        let writeback = Writeback::new(log, inherited, ExportStore::new(&filesystem), manner);
        assert!(filesystem.writeback.set(writeback).is_ok(), "it is set once");
        Ok(filesystem)
    }

    /// The server.
    pub fn server(&self) -> &Rc<NfsServer> {
        self.export.server()
    }

    /// The server's mountd is elsewhere.
    pub fn move_mountd(&self, address: SocketAddr) {
        self.mountd.set(Some(address));
    }

    /// Answers one request.
    ///
    /// # Errors
    /// The errno for the caller.
    pub async fn answer(self: &Rc<Self>, request: &Request<'_>, turn: &NfsRequest) -> Result<NfsAnswer, Errno> {
        if let FuseOperation::IoCtl = request.operation {
            return Err(Errno::NOTTY);
        }
        let node = &self.known.nodes.get(request.node)?;
        match request.operation {
            FuseOperation::Lookup { name } => self.lookup(node, name.as_encoded_bytes(), turn).await,
            FuseOperation::GetAttr { .. } => self.attributes(node).await,
            FuseOperation::ReadLink => self.read_link(node, turn).await,
            FuseOperation::StatFs => self.status().await,

            FuseOperation::SetAttr(arguments) => self.set_attributes(node, arguments, turn).await,
            FuseOperation::Symlink { name, target } => {
                self.make_link(node, name.as_encoded_bytes(), target.as_encoded_bytes(), turn).await
            }
            FuseOperation::MkNod { name, arguments } => {
                self.make_node(node, name.as_encoded_bytes(), arguments, turn).await
            }
            FuseOperation::MkDir { name, arguments } => {
                self.make_directory(node, name.as_encoded_bytes(), arguments.mode, turn).await
            }
            FuseOperation::Unlink { name } => self.unlink(node, name.as_encoded_bytes(), turn).await,
            FuseOperation::RmDir { name } => self.remove_directory(node, name.as_encoded_bytes(), turn).await,
            FuseOperation::Rename { name, new_parent, new_name, flags } => {
                let to = self.known.nodes.get(new_parent)?;
                let (name, new_name) = (name.as_encoded_bytes(), new_name.as_encoded_bytes());
                self.rename((node, name), (&to, new_name), flags, turn).await
            }
            FuseOperation::Link { node: old, name } => {
                self.link(&self.known.nodes.get(old)?, node, name.as_encoded_bytes(), turn).await
            }

            FuseOperation::Open { flags } => self.open(node, flags, turn).await,
            FuseOperation::Create { name, arguments } => {
                self.create(node, name.as_encoded_bytes(), arguments, turn).await
            }
            FuseOperation::Read(arguments) => self.read(arguments).await,
            FuseOperation::Write { arguments, data } => self.write(arguments, data).await,
            FuseOperation::FSync(arguments) => self.sync(arguments).await,
            FuseOperation::Flush(arguments) => self.flush(arguments, turn).await,
            FuseOperation::Release(arguments) => Ok(self.release(arguments.fh)),

            FuseOperation::OpenDir => self.open_directory(node, turn),
            FuseOperation::ReadDir(arguments) => self.read_directory(arguments, false).await,
            FuseOperation::ReadDirPlus(arguments) => self.read_directory(arguments, true).await,
            FuseOperation::ReleaseDir(arguments) => Ok(self.release(arguments.fh)),

            FuseOperation::GetLock(_) => Err(self.no_locks()),
            FuseOperation::SetLock { arguments, .. } => self.set_lock(arguments),

            // The kernel remembers `ENOSYS`, and handles the call by itself.
            _ => Err(Errno::NOSYS),
        }
    }

    /// The kernel forgets a node.
    pub fn forget(&self, node: NodeId, lookups: u64) {
        self.known.nodes.forget(node, lookups, |node| self.writeback().is_dirty(node));
    }

    /// Forgets the inherited state of a request that is answered.
    pub fn end(&self, turn: &NfsRequest) {
        turn.is_answered();
        if turn.resent {
            self.known.calls.end(turn.unique);
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
        let mut name = self.known.nodes.get(node).ok().and_then(|node| node.name());
        while let Some(known) = name.take().filter(|_| parts.len() < DEEPEST) {
            parts.push(known.name.to_vec());
            name = self.known.nodes.get(known.parent).ok().and_then(|parent| parent.name());
        }
        parts.reverse();
        format!("/{}", String::from_utf8_lossy(&parts.join(&b'/')))
    }

    /// Accepted data that the server has not committed.
    pub fn writeback(&self) -> &Writeback<ExportStore> {
        self.writeback.get().expect("it is set before anything is asked")
    }

    /// All that was accepted is at the server's disk, or failed.
    pub async fn write_all(&self) {
        for node in self.known.nodes.all() {
            self.writeback().settle_on_disk(node.id).await;
        }
    }

    /// The credential of a call for this request.
    fn credential(&self, turn: &NfsRequest) -> Credential {
        self.credentials.of(turn.caller)
    }

    /// The credential for questions that every user may ask.
    fn root_credential() -> Credential {
        Credential::root()
    }

    fn refuse_if_read_only(&self) -> Result<(), Errno> {
        if self.options.read_only { Err(Errno::ROFS) } else { Ok(()) }
    }

    /// The attributes of a node, as they are now.
    async fn ask(&self, node: &Rc<NfsNode>) -> Result<Attributes, Errno> {
        const ATTEMPTS: usize = 3;
        let root_credential = Self::root_credential();
        let how = CallOptions::new(&root_credential);
        for _ in 0..ATTEMPTS {
            self.settle(node).await;
            let asked = self.order.next();
            let asking = self.on(node, &root_credential, async |handle| self.export.getattr(how, &handle).await);
            let found = asking.await.map_err(|error| error.errno())?;
            if found.kind != node.kind {
                return Err(Errno::STALE);
            }
            if self.learn(node, &found, asked) != AttributeChange::Outdated {
                return Ok(found);
            }
        }
        // It is being changed all the time. The attributes of the last change are as new as any.
        node.freshness.borrow().attributes().copied().ok_or(Errno::IO)
    }

    /// Waits until the server has the accepted data of a file.
    async fn settle(&self, node: &NfsNode) {
        let writeback = self.writeback();
        if !writeback.is_dirty(node.id) {
            return;
        }
        if node.freshness.borrow().epoch() == self.epoch() {
            writeback.settle(node.id).await;
        } else {
            // The server may have restarted, and lost data that was not on its disk. Writers get the errors.
            writeback.settle_on_disk(node.id).await;
        }
    }

    /// Another number after the connection to the server was lost.
    fn epoch(&self) -> u64 {
        self.export.server().reconnects()
    }

    /// Takes in attributes. `asked` is the place of the question in the order.
    fn learn(&self, node: &NfsNode, found: &Attributes, asked: u64) -> AttributeChange {
        let caching = &self.options.caching;
        let news = node.freshness.borrow_mut().learn(found, asked, Instant::now(), caching);
        self.react(node, news);
        if node.id == NodeId::ROOT {
            self.root.borrow().set(found);
        }
        news
    }

    /// Takes in attributes around a change that was made here.
    fn changed(&self, node: &NfsNode, around: &WccData) {
        let caching = &self.options.caching;
        let place = self.order.next();
        let news = node.freshness.borrow_mut().changed_here(around, true, place, Instant::now(), caching);
        self.react(node, news);
    }

    /// Another client has changed a file: the kernel's pages are of the old content. If the file is open, they are dropped;
    /// otherwise the next OPEN drops them.
    fn react(&self, node: &NfsNode, news: AttributeChange) {
        if news == AttributeChange::Changed && node.is_open() {
            let mut freshness = node.freshness.borrow_mut();
            if let Some(found) = freshness.attributes().copied() {
                // Pages that are read from now on are at least as new as this.
                freshness.opened(&found);
            }
            self.invalidator.drop_content(&self.notifier, node.id);
        }
    }

    /// Settles what a dead server has left: it is unknown of which content the pages of open files are, and accepted data is
    /// still to be written.
    pub async fn resume_inherited(self: Rc<Self>) {
        let files = self.known.files.all().into_iter().filter(|open| open.listing.is_none());
        let nodes: Vec<_> = files.map(|open| Rc::clone(&open.node)).collect();
        for node in nodes {
            if let Ok(found) = self.ask(&node).await {
                node.freshness.borrow_mut().opened(&found);
            }
            self.invalidator.drop_content(&self.notifier, node.id);
        }
        self.write_all().await;
        let is_dirty = |node| self.writeback().is_dirty(node);
        self.known.files.let_go(is_dirty);
        self.known.nodes.let_go(is_dirty);
    }
}

/// The node that attributes describe.
fn found(handle: podfs_nfs::v3::NfsFileHandle, attributes: &Attributes) -> NewNfsNode {
    NewNfsNode { handle, kind: attributes.kind, fileid: attributes.fileid }
}

/// A cell for the root's attributes.
///
/// # Errors
/// When there is no memory.
pub fn root_record(region: &Arc<Region>, found: &Attributes) -> Result<OwnedCell<RootCell>, Errno> {
    OwnedCell::new(region, |cell: &RootCell| cell.set(found)).map_err(no_memory)
}
