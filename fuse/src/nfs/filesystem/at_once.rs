//! Requests of one file that run at once, and changes that outlive their request.
//!
//! The kernel locks a directory while it removes or renames an entry, and a file while it sets attributes. It takes no lock for
//! OPEN and RELEASE: these come while podfs waits for the NFS server's answer to any other request. So:
//!
//! 1. A task that removes the last name of a file decides by [`is_in_use`](NfsNode::is_in_use), which counts OPENs from their
//!    beginning ([`OpenInProgress`]).
//! 2. From this decision until the NFS server's answer, the file is among the [`Removals`], without an `await` in between. An OPEN
//!    that comes now waits for the answer. If the file is gone then, the OPEN fails with `ESTALE`, and the kernel looks the name up
//!    again.
//! 3. A RELEASE does not wait. The request that has given a file a silly name checks again whether the file is in use.
//!
//! A request ends early if its process is killed, or the volume ends. A change of several calls, of which podfs has to know all,
//! runs as a task of its own ([`NfsFilesystem::make_to_the_end`]), and the end of the volume waits for it.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::Future;
use std::rc::Rc;

use rustix::io::Errno;
use tokio::sync::Notify;
use tokio::task::spawn_local;

use super::NfsFilesystem;
use crate::nfs::client_state::node::NfsNode;
use crate::session::NodeId;

/// The files whose names are being removed, with the number of requests for each.
#[derive(Default)]
pub struct Removals {
    files: RefCell<HashMap<NodeId, usize>>,
    ended: Notify,
}

/// The removal of a name. Dropping it ends it.
pub struct NameRemoval<'a> {
    removals: &'a Removals,
    file: NodeId,
}

impl Removals {
    fn begin(&self, file: NodeId) -> NameRemoval<'_> {
        *self.files.borrow_mut().entry(file).or_default() += 1;
        NameRemoval { removals: self, file }
    }

    /// Waits until no name of the file is being removed.
    async fn wait(&self, file: NodeId) {
        loop {
            let ended = self.ended.notified();
            if !self.files.borrow().contains_key(&file) {
                return;
            }
            ended.await;
        }
    }
}

impl Drop for NameRemoval<'_> {
    fn drop(&mut self) {
        let mut files = self.removals.files.borrow_mut();
        let Some(count) = files.get_mut(&self.file) else { return };
        *count -= 1;
        if *count == 0 {
            files.remove(&self.file);
            self.removals.ended.notify_waiters();
        }
    }
}

/// An OPEN that is not answered yet. Dropping it ends it.
pub struct OpenInProgress {
    filesystem: Rc<NfsFilesystem>,
    node: Rc<NfsNode>,
}

impl Drop for OpenInProgress {
    fn drop(&mut self) {
        self.node.open_ends();
        if self.node.is_silly() && !self.node.is_in_use() {
            // The OPEN has failed, and the file was removed and closed meanwhile.
            spawn_local(Rc::clone(&self.filesystem).remove_silly(Rc::clone(&self.node)));
        }
    }
}

/// The number of changes that podfs makes to their end.
#[derive(Default)]
pub struct ChangesUnderWay {
    count: Cell<usize>,
    ended: Notify,
}

/// Such a change. Dropping it ends it.
struct ChangeUnderWay(Rc<NfsFilesystem>);

impl Drop for ChangeUnderWay {
    fn drop(&mut self) {
        let changes = &self.0.changes;
        changes.count.set(changes.count.get() - 1);
        changes.ended.notify_waiters();
    }
}

impl NfsFilesystem {
    /// Begins an OPEN, after the removal of a name of the file that is under way.
    pub(super) async fn begin_open(self: &Rc<Self>, node: &Rc<NfsNode>) -> OpenInProgress {
        self.removals.wait(node.id).await;
        node.open_begins();
        OpenInProgress { filesystem: Rc::clone(self), node: Rc::clone(node) }
    }

    /// Begins the removal of a name. OPENs of its file wait until it ends.
    pub(super) fn begin_removal(&self, directory: &NfsNode, name: &[u8]) -> Option<NameRemoval<'_>> {
        self.state.nodes.at(directory.id, name).map(|node| self.removals.begin(node.id))
    }

    /// Makes a change to its end, even if the request that waits for it is dropped.
    pub(super) async fn make_to_the_end<T: 'static>(
        self: &Rc<Self>,
        change: impl Future<Output = Result<T, Errno>> + 'static,
    ) -> Result<T, Errno> {
        self.changes.count.set(self.changes.count.get() + 1);
        let under_way = ChangeUnderWay(Rc::clone(self));
        let task = spawn_local(async move {
            let _under_way = under_way;
            change.await
        });
        // The task fails only if it panics.
        task.await.unwrap_or(Err(Errno::IO))
    }

    /// Waits for the changes that podfs makes to their end.
    pub async fn finish_changes(&self) {
        loop {
            let ended = self.changes.ended.notified();
            if self.changes.count.get() == 0 {
                return;
            }
            ended.await;
        }
    }
}
