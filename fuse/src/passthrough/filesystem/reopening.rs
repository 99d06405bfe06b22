//! Reopening files that no process has open any more, because the server and its keeper were killed together.
//!
//! The server reopens each open file when a request first uses it. A thread reopens all of them in the background, because a file
//! that is removed from the source before that could not be found again. Before the server removes a file, it reopens that file. It
//! takes locks again before another request can lock the file.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;

use rustix::fs::{Mode, OFlags, openat};
use rustix::io::Errno;

use super::super::locks::for_locking;
use super::super::node::Node;
use super::super::open_files::OpenFile;
use super::super::open_node::OpenNode;
use super::PassthroughFilesystem;

impl PassthroughFilesystem {
    /// Starts the thread that reopens all open files, if some must be reopened.
    pub fn start_reopening(self: &Arc<Self>) {
        if self.is_reopening.load(Ordering::Relaxed) {
            let filesystem = Arc::clone(self);
            // Without the thread, each open file is reopened when a request uses it.
            let _started = thread::Builder::new().name("reopen".to_owned()).spawn(move || filesystem.reopen_all());
        }
    }

    fn reopen_all(&self) {
        let files = self.files.to_be_reopened();
        let mut nodes = HashSet::new();
        for open in &files {
            if nodes.insert(open.node.id) {
                self.restore_locks_of(open);
            }
        }
        let gone = files.iter().filter(|open| open.file().is_err_and(|errno| errno == Errno::STALE));
        let gone = gone.map(|open| self.discharge_gone(&open.node)).count();
        self.is_reopening.store(false, Ordering::Relaxed);
        if gone > 0 {
            let volume = self.options.name.as_str();
            tracing::warn!(
                volume,
                "volume {volume:?}: {gone} open files without a name went with the server and its keeper; calls with them \
                 fail with ESTALE"
            );
        }
    }

    /// As [`Self::restore_locks`]. Opens the descriptions without the lock on the node's open files, for which requests may wait.
    fn restore_locks_of(&self, open: &OpenFile) {
        let owners = open.node.open().as_ref().map_or(0, |shared| shared.locks.missing_descriptions());
        let descriptions = (0..owners).map(|_| for_locking(&*open.file()?));
        let mut descriptions: Vec<_> = descriptions.collect();
        if let Some(shared) = &mut *open.node.open() {
            // More descriptions may be needed by now: then another request opens them.
            self.warn_of_lost_locks(shared.restore_locks(|| descriptions.pop().unwrap_or(Err(Errno::NFILE))));
        }
    }

    /// Takes the locks again that were on descriptions which no process has any more.
    pub(super) fn restore_locks(&self, shared: &mut OpenNode) {
        if shared.locks.missing_descriptions() > 0 {
            let file = shared.file();
            self.warn_of_lost_locks(shared.restore_locks(|| for_locking(&*file.clone()?)));
        }
    }

    fn warn_of_lost_locks(&self, lost: usize) {
        if lost > 0 {
            let volume = self.options.name.as_str();
            tracing::warn!(
                volume,
                "volume {volume:?}: {lost} open files lost their locks with the server and its keeper: other processes \
                 locked the same meanwhile, or the files have no name any more; calls with them fail with EIO until they \
                 are closed"
            );
        }
    }

    /// Removes the charge of a file that is gone. A file that has a name keeps its charge.
    fn discharge_gone(&self, node: &Node) {
        if let (true, Some(usage)) = (node.is_nameless(), &self.usage) {
            usage.lock().discharge(node);
        }
    }

    /// Reopens what `name` leads to before the name goes.
    pub(super) fn reopen_before_removal(&self, directory: &OwnedFd, parent: &Node, name: &OsStr) {
        if !self.is_reopening.load(Ordering::Relaxed) {
            return;
        }
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let Ok(file) = openat(directory, name, flags, Mode::empty()) else { return };
        let Ok((identity, _)) = self.mounts.identify(file.as_fd(), Some(parent)) else { return };
        let Some(node) = self.nodes.find(&identity) else { return };
        if let Some(shared) = &*node.open() {
            // An error is no loss here: the next call on the open file would get the same error.
            shared.files.iter().for_each(|open| drop(open.file()));
        }
    }
}
