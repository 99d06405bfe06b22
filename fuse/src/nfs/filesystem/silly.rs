//! Files that are removed while they are open.
//!
//! The server does not know what is open here, and would remove a file that is in use. So podfs renames the file until its last
//! close: `.nfs`, the file's number, the number of the request. Listings here leave it out; other clients see it, and so does
//! `rmdir(2)`. The name follows from the request, so that a successor that gets the same request again knows it.

use std::rc::Rc;

use podfs_nfs::export::CallOptions;
use podfs_nfs::rpc::Credential;
use podfs_nfs::v3::{FileType, NfsStatus};
use rustix::io::Errno;

use super::NfsFilesystem;
use super::turn::NfsRequest;
use crate::nfs::client_state::node::NfsNode;

/// Steps of a request: the other name, and what follows.
pub const ASIDE: u32 = 0;
/// The call that the request is about.
pub const ITSELF: u32 = 1;

impl NfsFilesystem {
    /// The open file that would lose its last name, or has lost it for this very request.
    pub(super) async fn in_the_way(
        &self,
        directory: &NfsNode,
        name: &[u8],
        credential: &Credential,
        turn: &NfsRequest,
    ) -> Result<Option<Rc<NfsNode>>, Errno> {
        if turn.resent && self.known.calls.was_begun(turn.unique, ASIDE) {
            let is_it = |node: &Rc<NfsNode>| {
                node.name().is_some_and(|known| {
                    known.is(directory.id, name) || *known.name == *silly_name(node.fileid, turn.unique)
                })
            };
            return Ok(self.known.files.all().into_iter().map(|open| Rc::clone(&open.node)).find(is_it));
        }
        if turn.resent && self.known.calls.was_begun(turn.unique, ITSELF) {
            // A dead server has decided that nothing is.
            return Ok(None);
        }
        let node = match self.known.nodes.at(directory.id, name) {
            Some(node) => Some(node),
            None if self.known.files.all().iter().any(|open| may_have_another_name(&open.node)) => {
                let there = self.glance(directory, name, credential).await?;
                there.and_then(|(handle, _)| self.known.nodes.find(&handle))
            }
            None => None,
        };
        let is_in_the_way = |node: &Rc<NfsNode>| node.kind == FileType::File && node.is_open() && !node.is_silly();
        let Some(node) = node.filter(is_in_the_way) else { return Ok(None) };
        // A file that has other names stays on the server without this one.
        let has_others = may_have_another_name(&node) && self.ask(&node).await?.links > 1;
        Ok((!has_others).then_some(node))
    }

    /// Renames an open file, instead of removing its name.
    pub(super) async fn put_aside(
        &self,
        node: &Rc<NfsNode>,
        directory: &Rc<NfsNode>,
        name: &[u8],
        credential: &Credential,
        turn: &NfsRequest,
    ) -> Result<(), Errno> {
        let aside = silly_name(node.fileid, turn.unique);
        let handle = directory.handle();
        let rename = async |how: CallOptions<'_>| self.export.rename(how, (&handle, name), (&handle, &aside)).await;
        let once = turn.once(&self.known.calls, ASIDE, credential, rename).await?;
        let named = self.named(once, NfsStatus::NOENT, Some(node), (directory, &aside), credential).await;
        if let Some((from, _)) = named.map_err(|error| error.errno())? {
            self.changed(directory, &from);
        }
        self.is_aside(node, directory, turn, credential)
    }

    /// Gives an open file a second name, before its first one is taken by another file: so the name is never missing.
    pub(super) async fn keep_aside(
        &self,
        node: &Rc<NfsNode>,
        directory: &Rc<NfsNode>,
        credential: &Credential,
        turn: &NfsRequest,
    ) -> Result<(), Errno> {
        let aside = silly_name(node.fileid, turn.unique);
        let (file, handle) = (node.handle(), directory.handle());
        let link = async |how: CallOptions<'_>| self.export.link(how, &file, &handle, &aside).await;
        let once = turn.once(&self.known.calls, ASIDE, credential, link).await?;
        let named = self.named(once, NfsStatus::EXIST, Some(node), (directory, &aside), credential).await;
        if let Some(linked) = named.map_err(|error| error.errno())? {
            self.changed(directory, &linked.directory);
        }
        Ok(())
    }

    /// The second name of an open file is its only one now.
    pub(super) fn is_aside(
        &self,
        node: &Rc<NfsNode>,
        directory: &NfsNode,
        turn: &NfsRequest,
        credential: &Credential,
    ) -> Result<(), Errno> {
        self.known.nodes.rename(node, directory.id, &silly_name(node.fileid, turn.unique))?;
        node.set_silly(true);
        *node.remover.borrow_mut() = Some(credential.clone());
        node.freshness.borrow_mut().expire();
        // The number of its names is another one.
        let _ = self.notifier.drop_attributes(node.id);
        Ok(())
    }

    /// Removes the needless second name of an open file.
    pub(super) async fn not_aside(
        &self,
        node: &NfsNode,
        directory: &NfsNode,
        credential: &Credential,
        turn: &NfsRequest,
    ) {
        let aside = silly_name(node.fileid, turn.unique);
        // If this fails, the file keeps one more name on the server.
        let _ = self.export.remove(CallOptions::new(credential), &directory.handle(), &aside).await;
    }

    /// Removes a file that is not open any more. No request waits for it.
    pub async fn remove_silly(self: Rc<Self>, node: Rc<NfsNode>) {
        if node.is_silly() && !node.is_open() {
            self.remove_aside(&node).await;
        }
    }

    async fn remove_aside(&self, node: &Rc<NfsNode>) {
        self.settle(node).await;
        let Some(name) = node.name() else { return };
        let Ok(parent) = self.known.nodes.get(name.parent) else { return };
        let remover = node.remover.take();
        // A successor does not know the credential of the removal. Most servers map root to an unprivileged user, so the
        // directory's owner is tried too.
        let owner = self.owner(&parent).await;
        for credential in [remover, Some(Self::root_credential()), owner].into_iter().flatten() {
            let how = CallOptions::new(&credential);
            let remove = async |handle| self.export.remove(how, &handle, &name.name).await;
            match self.on(&parent, &credential, remove).await {
                Ok(around) => {
                    self.changed(&parent, &around);
                    break;
                }
                Err(error) if error.status() == Some(NfsStatus::NOENT) => break,
                Err(_) => {}
            }
        }
        self.known.nodes.unname(node);
        node.set_silly(false);
    }

    async fn owner(&self, directory: &Rc<NfsNode>) -> Option<Credential> {
        let known = directory.freshness.borrow().attributes().copied();
        let found = match known {
            Some(found) => found,
            None => self.ask(directory).await.ok()?,
        };
        Some(Credential::User { uid: found.uid, gid: found.gid, groups: Vec::new() })
    }

    /// Removes all of them: the volume ends, so no file is open any more, even if the kernel has sent no RELEASE for it.
    pub async fn remove_all_silly(&self) {
        for node in self.known.nodes.all().into_iter().filter(|node| node.is_silly()) {
            self.remove_aside(&node).await;
        }
    }

    /// Whether a name in a directory is one that podfs gave.
    pub(super) fn is_silly_name(&self, directory: &NfsNode, name: &[u8]) -> bool {
        name.starts_with(PREFIX) && self.known.nodes.at(directory.id, name).is_some_and(|node| node.is_silly())
    }
}

const PREFIX: &[u8] = b".nfs";

/// Whether a file may be found under other names than the one that podfs remembers.
fn may_have_another_name(node: &NfsNode) -> bool {
    let is_one = |links: u32| links <= 1 && node.name().is_some();
    let links = node.freshness.borrow().attributes().map(|found| found.links);
    node.kind == FileType::File && !links.is_some_and(is_one)
}

/// The other name of a file.
pub fn silly_name(fileid: u64, unique: u64) -> Vec<u8> {
    format!(".nfs{fileid:016x}{:08x}", unique as u32).into_bytes()
}
