//! Accepted data on its way to the server: WRITE and COMMIT, with the credential of the open.

use std::future::Future;
use std::rc::{Rc, Weak};
use std::time::Instant;

use podfs_nfs::export::CallOptions;
use podfs_nfs::rpc::{Credential, Slice};
use podfs_nfs::v3::{Stability, WccData};
use rustix::io::Errno;

use super::NfsFilesystem;
use crate::nfs::client_state::node::NfsNode;
use crate::nfs::writeback::log::Piece;
use crate::nfs::writeback::{FileKey, Store, Verifier, WriteResult};

/// The store that sends accepted data to the server. The file system owns the writeback, which owns this.
pub struct ExportStore(Weak<NfsFilesystem>);

impl ExportStore {
    /// A store for the server of this file system.
    pub fn new(filesystem: &Rc<NfsFilesystem>) -> Self {
        Self(Rc::downgrade(filesystem))
    }

    /// The file system, the file, and the credential to write with.
    fn target(&self, key: FileKey) -> Result<(Rc<NfsFilesystem>, Rc<NfsNode>, Credential), Errno> {
        let filesystem = self.0.upgrade().ok_or(Errno::IO)?;
        let node = filesystem.state.nodes.get(key.node)?;
        // Without the open file, podfs does not know its credential. Then podfs writes as root, which has no rights on
        // most servers.
        let open = filesystem.state.files.find(key.open);
        let credential = open.map_or_else(NfsFilesystem::root_credential, |open| open.credential.clone());
        Ok((filesystem, node, credential))
    }
}

impl Store for ExportStore {
    fn write(
        &self,
        file: FileKey,
        offset: u64,
        data: Piece,
        stable: bool,
    ) -> impl Future<Output = Result<WriteResult, Errno>> + 'static {
        let target = self.target(file);
        async move {
            let (filesystem, node, credential) = target?;
            let length = data.as_ref().len();
            let data = Slice::new(Rc::new(data));
            let stability = if stable { Stability::FileSync } else { Stability::Unstable };
            node.freshness.borrow_mut().change_begins();
            let epoch = filesystem.epoch();
            let options = CallOptions::new(&credential);
            let write = async |handle| filesystem.export.write(options, &handle, offset, &data, stability).await;
            let written = filesystem.with_handle(&node, &credential, write).await;
            if let Err(error) = &written {
                let (volume, node) = (filesystem.options.name.as_str(), file.node);
                tracing::debug!(
                    volume,
                    "volume {volume:?}: the NFS server takes no {length} bytes at {offset} of node {node}: {error}"
                );
            }
            let around = written.as_ref().map_or_else(|_| WccData::default(), |written| written.file);
            let (number, caching) = (filesystem.order.next(), filesystem.options.caching);
            let change = {
                let mut freshness = node.freshness.borrow_mut();
                freshness.set_epoch(epoch);
                freshness.change_ends(&around, number, Instant::now(), &caching)
            };
            filesystem.react(&node, change);
            let written = written.map_err(|error| error.errno())?;
            let stable = written.stability >= Stability::DataSync;
            Ok(WriteResult { count: written.count, stable, verifier: Verifier(written.verifier) })
        }
    }

    fn commit(&self, file: FileKey) -> impl Future<Output = Result<Verifier, Errno>> + 'static {
        let target = self.target(file);
        async move {
            let (filesystem, node, credential) = target?;
            let options = CallOptions::new(&credential);
            let commit = async |handle| filesystem.export.commit(options, &handle, 0, 0).await;
            let committed = filesystem.with_handle(&node, &credential, commit).await.map_err(|error| error.errno())?;
            Ok(Verifier(committed.verifier))
        }
    }
}
