//! Open files and directories, by the number the kernel has for each.
//!
//! A process reads and writes a file with the rights that it had at the open, as with Linux' own client: so each open file
//! remembers the credential of its open.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, Release};

use podfs_nfs::rpc::Credential;
use rustix::io::Errno;

use super::listing::NfsListing;
use super::node::NfsNode;
use super::state::{CLOSED, DIRECTORY, KNOWN, NfsOpenCell, no_memory};
use crate::region::Region;
use crate::region::cells::OwnedCell;
use crate::session::{HandleId, NodeId};

/// An open file or directory of a caller.
pub struct NfsOpenFile {
    /// Its cell; none after it has left the table, even if it is still referenced.
    record: RefCell<Option<OwnedCell<NfsOpenCell>>>,
    /// Its number.
    pub handle: HandleId,
    /// The node that is open.
    pub node: Rc<NfsNode>,
    /// The credential of its open.
    pub credential: Credential,
    /// The state of reading it, if it is a directory.
    pub listing: Option<RefCell<NfsListing>>,
}

impl NfsOpenFile {
    /// Records that the kernel has the answer to the OPEN, and will not send the OPEN to a successor.
    pub fn mark_known(&self) {
        self.mark(KNOWN);
    }

    /// The cookie verifier with which the client reads the directory further.
    pub fn verifier(&self) -> [u8; 8] {
        let word = self.record.borrow().as_ref().map_or(0, |record| record.verifier.load(Relaxed));
        word.to_ne_bytes()
    }

    /// Sets the cookie verifier.
    pub fn set_verifier(&self, verifier: [u8; 8]) {
        if let Some(record) = &*self.record.borrow() {
            record.verifier.store(u64::from_ne_bytes(verifier), Relaxed);
        }
    }

    /// An open file that a dead server left.
    pub fn inherit(record: OwnedCell<NfsOpenCell>, node: Rc<NfsNode>) -> Self {
        let is_directory = record.flags.load(Relaxed) & DIRECTORY != 0;
        let (handle, credential) = (HandleId(record.handle.load(Relaxed)), record.identity.get());
        Self::over(record, handle, node, credential, is_directory)
    }

    fn mark(&self, flag: u32) {
        if let Some(record) = &*self.record.borrow() {
            record.flags.fetch_or(flag, Release);
        }
    }

    fn is_closed(&self) -> bool {
        self.record.borrow().as_ref().is_none_or(|record| record.flags.load(Relaxed) & CLOSED != 0)
    }

    fn over(
        record: OwnedCell<NfsOpenCell>,
        handle: HandleId,
        node: Rc<NfsNode>,
        credential: Credential,
        is_directory: bool,
    ) -> Self {
        let listing = is_directory.then(RefCell::default);
        Self { record: RefCell::new(Some(record)), handle, node, credential, listing }
    }
}

/// All open files and directories.
pub struct NfsOpenFiles {
    region: Arc<Region>,
    table: RefCell<HashMap<HandleId, Rc<NfsOpenFile>>>,
    /// Closed files whose writes are not on the server's disk.
    closed: RefCell<HashMap<HandleId, Rc<NfsOpenFile>>>,
    /// Handles that dead servers opened, if the kernel may not have the answer; by the number of the request.
    unanswered: RefCell<HashMap<u64, HandleId>>,
}

impl NfsOpenFiles {
    /// The table, with the open files that a dead server left. `unanswered` has, by request, the handles that the kernel may not
    /// know.
    pub fn new(
        region: Arc<Region>,
        files: HashMap<HandleId, Rc<NfsOpenFile>>,
        unanswered: HashMap<u64, HandleId>,
    ) -> Self {
        let (closed, open): (HashMap<_, _>, HashMap<_, _>) = files.into_iter().partition(|(_, open)| open.is_closed());
        open.values().for_each(|open| open.node.opened());
        let (table, closed, unanswered) = (RefCell::new(open), RefCell::new(closed), RefCell::new(unanswered));
        Self { region, table, closed, unanswered }
    }

    /// Adds the file that the request `unique` opens. If a dead server opened the file for this request, that open file is
    /// returned.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn add(
        &self,
        unique: u64,
        node: &Rc<NfsNode>,
        credential: Credential,
        is_directory: bool,
    ) -> Result<Rc<NfsOpenFile>, Errno> {
        let earlier = self.unanswered.borrow_mut().remove(&unique);
        if let Some(open) = earlier.and_then(|handle| self.get(handle).ok()).filter(|open| open.node.id == node.id) {
            return Ok(open);
        }
        let last = &self.region.header().counters.last_handle;
        let handle = HandleId(last.load(Relaxed).wrapping_add(1));
        last.store(handle.0, Release);
        let flags = if is_directory { DIRECTORY } else { 0 };
        let record = OwnedCell::new(&self.region, |cell: &NfsOpenCell| {
            cell.flags.store(flags, Relaxed);
            cell.handle.store(handle.0, Relaxed);
            cell.node.store(node.id.0, Relaxed);
            cell.unique.store(unique, Relaxed);
            cell.verifier.store(0, Relaxed);
            cell.identity.set(&credential);
        });
        let record = record.map_err(no_memory)?;
        let open = Rc::new(NfsOpenFile::over(record, handle, Rc::clone(node), credential, is_directory));
        node.opened();
        self.table.borrow_mut().insert(handle, Rc::clone(&open));
        Ok(open)
    }

    /// The open file of that number.
    ///
    /// # Errors
    /// `EBADF` when there is none.
    pub fn get(&self, handle: HandleId) -> Result<Rc<NfsOpenFile>, Errno> {
        self.table.borrow().get(&handle).cloned().ok_or(Errno::BADF)
    }

    /// As [`get`](Self::get). It also finds a closed file as long as there is data to write through it.
    pub fn find(&self, handle: HandleId) -> Option<Rc<NfsOpenFile>> {
        let closed = || self.closed.borrow().get(&handle).cloned();
        self.table.borrow().get(&handle).cloned().or_else(closed)
    }

    /// Removes an open file. With `keep`, it stays among the closed files, because data is still to be written through it.
    pub fn remove(&self, handle: HandleId, keep: bool) -> Option<Rc<NfsOpenFile>> {
        let open = self.table.borrow_mut().remove(&handle)?;
        open.node.closed();
        if keep {
            open.mark(CLOSED);
            self.closed.borrow_mut().insert(handle, Rc::clone(&open));
        } else {
            drop(open.record.take());
        }
        Some(open)
    }

    /// Drops closed files, except those for which `has_data` holds: through the others, no data is to be written any more.
    pub fn drop_closed(&self, has_data: impl Fn(NodeId) -> bool) {
        let gone: Vec<_> = self.closed.borrow_mut().extract_if(|_, open| !has_data(open.node.id)).collect();
        drop(gone);
    }

    /// All open files and directories.
    pub fn all(&self) -> Vec<Rc<NfsOpenFile>> {
        self.table.borrow().values().cloned().collect()
    }
}
