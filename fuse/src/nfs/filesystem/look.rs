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
use super::nfs_request::NfsRequest;
use super::{NfsAnswer, NfsFilesystem, new_node};
use crate::nfs::client_state::freshness::AttributeChange;
use crate::nfs::client_state::node::NfsNode;
use crate::nfs::options::LookupCache;
use crate::session::abi::{EntryOut, Kstatfs};
use crate::session::{Answer, NodeId};

/// The longest time that a request for the root's attributes or for free space waits for the server.
const TIMEOUT: Duration = Duration::from_millis(500);
/// Bytes of a block of free space.
const BLOCK: u64 = 4096;

/// A lookup of a node that is counted for a request. If the request fails, or its caller is killed, the kernel does not get the node,
/// and dropping this takes the lookup back.
pub(super) struct CountedLookup<'a> {
    filesystem: &'a NfsFilesystem,
    node: NodeId,
    is_kept: bool,
}

impl<'a> CountedLookup<'a> {
    /// The lookup that was just counted for a node.
    pub(super) fn new(filesystem: &'a NfsFilesystem, node: NodeId) -> Self {
        Self { filesystem, node, is_kept: false }
    }

    /// Records that the kernel gets the node.
    pub(super) fn keep(mut self) {
        self.is_kept = true;
    }
}

impl Drop for CountedLookup<'_> {
    fn drop(&mut self) {
        if !self.is_kept {
            self.filesystem.forget(self.node, 1);
        }
    }
}

impl NfsFilesystem {
    pub(super) async fn lookup(
        &self,
        parent: &Rc<NfsNode>,
        name: &[u8],
        nfs_request: &NfsRequest,
    ) -> Result<NfsAnswer, Errno> {
        let credential = self.credential(nfs_request);
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
        let query = self.order.next();
        let options = CallOptions::new(credential);
        let look = async |handle| self.export.lookup(options, &handle, name).await;
        let looked = self.with_handle(parent, credential, look).await.map_err(|error| error.errno())?;
        if let Some(directory) = &looked.directory {
            self.learn(parent, directory, query);
        }
        self.enter(parent, name, looked.handle, looked.attributes, query).await
    }

    /// The node of the file that was found under a name, with its entry for the kernel. `query` is the number of the call that
    /// returned the attributes.
    pub(super) async fn enter(
        &self,
        parent: &Rc<NfsNode>,
        name: &[u8],
        handle: NfsFileHandle,
        attributes: Option<Attributes>,
        query: u64,
    ) -> Result<(Rc<NfsNode>, EntryOut), Errno> {
        let attributes = match attributes {
            Some(attributes) => attributes,
            None => {
                let root_credential = Self::root_credential();
                self.export.getattr(CallOptions::new(&root_credential), &handle).await.map_err(|error| error.errno())?
            }
        };
        let node = self.state.nodes.enter(new_node(handle, &attributes), Some((parent.id, name)))?;
        let lookup = CountedLookup::new(self, node.id);
        let mut current = attributes;
        let is_settled = !self.writeback().overlaps(node.id, 0..u64::MAX);
        if !is_settled || self.learn(&node, &attributes, query) == AttributeChange::Outdated {
            // Data is on its way to the server that these attributes do not include yet.
            current = self.fetch_attributes(&node).await?;
        }
        lookup.keep();
        let holds = node.freshness.borrow().remaining(Instant::now());
        let attr = self.converter.attr(&current, node.is_silly());
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
            None if node.id == NodeId::ROOT => {
                self.or_known(self.fetch_attributes(node), || Some(self.root.borrow().get())).await?
            }
            None => self.fetch_attributes(node).await?,
        };
        let holds = node.freshness.borrow().remaining(Instant::now());
        Ok(Answer::Attributes(attributes(self.converter.attr(&found, node.is_silly()), holds)).into())
    }

    /// The cached attributes of a directory, as long as they are valid. The kernel requests them after each change that it has
    /// made, and the server's answer to the change had them already. Changes of a directory come one after the other, because
    /// the kernel locks the directory.
    pub(super) fn known_attributes(&self, node: &NfsNode) -> Option<Attributes> {
        let freshness = node.freshness.borrow();
        let holds = node.kind == FileType::Directory && !freshness.remaining(Instant::now()).is_zero();
        freshness.attributes().copied().filter(|_| holds)
    }

    pub(super) async fn read_link(&self, node: &Rc<NfsNode>, nfs_request: &NfsRequest) -> Result<NfsAnswer, Errno> {
        let credential = self.credential(nfs_request);
        let read = async |handle| self.export.readlink(CallOptions::new(&credential), &handle).await;
        let link = self.with_handle(node, &credential, read).await.map_err(|error| error.errno())?;
        Ok(NfsAnswer::Data(link.target))
    }

    pub(super) async fn status(&self) -> Result<NfsAnswer, Errno> {
        let root = self.state.nodes.root();
        let root_credential = Self::root_credential();
        let ask = async {
            let ask = async |handle| self.export.fsstat(CallOptions::new(&root_credential), &handle).await;
            self.with_handle(&root, &root_credential, ask).await.map_err(|error| error.errno())
        };
        let fsstat = self.or_known(ask, || Some(self.last_fsstat.get().unwrap_or(UNKNOWN_FSSTAT))).await?;
        self.last_fsstat.set(Some(fsstat));
        Ok(Answer::FileSystem(Kstatfs {
            blocks: fsstat.total_bytes / BLOCK,
            bfree: fsstat.free_bytes / BLOCK,
            bavail: fsstat.available_bytes / BLOCK,
            files: fsstat.total_files,
            ffree: fsstat.free_files,
            bsize: BLOCK as u32,
            namelen: 255,
            frsize: BLOCK as u32,
            ..Default::default()
        })
        .into())
    }

    /// The server's answer, or `known` if the server does not answer.
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

    /// Looks a name up without making a node, to examine the outcome of a call.
    pub(super) async fn examine_name(
        &self,
        directory: &NfsNode,
        name: &[u8],
        credential: &Credential,
    ) -> Result<Option<(NfsFileHandle, Attributes)>, Errno> {
        let options = CallOptions::new(credential);
        match self.export.lookup(options, &directory.handle(), name).await {
            Ok(looked) => {
                let attributes = match looked.attributes {
                    Some(attributes) => attributes,
                    None => self.export.getattr(options, &looked.handle).await.map_err(|error| error.errno())?,
                };
                Ok(Some((looked.handle, attributes)))
            }
            Err(error) if error.status() == Some(NfsStatus::NOENT) => Ok(None),
            Err(error) => Err(error.errno()),
        }
    }
}

/// The figures of a file system whose server has never answered.
const UNKNOWN_FSSTAT: FsStat = FsStat {
    total_bytes: 0,
    free_bytes: 0,
    available_bytes: 0,
    total_files: 0,
    free_files: 0,
    available_files: 0,
    attributes: None,
};
