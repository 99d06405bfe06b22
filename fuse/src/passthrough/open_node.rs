//! What the open files of one node share: the way their data goes, and the locks taken through them.
//!
//! The kernel's rules (Linux 6.9 and newer): while a file is open, its data goes one way for all who have it open, and
//! a backing file has one id. Another id, even of the same file, makes the open fail with `EIO`. So the first open
//! registers the id, and the last release gives it back. Both happen under the lock of the node:
//!
//! 1. An open counts itself before it is answered, so no release that is handled later can be the last one.
//! 2. The kernel has given up the backing file of an open file before it sends RELEASE. So when the last release is
//!    counted, no open file uses the id, and an open that comes next may bring another one.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;

use super::handle::last_errno;
use super::locks::Locks;
use super::open_files::OpenFile;
use crate::session::abi::BackingMap;

/// Shared by the open files of a node.
#[derive(Debug)]
pub struct OpenNode {
    /// The open files; never none. Any of them leads to the file, even when it has no name any more.
    pub files: Vec<Arc<OpenFile>>,
    /// The file has no name any more: what it takes is free when the last of them is closed.
    pub nameless: bool,
    /// Its backing file, if its data goes through the kernel.
    pub backing: Option<BackingId>,
    /// The locks taken through its open files.
    pub locks: Locks,
}

impl OpenNode {
    /// A descriptor of the file.
    pub fn file(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.files.first().expect("the last open file takes this with it").file)
    }
}

/// A backing file of a connection, given back when dropped. Whatever is open through it goes on.
#[derive(Debug)]
pub struct BackingId {
    device: Arc<OwnedFd>,
    id: i32,
}

impl BackingId {
    /// Lets the kernel read and write `file` by itself, with the credentials of the calling thread.
    ///
    /// # Errors
    /// `EPERM` without `CAP_SYS_ADMIN` or on a kernel before 6.9, `ELOOP` where file systems are stacked too deep, and
    /// others where the file cannot back one.
    pub fn open(device: &Arc<OwnedFd>, file: BorrowedFd<'_>) -> Result<BackingId, Errno> {
        let map = BackingMap { fd: file.as_raw_fd(), flags: 0, padding: 0 };
        // SAFETY: the request takes a `fuse_backing_map`, which outlives the call.
        let id = unsafe { libc::ioctl(device.as_raw_fd(), BACKING_OPEN, &raw const map) };
        if id <= 0 { Err(last_errno()) } else { Ok(BackingId { device: Arc::clone(device), id }) }
    }

    /// The id, for answers.
    pub fn number(&self) -> i32 {
        self.id
    }
}

impl Drop for BackingId {
    fn drop(&mut self) {
        let id = self.id.cast_unsigned();
        // SAFETY: the request takes the address of an id.
        unsafe { libc::ioctl(self.device.as_fd().as_raw_fd(), BACKING_CLOSE, &raw const id) };
    }
}

/// `_IOW(229, 1, struct fuse_backing_map)`
const BACKING_OPEN: libc::Ioctl = write_request(1, size_of::<BackingMap>());
/// `_IOW(229, 2, uint32_t)`
const BACKING_CLOSE: libc::Ioctl = write_request(2, size_of::<u32>());

const fn write_request(number: u64, size: usize) -> libc::Ioctl {
    const WRITE: u64 = 1;
    const FUSE: u64 = 229;
    ((WRITE << 30) | ((size as u64) << 16) | (FUSE << 8) | number) as libc::Ioctl
}
