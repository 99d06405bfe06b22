//! The state of reading a directory, page by page.
//!
//! The kernel's offsets are the NFS server's cookies, so `telldir(3)` and `seekdir(3)` work as on the NFS server.

use podfs_nfs::v3::listing;

/// The state of reading an open directory.
#[derive(Debug, Default)]
pub struct NfsListing {
    /// The last page that was read, and the offset after which it begins.
    pub page: Option<(u64, listing::DirectoryPage)>,
    /// The number of entries that the kernel got before the offset `at`.
    pub given: usize,
    /// The offset behind the last entry that the kernel got. The next READDIR is expected to begin here.
    pub at: u64,
    /// The number of entries before the place where podfs began to read from the start the last time.
    pub restarted_after: usize,
    /// The number of entries to pass over, after the server refused the cookie and podfs began to read from the start.
    pub skip: usize,
}

impl NfsListing {
    /// Whether the last page has entries behind `offset`, or ends the directory there.
    pub fn has(&self, offset: u64) -> bool {
        let Some((begin, page)) = &self.page else { return false };
        let is_last = page.entries().last().is_none_or(|last| last.cookie == offset);
        (*begin == offset || page.entries().any(|entry| entry.cookie == offset)) && (page.is_last || !is_last)
    }

    /// Begins the listing again.
    pub fn rewind(&mut self) {
        *self = Self::default();
    }
}
