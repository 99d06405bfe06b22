//! Open files and directories, by the number the kernel has for each.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::io::Errno;

use super::listing::Listing;
use super::node::Node;

/// An open file of a caller.
#[derive(Debug)]
pub struct OpenFile {
    /// Its number.
    pub handle: u64,
    /// What it is open on.
    pub node: Arc<Node>,
    /// Open with the caller's access mode.
    pub file: Arc<OwnedFd>,
    /// Whether it was opened with `O_APPEND`.
    pub append: bool,
}

/// An open directory of a caller.
pub struct OpenDirectory {
    /// What it is open on.
    pub node: Arc<Node>,
    /// Where reading it has got to.
    pub listing: Mutex<Listing>,
    /// Its entries come with their attributes.
    pub with_attributes: bool,
}

/// All of them.
#[derive(Default)]
pub struct OpenFiles {
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    files: HashMap<u64, Arc<OpenFile>>,
    directories: HashMap<u64, Arc<OpenDirectory>>,
    last: u64,
}

impl OpenFiles {
    /// Takes in an open file.
    pub fn add(&self, node: Arc<Node>, file: OwnedFd, append: bool) -> Arc<OpenFile> {
        let mut table = self.lock();
        let handle = table.next();
        let open = Arc::new(OpenFile { handle, node, file: Arc::new(file), append });
        table.files.insert(handle, Arc::clone(&open));
        open
    }

    /// Takes in an open directory.
    pub fn add_directory(&self, node: Arc<Node>, listing: Listing, with_attributes: bool) -> u64 {
        let mut table = self.lock();
        let handle = table.next();
        table
            .directories
            .insert(handle, Arc::new(OpenDirectory { node, listing: Mutex::new(listing), with_attributes }));
        handle
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

impl Table {
    fn next(&mut self) -> u64 {
        self.last += 1;
        self.last
    }
}
