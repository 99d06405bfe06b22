//! Open files and directories, by the number the kernel has for each.
//!
//! Each has a cell, which is there before the kernel is told the number and names the request that opened it. When a
//! server dies before it has answered, the request comes again, and finds what was opened.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::io::Errno;

use super::listing::Listing;
use super::node::Node;
use super::share::Taken;
use super::state::{APPENDS, DIRECTORY, OpenCell, WITH_ATTRIBUTES, no_memory, recordable};
use crate::region::Region;
use crate::region::cells::Record;

/// So many open directories keep what they have read and not given out, [`CHUNK`](super::listing) bytes each.
const READ_AHEAD: usize = 1024;

/// An open file of a caller.
#[derive(Debug)]
pub struct OpenFile {
    /// Dropped before the descriptor that it names is closed.
    _record: Record<OpenCell>,
    /// Its number.
    pub handle: u64,
    /// What it is open on.
    pub node: Arc<Node>,
    /// Open with the caller's access mode.
    pub file: Arc<OwnedFd>,
    /// Whether it was opened with `O_APPEND`.
    pub append: bool,
    _taken: Taken,
}

/// An open directory of a caller.
pub struct OpenDirectory {
    /// Dropped before the descriptor that it names is closed.
    _record: Record<OpenCell>,
    /// What it is open on.
    pub node: Arc<Node>,
    /// Where reading it has got to.
    pub listing: Mutex<Listing>,
    /// Its entries come with their attributes.
    pub with_attributes: bool,
    _taken: Taken,
}

impl OpenFile {
    /// One that a dead server left.
    pub fn inherit(record: Record<OpenCell>, node: Arc<Node>, file: OwnedFd, taken: Taken) -> Self {
        let append = record.flags.load(Relaxed) & APPENDS != 0;
        Self { handle: record.handle.load(Relaxed), _record: record, node, file: Arc::new(file), append, _taken: taken }
    }
}

impl OpenDirectory {
    /// One that a dead server left.
    pub fn inherit(record: Record<OpenCell>, node: Arc<Node>, directory: OwnedFd, taken: Taken) -> Self {
        let with_attributes = record.flags.load(Relaxed) & WITH_ATTRIBUTES != 0;
        let listing = Mutex::new(Listing::resume(directory));
        Self { _record: record, node, listing, with_attributes, _taken: taken }
    }
}

/// All of them.
pub struct OpenFiles {
    region: Arc<Region>,
    table: Mutex<Table>,
    /// What dead servers opened without a known answer, by the request.
    unanswered: HashMap<u64, u64>,
}

#[derive(Default)]
struct Table {
    files: HashMap<u64, Arc<OpenFile>>,
    directories: HashMap<u64, Arc<OpenDirectory>>,
}

impl OpenFiles {
    /// None yet.
    pub fn new(region: Arc<Region>) -> Self {
        Self { region, table: Mutex::default(), unanswered: HashMap::new() }
    }

    /// Those that a dead server left; `unanswered` has, by request, what was opened without a known answer.
    pub fn inherit(
        region: Arc<Region>,
        files: HashMap<u64, Arc<OpenFile>>,
        directories: HashMap<u64, Arc<OpenDirectory>>,
        unanswered: HashMap<u64, u64>,
    ) -> Self {
        Self { region, table: Mutex::new(Table { files, directories }), unanswered }
    }

    /// Takes in an open file that the request `unique` opened.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn add(
        &self,
        unique: u64,
        node: Arc<Node>,
        file: OwnedFd,
        append: bool,
        taken: Taken,
    ) -> Result<Arc<OpenFile>, Errno> {
        let file = recordable(file);
        let mut table = self.lock();
        let flags = if append { APPENDS } else { 0 };
        let (handle, record) = self.record(unique, &node, file.as_raw_fd(), flags)?;
        let open = Arc::new(OpenFile { _record: record, handle, node, file: Arc::new(file), append, _taken: taken });
        table.files.insert(handle, Arc::clone(&open));
        Ok(open)
    }

    /// Takes in an open directory that the request `unique` opened.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn add_directory(
        &self,
        unique: u64,
        node: Arc<Node>,
        listing: Listing,
        with_attributes: bool,
        taken: Taken,
    ) -> Result<u64, Errno> {
        let mut table = self.lock();
        let flags = DIRECTORY | if with_attributes { WITH_ATTRIBUTES } else { 0 };
        let (handle, record) = self.record(unique, &node, listing.directory().as_raw_fd(), flags)?;
        let open =
            OpenDirectory { _record: record, node, listing: Mutex::new(listing), with_attributes, _taken: taken };
        table.directories.insert(handle, Arc::new(open));
        Ok(handle)
    }

    /// The number of what a dead server opened for the request `unique`, if it did and was not heard.
    pub fn opened_for(&self, unique: u64) -> Option<u64> {
        self.unanswered.get(&unique).copied()
    }

    /// The next number and a cell for it. The table is locked.
    fn record(
        &self,
        unique: u64,
        node: &Node,
        descriptor: RawFd,
        flags: u32,
    ) -> Result<(u64, Record<OpenCell>), Errno> {
        let last = &self.region.header().counters.last_handle;
        let handle = last.load(Relaxed).wrapping_add(1);
        last.store(handle, Release);
        let record = Record::new(&self.region, |cell: &OpenCell| {
            cell.flags.store(flags, Relaxed);
            cell.handle.store(handle, Relaxed);
            cell.node.store(node.id, Relaxed);
            cell.unique.store(unique, Relaxed);
            cell.descriptor.store(descriptor.cast_unsigned(), Relaxed);
        });
        Ok((handle, record.map_err(no_memory)?))
    }

    /// The open file of that number.
    ///
    /// # Errors
    /// `EBADF` when there is none.
    pub fn get(&self, handle: u64) -> Result<Arc<OpenFile>, Errno> {
        self.lock().files.get(&handle).cloned().ok_or(Errno::BADF)
    }

    /// The open directory of that number.
    ///
    /// # Errors
    /// `EBADF` when there is none.
    pub fn directory(&self, handle: u64) -> Result<Arc<OpenDirectory>, Errno> {
        self.lock().directories.get(&handle).cloned().ok_or(Errno::BADF)
    }

    /// Whether so many directories are open that not all of them can keep what they have read.
    pub fn has_many_directories(&self) -> bool {
        self.lock().directories.len() > READ_AHEAD
    }

    /// Takes out an open file.
    pub fn remove(&self, handle: u64) -> Option<Arc<OpenFile>> {
        self.lock().files.remove(&handle)
    }

    /// Takes out an open directory.
    pub fn remove_directory(&self, handle: u64) {
        self.lock().directories.remove(&handle);
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().expect("a thread that panics ends the process")
    }
}
