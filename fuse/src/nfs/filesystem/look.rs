//! Requests that read names, attributes, links and figures of the file system.
//!
//! Requests for the root's attributes or for free space do not wait for a silent NFS server: podfs answers them from memory after
//! [`TIMEOUT`] at most.

use std::future::Future;
use std::rc::Rc;
use std::time::{Duration, Instant};

use podfs_nfs::export::CallOptions;
use podfs_nfs::rpc::Credential;
use podfs_nfs::v3::{Attributes, FileType, FsStat, NfsFileHandle, NfsStatus};
use rustix::io::Errno;
use tokio::time::timeout;

use super::attributes::{attributes, entry};
use super::turn::NfsRequest;
use super::{NfsAnswer, NfsFilesystem, found};
use crate::nfs::client_state::freshness::AttributeChange;
use crate::nfs::client_state::node::NfsNode;
use crate::nfs::options::LookupCache;
use crate::session::abi::{EntryOut, Kstatfs};
use crate::session::{Answer, NodeId};

/// The longest time that such a request waits for the server.
const TIMEOUT: Duration = Duration::from_millis(500);
/// Bytes of a block of free space.
const BLOCK: u64 = 4096;

impl NfsFilesystem {
    pub(super) async fn lookup(
        &self,
        parent: &Rc<NfsNode>,
        name: &[u8],
        turn: &NfsRequest,
    ) -> Result<NfsAnswer, Errno> {
        let credential = self.credential(turn);
        match self.find(parent, name, &credential).await {
            Ok((_, entry)) => Ok(Answer::Entry(entry).into()),
            Err(Errno::NOENT) if self.options.caching.lookups == LookupCache::All => {
                // Node 0: the name does not exist. The kernel caches that as long as a name.
                let holds = self.name_holds(parent);
                Ok(Answer::Entry(entry(NodeId::ABSENT, Default::default(), holds, Duration::ZERO)).into())
            }
            Err(errno) => Err(errno),
        }
    }

    /// Looks a name up, and answers with its node.
    pub(super) async fn find(
        &self,
        parent: &Rc<NfsNode>,
        name: &[u8],
        credential: &Credential,
    ) -> Result<(Rc<NfsNode>, EntryOut), Errno> {
        let asked = self.order.next();
        let how = CallOptions::new(credential);
        let look = async |handle| self.export.lookup(how, &handle, name).await;
        let looked = self.on(parent, credential, look).await.map_err(|error| error.errno())?;
        if let Some(directory) = &looked.directory {
            self.learn(parent, directory, asked);
        }
        self.enter(parent, name, looked.handle, looked.attributes, asked).await
    }

    /// The node of what was found under a name, with its entry for the kernel. `asked` is the place in the order of the question
    /// that gave the attributes.
    pub(super) async fn enter(
        &self,
        parent: &Rc<NfsNode>,
        name: &[u8],
        handle: NfsFileHandle,
        attributes: Option<Attributes>,
        asked: u64,
    ) -> Result<(Rc<NfsNode>, EntryOut), Errno> {
        let attributes = match attributes {
            Some(attributes) => attributes,
            None => {
                let root_credential = Self::root_credential();
                self.export.getattr(CallOptions::new(&root_credential), &handle).await.map_err(|error| error.errno())?
            }
        };
        let node = self.known.nodes.enter(found(handle, &attributes), Some((parent.id, name)))?;
        let mut told = attributes;
        let is_new = !self.writeback().overlaps(node.id, 0..u64::MAX);
        if !is_new || self.learn(&node, &attributes, asked) == AttributeChange::Outdated {
            // Data is on its way to the server that these attributes do not include yet.
            match self.ask(&node).await {
                Ok(found) => told = found,
                Err(errno) => {
                    self.forget(node.id, 1);
                    return Err(errno);
                }
            }
        }
        let holds = node.freshness.borrow().remaining(Instant::now());
        let attr = self.shown.attr(&told, node.is_silly());
        let entry = entry(node.id, attr, self.name_holds(parent), holds);
        Ok((node, entry))
    }

    /// The time for which the kernel may cache a name in a directory.
    pub(super) fn name_holds(&self, directory: &NfsNode) -> Duration {
        if self.options.caching.lookups == LookupCache::None {
            return Duration::ZERO;
        }
        let remaining = directory.freshness.borrow().remaining(Instant::now());
        remaining.max(self.options.caching.shortest(directory.kind))
    }

    pub(super) async fn attributes(&self, node: &Rc<NfsNode>) -> Result<NfsAnswer, Errno> {
        let found = match self.known_attributes(node) {
            Some(found) => found,
            None if node.id == NodeId::ROOT => self.or_known(self.ask(node), || Some(self.root.borrow().get())).await?,
            None => self.ask(node).await?,
        };
        let holds = node.freshness.borrow().remaining(Instant::now());
        Ok(Answer::Attributes(attributes(self.shown.attr(&found, node.is_silly()), holds)).into())
    }

    /// The known attributes of a directory, as long as they hold. The kernel asks after each change that it has made; the answer
    /// to the change had the attributes already. Changes of a directory come one after the other, since the kernel locks it.
    fn known_attributes(&self, node: &NfsNode) -> Option<Attributes> {
        let freshness = node.freshness.borrow();
        let holds = node.kind == FileType::Directory && !freshness.remaining(Instant::now()).is_zero();
        freshness.attributes().copied().filter(|_| holds)
    }

    pub(super) async fn read_link(&self, node: &Rc<NfsNode>, turn: &NfsRequest) -> Result<NfsAnswer, Errno> {
        let credential = self.credential(turn);
        let read = async |handle| self.export.readlink(CallOptions::new(&credential), &handle).await;
        let link = self.on(node, &credential, read).await.map_err(|error| error.errno())?;
        Ok(NfsAnswer::Data(link.target))
    }

    pub(super) async fn status(&self) -> Result<NfsAnswer, Errno> {
        let root = self.known.nodes.root();
        let root_credential = Self::root_credential();
        let ask = async {
            let ask = async |handle| self.export.fsstat(CallOptions::new(&root_credential), &handle).await;
            self.on(&root, &root_credential, ask).await.map_err(|error| error.errno())
        };
        let whole = self.or_known(ask, || Some(self.whole.get().unwrap_or(NOTHING))).await?;
        self.whole.set(Some(whole));
        Ok(Answer::FileSystem(Kstatfs {
            blocks: whole.total_bytes / BLOCK,
            bfree: whole.free_bytes / BLOCK,
            bavail: whole.available_bytes / BLOCK,
            files: whole.total_files,
            ffree: whole.free_files,
            bsize: BLOCK as u32,
            namelen: 255,
            frsize: BLOCK as u32,
            ..Default::default()
        })
        .into())
    }

    /// The server's answer, or what is `known` if the server does not answer.
    async fn or_known<T>(
        &self,
        ask: impl Future<Output = Result<T, Errno>>,
        known: impl Fn() -> Option<T>,
    ) -> Result<T, Errno> {
        let is_silent = self.export.server().silent() >= TIMEOUT;
        if let Some(known) = known().filter(|_| is_silent) {
            return Ok(known);
        }
        match timeout(TIMEOUT, ask).await {
            Ok(Err(errno @ (Errno::IO | Errno::TIMEDOUT))) => known().ok_or(errno),
            Ok(outcome) => outcome,
            Err(_) => known().ok_or(Errno::TIMEDOUT),
        }
    }

    /// Whether a name leads to something, to find out the outcome of a call.
    pub(super) async fn glance(
        &self,
        directory: &NfsNode,
        name: &[u8],
        credential: &Credential,
    ) -> Result<Option<(NfsFileHandle, Attributes)>, Errno> {
        let how = CallOptions::new(credential);
        match self.export.lookup(how, &directory.handle(), name).await {
            Ok(looked) => {
                let attributes = match looked.attributes {
                    Some(attributes) => attributes,
                    None => self.export.getattr(how, &looked.handle).await.map_err(|error| error.errno())?,
                };
                Ok(Some((looked.handle, attributes)))
            }
            Err(error) if error.status() == Some(NfsStatus::NOENT) => Ok(None),
            Err(error) => Err(error.errno()),
        }
    }
}

/// The figures of a file system whose server has never answered.
const NOTHING: FsStat = FsStat {
    total_bytes: 0,
    free_bytes: 0,
    available_bytes: 0,
    total_files: 0,
    free_files: 0,
    available_files: 0,
    attributes: None,
};
