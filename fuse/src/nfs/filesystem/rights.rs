//! The rights of users: the NFS server decides, and podfs caches its answers.
//!
//! An export that takes all users for one (`all_squash`, `sec=none`) is mounted without `default_permissions`: owner and mode say nothing about
//! the caller. There the kernel sends ACCESS, and uses a name that it has cached for every caller. That is right because the server
//! gives all callers the same rights. In other exports it would be wrong: the kernel would have to ask at each step of a path, and after a
//! refusal would unmount what is mounted below the refused name, for every user (`fuse_dentry_revalidate`).

use std::rc::Rc;
use std::time::Instant;

use podfs_nfs::export::CallOptions;
use podfs_nfs::rpc::Credential;
use podfs_nfs::v3::{Attributes, FileType, access};
use rustix::io::Errno;

use super::nfs_request::NfsRequest;
use super::{NfsAnswer, NfsFilesystem};
use crate::nfs::client_state::freshness::AttributeChange;
use crate::nfs::client_state::node::NfsNode;
use crate::session::Answer;

/// The rights that podfs asks for together.
const ALL: u32 = access::READ | access::LOOKUP | access::MODIFY | access::EXTEND | access::DELETE | access::EXECUTE;

impl NfsFilesystem {
    /// Handles ACCESS: the NFS server decides what the caller may do.
    pub(super) async fn access(
        &self,
        node: &Rc<NfsNode>,
        mask: u32,
        nfs_request: &NfsRequest,
    ) -> Result<NfsAnswer, Errno> {
        let asks = |right: libc::c_int| mask & right.cast_unsigned() != 0;
        let is_directory = node.kind == FileType::Directory;
        let mut wanted = 0;
        if asks(libc::R_OK) {
            wanted |= access::READ;
        }
        if asks(libc::W_OK) {
            wanted |= access::MODIFY | access::EXTEND;
        }
        if asks(libc::X_OK) {
            wanted |= if is_directory { access::LOOKUP } else { access::EXECUTE };
        }
        if wanted == 0 {
            return Ok(Answer::Done.into());
        }
        if asks(libc::W_OK) && matches!(node.kind, FileType::File | FileType::Directory | FileType::Symlink) {
            self.refuse_if_read_only()?;
        }
        let granted = self.rights(node, wanted, &self.credential(nfs_request)).await?;
        if !permits(granted, wanted) {
            return Err(Errno::ACCESS);
        }
        if asks(libc::X_OK) && !is_directory {
            // As with every file system, not even root executes a file without an x bit.
            let found = match self.known_attributes(node) {
                Some(found) => found,
                None => self.fetch_attributes(node).await?,
            };
            if found.mode & 0o111 == 0 {
                return Err(Errno::ACCESS);
            }
        }
        Ok(Answer::Done.into())
    }

    /// The rights of a user to a file, with those of `wanted` among them that the server grants: cached ones, or the server's answer.
    pub(super) async fn rights(&self, node: &Rc<NfsNode>, wanted: u32, credential: &Credential) -> Result<u32, Errno> {
        let known = node.freshness.borrow().right(credential, wanted, Instant::now(), &self.options.caching);
        match known {
            Some(granted) => Ok(granted),
            None => Ok(self.ask_for_rights(node, credential).await?.1),
        }
    }

    /// Asks the server for the rights of a user to a file, and for its attributes.
    pub(super) async fn ask_for_rights(
        &self,
        node: &Rc<NfsNode>,
        credential: &Credential,
    ) -> Result<(Attributes, u32), Errno> {
        self.settle(node).await;
        let query = self.order.next();
        let ask = async |handle| self.export.access(CallOptions::new(credential), &handle, ALL).await;
        let accessed = self.with_handle(node, credential, ask).await.map_err(|error| error.errno())?;
        let found = match accessed.attributes {
            Some(found) if self.learn(node, &found, query) != AttributeChange::Outdated => found,
            _ => self.fetch_attributes(node).await?,
        };
        node.freshness.borrow_mut().set_right(credential.clone(), ALL, accessed.granted, Instant::now());
        Ok((found, accessed.granted))
    }
}

/// Whether the rights that a server has granted include those that are wanted. A server may report the right to execute a file as
/// EXECUTE or as READ.
pub(super) fn permits(granted: u32, wanted: u32) -> bool {
    let has = |bits: u32| granted & bits == bits;
    has(wanted) || (wanted & access::EXECUTE != 0 && has(wanted & !access::EXECUTE | access::READ))
}
