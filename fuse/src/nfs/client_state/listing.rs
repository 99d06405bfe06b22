//! Reading a directory: pages as the server gives them, at the places the server gives them.
//!
//! The kernel's offsets are the server's cookies, so `telldir(3)` and `seekdir(3)` mean what they mean there.

use podfs_nfs::v3::listing;

/// Where reading an open directory has got to.
#[derive(Debug, Default)]
pub struct NfsListing {
    /// The last page that was read, and the place at which it begins.
    pub page: Option<(u64, listing::DirectoryPage)>,
    /// Entries that were given out before the offset `at`.
    pub given: usize,
    /// Where the next entry is expected to be asked for.
    pub at: u64,
    /// Entries that are passed over: the server has forgotten the place, and reading began anew.
    pub skip: usize,
}

impl NfsListing {
    /// Whether the last page has entries behind `offset`, or ends the directory there.
    pub fn has(&self, offset: u64) -> bool {
        let Some((begin, page)) = &self.page else { return false };
        let is_last = page.entries().last().is_none_or(|last| last.cookie == offset);
        (*begin == offset || page.entries().any(|entry| entry.cookie == offset)) && (page.is_last || !is_last)
    }

    /// Begins anew.
    pub fn rewind(&mut self) {
        *self = Self::default();
    }
}
