//! Files that are removed while they are open.
//!
//! The NFS server does not know which files are open on this node, and would remove a file that is in use. So podfs renames such a
//! file until its last close, as Linux' own client does (*silly rename*), to `.nfs`, the file's number and the number of the
//! request. podfs leaves the name out of listings; other clients see it, and rmdir(2) of its directory fails. The name follows
//! from the request, so that a successor that gets the same request again knows it.
//!
//! 1. podfs removes the file as soon as it has such a name and is not in use: at its last close, and when it has the name, because
//!    its last close may come while the NFS server gives it the name.
//! 2. An OPEN that is not answered yet is a use. An OPEN that comes while podfs removes the last name waits for that (`at_once`).
//! 3. podfs gives the name even if the process that removes the file is killed meanwhile (`at_once`): podfs alone knows the name.
//! 4. If the NFS server refuses to remove the file, podfs tries again at the end of the volume.

use std::rc::Rc;

use podfs_nfs::export::CallOptions;
use podfs_nfs::rpc::Credential;
use podfs_nfs::v3::{FileType, NfsStatus};
use rustix::io::Errno;

use super::NfsFilesystem;
use super::nfs_request::NfsRequest;
use crate::nfs::client_state::node::NfsNode;

/// The step of a request that gives an open file its silly name.
pub const SILLY_STEP: u32 = 0;
/// The step with the call that the request is about.
pub const MAIN_STEP: u32 = 1;

impl NfsFilesystem {
    /// The open file that would lose its last name by this request, or has lost it by this request already.
    pub(super) async fn file_to_keep(
        &self,
        directory: &NfsNode,
        name: &[u8],
        credential: &Credential,
        nfs_request: &NfsRequest,
    ) -> Result<Option<Rc<NfsNode>>, Errno> {
        if nfs_request.resent && self.state.calls.was_begun(nfs_request.unique, SILLY_STEP) {
            let is_it = |node: &Rc<NfsNode>| {
                node.name().is_some_and(|known| {
                    known.is(directory.id, name) || *known.name == *silly_name(node.fileid, nfs_request.unique)
                })
            };
            let known = self.state.nodes.all().into_iter().find(is_it);
            // podfs is removing a file that was closed after it got its silly name.
            return Ok(known.filter(|node| node.is_in_use() || !node.is_silly()));
        }
        if nfs_request.resent && self.state.calls.was_begun(nfs_request.unique, MAIN_STEP) {
            // A dead server has found that there is no such file.
            return Ok(None);
        }
        let node = match self.state.nodes.at(directory.id, name) {
            Some(node) => Some(node),
            None if self.state.files.all().iter().any(|open| may_have_another_name(&open.node)) => {
                let existing = self.examine_name(directory, name, credential).await?;
                existing.and_then(|(handle, _)| self.state.nodes.find(&handle))
            }
            None => None,
        };
        let is_affected = |node: &Rc<NfsNode>| node.kind == FileType::File && node.is_in_use() && !node.is_silly();
        let Some(node) = node.filter(is_affected) else { return Ok(None) };
        // A file that has other names stays on the server without this one.
        let has_others = may_have_another_name(&node) && self.fetch_attributes(&node).await?.links > 1;
        Ok((!has_others).then_some(node))
    }

    /// Renames an open file to its silly name, instead of removing its name.
    pub(super) async fn rename_to_silly(
        &self,
        node: &Rc<NfsNode>,
        directory: &Rc<NfsNode>,
        name: &[u8],
        credential: &Credential,
        nfs_request: &NfsRequest,
    ) -> Result<(), Errno> {
        let silly = silly_name(node.fileid, nfs_request.unique);
        let handle = directory.handle();
        let rename =
            async |options: CallOptions<'_>| self.export.rename(options, (&handle, name), (&handle, &silly)).await;
        let once = nfs_request.once(&self.state.calls, SILLY_STEP, credential, rename).await?;
        let named = self.named(once, NfsStatus::NOENT, Some(node), (directory, &silly), credential).await;
        if let Some((from, _)) = named.map_err(|error| error.errno())? {
            self.changed(directory, &from);
        }
        self.record_silly(node, directory, nfs_request, credential)?;
        // Its last close may have come meanwhile.
        self.remove_if_unused(node).await;
        Ok(())
    }

    /// Gives an open file its silly name as a second name, before another file takes its first one. So the first name always
    /// exists.
    pub(super) async fn link_silly(
        &self,
        node: &Rc<NfsNode>,
        directory: &Rc<NfsNode>,
        credential: &Credential,
        nfs_request: &NfsRequest,
    ) -> Result<(), Errno> {
        let silly = silly_name(node.fileid, nfs_request.unique);
        let (file, handle) = (node.handle(), directory.handle());
        let link = async |options: CallOptions<'_>| self.export.link(options, &file, &handle, &silly).await;
        let once = nfs_request.once(&self.state.calls, SILLY_STEP, credential, link).await?;
        let named = self.named(once, NfsStatus::EXIST, Some(node), (directory, &silly), credential).await;
        if let Some(linked) = named.map_err(|error| error.errno())? {
            self.changed(directory, &linked.directory);
        }
        Ok(())
    }

    /// Records that the silly name of an open file is its only one now.
    pub(super) fn record_silly(
        &self,
        node: &Rc<NfsNode>,
        directory: &NfsNode,
        nfs_request: &NfsRequest,
        credential: &Credential,
    ) -> Result<(), Errno> {
        self.state.nodes.rename(node, directory.id, &silly_name(node.fileid, nfs_request.unique))?;
        node.set_silly(true);
        *node.remover.borrow_mut() = Some(credential.clone());
        node.freshness.borrow_mut().expire();
        // Its link count has changed.
        let _ = self.notifier.drop_attributes(node.id);
        Ok(())
    }

    /// Removes the second name of an open file that has kept its first one.
    pub(super) async fn remove_silly_link(
        &self,
        node: &NfsNode,
        directory: &NfsNode,
        credential: &Credential,
        nfs_request: &NfsRequest,
    ) {
        let silly = silly_name(node.fileid, nfs_request.unique);
        // If this fails, the file keeps one more name on the server.
        let _ = self.export.remove(CallOptions::new(credential), &directory.handle(), &silly).await;
    }

    /// Removes a file that is not open any more. No request waits for it.
    pub async fn remove_silly(self: Rc<Self>, node: Rc<NfsNode>) {
        self.remove_if_unused(&node).await;
    }

    /// Removes a file with a silly name that is not in use.
    pub(super) async fn remove_if_unused(&self, node: &Rc<NfsNode>) {
        if node.is_silly() && !node.is_in_use() {
            self.remove_silly_file(node).await;
        }
    }

    /// Removes the files with silly names in a directory that are not in use. Returns whether there were some.
    pub(super) async fn remove_unused_in(&self, directory: &NfsNode) -> bool {
        let is_there = |node: &Rc<NfsNode>| node.name().is_some_and(|name| name.parent == directory.id);
        let unused = |node: &Rc<NfsNode>| node.is_silly() && !node.is_in_use() && is_there(node);
        let all: Vec<_> = self.state.nodes.all().into_iter().filter(unused).collect();
        for node in &all {
            self.remove_silly_file(node).await;
        }
        !all.is_empty()
    }

    async fn remove_silly_file(&self, node: &Rc<NfsNode>) {
        self.settle(node).await;
        if let Some(name) = node.name()
            && let Ok(parent) = self.state.nodes.get(name.parent)
        {
            // Another task may be removing the file, too.
            let remover = node.remover.borrow().clone();
            if !self.remove_silly_name(&parent, &name.name, remover).await {
                return;
            }
        }
        self.state.nodes.unname(node);
        node.set_silly(false);
        self.state.nodes.drop_forgotten(|node| self.writeback().is_dirty(node));
    }

    /// Removes a silly name. Returns whether it is gone.
    async fn remove_silly_name(&self, parent: &Rc<NfsNode>, name: &[u8], remover: Option<Credential>) -> bool {
        // A successor does not know the credential of the removal. Most servers map root to an unprivileged user, so the
        // directory's owner is tried too.
        let owner = self.owner(parent).await;
        for credential in [remover, Some(Self::root_credential()), owner].into_iter().flatten() {
            let options = CallOptions::new(&credential);
            let remove = async |handle| self.export.remove(options, &handle, name).await;
            match self.with_handle(parent, &credential, remove).await {
                Ok(around) => {
                    self.changed(parent, &around);
                    return true;
                }
                Err(error) if matches!(error.status(), Some(NfsStatus::NOENT | NfsStatus::STALE)) => return true,
                Err(_) => {}
            }
        }
        false
    }

    async fn owner(&self, directory: &Rc<NfsNode>) -> Option<Credential> {
        let known = directory.freshness.borrow().attributes().copied();
        let found = match known {
            Some(found) => found,
            None => self.fetch_attributes(directory).await.ok()?,
        };
        Some(Credential::User { uid: found.uid, gid: found.gid, groups: Vec::new() })
    }

    /// Removes all files with silly names at the end of the volume. No file is open any more, even if the kernel has sent no
    /// RELEASE for it.
    pub async fn remove_all_silly(&self) {
        for node in self.state.nodes.all().into_iter().filter(|node| node.is_silly()) {
            self.remove_silly_file(&node).await;
        }
    }

    /// Whether a name in a directory is one that podfs gave.
    pub(super) fn is_silly_name(&self, directory: &NfsNode, name: &[u8]) -> bool {
        name.starts_with(PREFIX) && self.state.nodes.at(directory.id, name).is_some_and(|node| node.is_silly())
    }
}

const PREFIX: &[u8] = b".nfs";

/// Whether a file may be found under other names than the one that podfs remembers.
fn may_have_another_name(node: &NfsNode) -> bool {
    let is_one = |links: u32| links <= 1 && node.name().is_some();
    let links = node.freshness.borrow().attributes().map(|found| found.links);
    node.kind == FileType::File && !links.is_some_and(is_one)
}

/// The silly name of a file.
pub fn silly_name(fileid: u64, unique: u64) -> Vec<u8> {
    format!(".nfs{fileid:016x}{:08x}", unique as u32).into_bytes()
}
