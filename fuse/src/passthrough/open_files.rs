//! Open files and directories, by the number that the server gave to the kernel for each.
//!
//! Each has a cell, which is complete before the kernel gets the number. The cell names the request that opened the file. When a
//! server dies before it has answered, the kernel sends the request again, and the successor finds the open file by the cell.
//!
//! When the server's keeper is dead, too, no process has the descriptors any more. The server then reopens each open file by the
//! handle of its node when a request first uses it, so a source that hangs delays only the processes that use it. `reopening` does
//! the same for all open files in the background.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::hashing::HashKey;
use super::listing::SourceListing;
use super::node::Node;
use super::share::DescriptorPermit;
use super::state::{APPENDS, DIRECTORY, OpenCell, WITH_ATTRIBUTES, no_memory, opened_with, recordable, with_flags};
use crate::region::Region;
use crate::region::cells::OwnedCell;
use crate::session::{HandleId, NodeId};

/// The most open directories that keep entries read ahead, [`CHUNK`](super::listing) bytes each.
const READ_AHEAD: usize = 1024;

/// An open file of a caller.
#[derive(Debug)]
pub struct OpenFile {
    /// Dropped before the descriptor that it names is closed.
    record: OwnedCell<OpenCell>,
    /// The number that the kernel has for the open file.
    pub handle: HandleId,
    /// The node that is open.
    pub node: Arc<Node>,
    /// The descriptor, open with the caller's access mode. Empty until the file is reopened, if no process had it any more.
    file: OnceLock<Arc<OwnedFd>>,
    /// Whether the caller opened the file with `O_APPEND`.
    pub append: bool,
    /// Whether locks that were taken through it are lost: other processes may have locked the same ranges.
    locks_lost: AtomicBool,
    _taken: DescriptorPermit,
}

/// An open directory of a caller.
pub struct OpenDirectory {
    /// Dropped before the descriptor that it names is closed.
    record: OwnedCell<OpenCell>,
    /// The node that is open.
    pub node: Arc<Node>,
    /// The read position, with the entries read ahead. `None` until the directory is reopened, if no process had its descriptor.
    listing: Mutex<Option<SourceListing>>,
    /// Whether the server sends the entries with their attributes.
    pub with_attributes: bool,
    _taken: DescriptorPermit,
}

impl OpenFile {
    /// An open file that a dead server left; `file` is `None` if it must be reopened.
    pub fn inherit(
        record: OwnedCell<OpenCell>,
        node: Arc<Node>,
        file: Option<OwnedFd>,
        taken: DescriptorPermit,
    ) -> Self {
        Self::new(record, node, file.map(|file| OnceLock::from(Arc::new(file))).unwrap_or_default(), taken)
    }

    fn new(
        record: OwnedCell<OpenCell>,
        node: Arc<Node>,
        file: OnceLock<Arc<OwnedFd>>,
        taken: DescriptorPermit,
    ) -> Self {
        let (handle, flags) = (HandleId(record.handle.load(Relaxed)), record.flags.load(Relaxed));
        let (append, locks_lost) = (flags & APPENDS != 0, AtomicBool::new(false));
        Self { record, handle, node, file, append, locks_lost, _taken: taken }
    }

    /// The descriptor of the open file. Reopens the file if necessary.
    ///
    /// # Errors
    /// `ESTALE` when no process has one any more and the file is gone; those of `open(2)` when it cannot be reopened now.
    pub fn file(&self) -> Result<Arc<OwnedFd>, Errno> {
        if let Some(file) = self.file.get() {
            return Ok(Arc::clone(file));
        }
        let file = Arc::new(recordable(self.node.reopen(opened_with(&self.record))?));
        // If two threads reopen the file, the first one records its descriptor.
        if self.file.set(Arc::clone(&file)).is_ok() {
            self.record.descriptor.store(file.as_raw_fd().cast_unsigned(), Release);
        }
        Ok(file)
    }

    /// As [`Self::file`], for a request that may rely on a lock, such as a read or a write.
    ///
    /// # Errors
    /// `EIO` when a lock that was taken through it is lost, and those of [`Self::file`].
    pub fn data(&self) -> Result<Arc<OwnedFd>, Errno> {
        if self.locks_lost.load(Relaxed) { Err(Errno::IO) } else { self.file() }
    }

    /// The access that the caller opened it for: `O_RDONLY`, `O_WRONLY` or `O_RDWR`.
    pub fn access(&self) -> OFlags {
        opened_with(&self.record) & OFlags::RWMODE
    }

    /// Whether the file must be reopened: it has no descriptor.
    pub fn is_to_be_reopened(&self) -> bool {
        self.file.get().is_none()
    }

    /// Records that a lock that was taken through it is lost.
    pub fn lose_locks(&self) {
        self.locks_lost.store(true, Relaxed);
    }
}

impl OpenDirectory {
    /// An open directory that a dead server left; `directory` is `None` if it must be reopened.
    pub fn inherit(
        record: OwnedCell<OpenCell>,
        node: Arc<Node>,
        directory: Option<OwnedFd>,
        taken: DescriptorPermit,
    ) -> Self {
        let with_attributes = record.flags.load(Relaxed) & WITH_ATTRIBUTES != 0;
        let listing = Mutex::new(directory.map(SourceListing::new));
        Self { record, node, listing, with_attributes, _taken: taken }
    }

    /// Lets `act` use the listing, or its descriptor. Reopens the directory if necessary.
    ///
    /// # Errors
    /// `ESTALE` when no process has the directory open any more and it is gone; those of `act`.
    pub fn read<T>(&self, act: impl FnOnce(&mut SourceListing) -> Result<T, Errno>) -> Result<T, Errno> {
        let mut listing = self.listing.lock().expect("a thread that panics ends the process");
        let listing = match &mut *listing {
            Some(listing) => listing,
            empty => {
                let directory = recordable(self.node.reopen(OFlags::RDONLY | OFlags::DIRECTORY)?);
                self.record.descriptor.store(directory.as_raw_fd().cast_unsigned(), Release);
                empty.insert(SourceListing::new(directory))
            }
        };
        act(listing)
    }
}

/// The open files and directories of a volume.
pub struct OpenFiles {
    region: Arc<Region>,
    table: Mutex<OpenTable>,
    /// Maps a request to the handle that a dead server opened for it, if the kernel may not have got the answer.
    unanswered: HashMap<u64, HandleId>,
}

#[derive(Default)]
struct OpenTable {
    files: HashMap<HandleId, Arc<OpenFile>, HashKey>,
    directories: HashMap<HandleId, Arc<OpenDirectory>, HashKey>,
}

impl OpenFiles {
    /// A table without open files.
    pub fn new(region: Arc<Region>) -> Self {
        Self { region, table: Mutex::default(), unanswered: HashMap::new() }
    }

    /// Takes over the open files and directories of a dead server. `unanswered` maps a request to the handle that it opened, if
    /// the kernel may not have got the answer.
    pub fn inherit(
        region: Arc<Region>,
        files: HashMap<HandleId, Arc<OpenFile>, HashKey>,
        directories: HashMap<HandleId, Arc<OpenDirectory>, HashKey>,
        unanswered: HashMap<u64, HandleId>,
    ) -> Self {
        Self { region, table: Mutex::new(OpenTable { files, directories }), unanswered }
    }

    /// Adds an open file that the request `unique` opened with `flags`.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn add(
        &self,
        unique: u64,
        node: Arc<Node>,
        file: OwnedFd,
        flags: OFlags,
        taken: DescriptorPermit,
    ) -> Result<Arc<OpenFile>, Errno> {
        let file = recordable(file);
        let mut table = self.lock();
        let appends = if flags.contains(OFlags::APPEND) { APPENDS } else { 0 };
        let (handle, record) = self.record(unique, &node, file.as_raw_fd(), with_flags(flags) | appends)?;
        let open = Arc::new(OpenFile::new(record, node, OnceLock::from(Arc::new(file)), taken));
        table.files.insert(handle, Arc::clone(&open));
        Ok(open)
    }

    /// Adds an open directory that the request `unique` opened.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn add_directory(
        &self,
        unique: u64,
        node: Arc<Node>,
        listing: SourceListing,
        with_attributes: bool,
        taken: DescriptorPermit,
    ) -> Result<HandleId, Errno> {
        let mut table = self.lock();
        let flags = DIRECTORY | if with_attributes { WITH_ATTRIBUTES } else { 0 };
        let (handle, record) = self.record(unique, &node, listing.directory().as_raw_fd(), flags)?;
        let open = OpenDirectory { record, node, listing: Mutex::new(Some(listing)), with_attributes, _taken: taken };
        table.directories.insert(handle, Arc::new(open));
        Ok(handle)
    }

    /// The handle that a dead server opened for the request `unique`, if the kernel may not have got the answer.
    pub fn opened_for(&self, unique: u64) -> Option<HandleId> {
        self.unanswered.get(&unique).copied()
    }

    /// Whether a dead server opened the file, and the kernel may not have got the answer.
    pub fn is_unanswered(&self, handle: HandleId) -> bool {
        self.unanswered.values().any(|opened| *opened == handle)
    }

    /// Takes the next number and fills a cell for it. The caller holds the lock on the table.
    fn record(
        &self,
        unique: u64,
        node: &Node,
        descriptor: RawFd,
        flags: u32,
    ) -> Result<(HandleId, OwnedCell<OpenCell>), Errno> {
        let last = &self.region.header().counters.last_handle;
        let handle = HandleId(last.load(Relaxed).wrapping_add(1));
        last.store(handle.0, Release);
        let record = OwnedCell::new(&self.region, |cell: &OpenCell| {
            cell.flags.store(flags, Relaxed);
            cell.handle.store(handle.0, Relaxed);
            cell.node.store(node.id.0, Relaxed);
            cell.unique.store(unique, Relaxed);
            cell.descriptor.store(descriptor.cast_unsigned(), Relaxed);
        });
        Ok((handle, record.map_err(no_memory)?))
    }

    /// The open file of that number.
    ///
    /// # Errors
    /// `EBADF` when there is none.
    pub fn get(&self, handle: HandleId) -> Result<Arc<OpenFile>, Errno> {
        self.lock().files.get(&handle).cloned().ok_or(Errno::BADF)
    }

    /// The open directory of that number.
    ///
    /// # Errors
    /// `EBADF` when there is none.
    pub fn directory(&self, handle: HandleId) -> Result<Arc<OpenDirectory>, Errno> {
        self.lock().directories.get(&handle).cloned().ok_or(Errno::BADF)
    }

    /// The open files that must be reopened.
    pub fn to_be_reopened(&self) -> Vec<Arc<OpenFile>> {
        self.lock().files.values().filter(|open| open.is_to_be_reopened()).cloned().collect()
    }

    /// Whether a file is open that has no name.
    pub fn has_nameless(&self) -> bool {
        self.lock().files.values().any(|open| open.node.is_nameless())
    }

    /// Whether callers have too many directories open for all of them to keep entries read ahead.
    pub fn has_many_directories(&self) -> bool {
        self.lock().directories.len() > READ_AHEAD
    }

    /// Removes an open file from the table.
    pub fn remove(&self, handle: HandleId) -> Option<Arc<OpenFile>> {
        self.lock().files.remove(&handle)
    }

    /// The nodes of all open directories. A node comes once for each open of its directory.
    pub fn open_directories(&self) -> impl Iterator<Item = NodeId> {
        let nodes: Vec<_> = self.lock().directories.values().map(|open| open.node.id).collect();
        nodes.into_iter()
    }

    /// Removes an open directory from the table.
    pub fn remove_directory(&self, handle: HandleId) -> Option<Arc<OpenDirectory>> {
        self.lock().directories.remove(&handle)
    }

    fn lock(&self) -> MutexGuard<'_, OpenTable> {
        self.table.lock().expect("a thread that panics ends the process")
    }
}
