//! Handles that the server does not know any more: `ESTALE`.
//!
//! A server that was moved to another machine, or whose disk was mounted anew, may have another handle for every file. Then podfs
//! looks a node up again, by the name under which it was found in its directory, and the directory too if necessary; the MOUNT
//! service returns the root. podfs uses the new handle only if it is that of the same file: of the same type, with the same number.
//! In any other case, the answer stays `ESTALE`, also if the file was really removed.

use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::time::Duration;

use podfs_nfs::error::Error;
use podfs_nfs::export::CallOptions;
use podfs_nfs::mountd;
use podfs_nfs::rpc::{Credential, Policy};
use podfs_nfs::v3::{NfsFileHandle, NfsStatus};

use super::NfsFilesystem;
use crate::nfs::client_state::node::NfsNode;
use crate::session::NodeId;

/// Most levels of directories that podfs looks up again for one node.
const DEEPEST: usize = 64;
/// The longest time that podfs waits for the MOUNT service.
const MOUNT_BUDGET: Duration = Duration::from_secs(10);

impl NfsFilesystem {
    /// Makes a call with the handle of a node. If the handle is stale and podfs finds another one, makes the call once more.
    ///
    /// # Errors
    /// Those of the call.
    pub(super) async fn with_handle<T>(
        &self,
        node: &Rc<NfsNode>,
        credential: &Credential,
        call: impl AsyncFn(NfsFileHandle) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let handle = node.handle();
        match call(handle).await {
            Err(error) if is_stale(&error) => match self.renew_handle(node, handle, credential, DEEPEST).await {
                true => call(node.handle()).await,
                false => Err(error),
            },
            outcome => outcome,
        }
    }

    /// Looks a node up again. Returns whether the node has another handle than `stale` now.
    fn renew_handle<'a>(
        &'a self,
        node: &'a Rc<NfsNode>,
        stale: NfsFileHandle,
        credential: &'a Credential,
        deeper: usize,
    ) -> Pin<Box<dyn Future<Output = bool> + 'a>> {
        Box::pin(async move {
            if node.handle() != stale {
                // Another request has found the new handle meanwhile.
                return true;
            }
            if node.id == NodeId::ROOT {
                return self.mount_again(node, stale).await;
            }
            let (Some(name), Some(deeper)) = (node.name(), deeper.checked_sub(1)) else { return false };
            let Ok(parent) = self.state.nodes.get(name.parent) else { return false };
            let handle = parent.handle();
            let look = async |handle| self.export.lookup(CallOptions::new(credential), &handle, &name.name).await;
            let looked = match look(handle).await {
                Err(error) if is_stale(&error) && self.renew_handle(&parent, handle, credential, deeper).await => {
                    look(parent.handle()).await
                }
                looked => looked,
            };
            let Ok(looked) = looked else { return false };
            let attributes = match looked.attributes {
                Some(attributes) => Some(attributes),
                None => self.export.getattr(CallOptions::new(credential), &looked.handle).await.ok(),
            };
            let is_same = attributes.is_some_and(|found| (found.kind, found.fileid) == (node.kind, node.fileid));
            is_same && looked.handle != stale && self.state.nodes.set_handle(node, looked.handle).is_ok()
        })
    }

    /// Asks the MOUNT service for the root.
    async fn mount_again(&self, root: &Rc<NfsNode>, stale: NfsFileHandle) -> bool {
        let Some(address) = self.mountd.get() else { return false };
        let Ok(mountd) = self.export.server().to_mountd(address).await else { return false };
        if root.handle() != stale {
            // Another request has found the new handle meanwhile.
            return true;
        }
        let root_credential = Self::root_credential();
        let path = self.options.export.path.as_bytes();
        let mounted = mountd::mount(&mountd.connection, path, &root_credential, Policy::within(MOUNT_BUDGET)).await;
        drop(mountd);
        let Some(handle) = mounted.ok().map(|mounted| mounted.root).filter(|handle| *handle != stale) else {
            return false;
        };
        let found = self.export.getattr(CallOptions::new(&root_credential), &handle).await;
        let is_same = found.is_ok_and(|found| (found.kind, found.fileid) == (root.kind, root.fileid));
        is_same && self.state.nodes.set_handle(root, handle).is_ok()
    }
}

/// Whether the server does not know the handle.
pub fn is_stale(error: &Error) -> bool {
    matches!(error.status(), Some(NfsStatus::STALE | NfsStatus::BADHANDLE))
}
