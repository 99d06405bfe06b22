//! Listings of directories that the kernel opens without OPENDIR, with their read positions.
//!
//! The kernel sends READDIR without a handle then, and no request when a caller closes the directory. The next READDIR mostly
//! continues where the last one of that directory has stopped. Otherwise the server opens the directory again and seeks.

use std::num::NonZeroUsize;
use std::sync::{Mutex, MutexGuard};

use lru::LruCache;

use super::hashing::HashKey;
use super::listing::SourceListing;
use crate::session::NodeId;

/// Most directories that stay open, each with the entries read ahead: 32 KiB.
const MOST: NonZeroUsize = NonZeroUsize::new(16).expect("it is not zero");

/// A listing that the next READDIR continues.
pub struct UnopenedListing {
    /// The directory, and the entries read ahead.
    pub listing: SourceListing,
    /// Whether the server sends the entries with their attributes.
    pub with_attributes: bool,
}

/// The last listings, at most one of each directory.
pub struct UnopenedListings(Mutex<LruCache<NodeId, UnopenedListing, HashKey>>);

impl Default for UnopenedListings {
    fn default() -> Self {
        Self(Mutex::new(LruCache::with_hasher(MOST, HashKey::default())))
    }
}

impl UnopenedListings {
    /// Keeps a listing until the next READDIR of the directory.
    pub fn keep(&self, directory: NodeId, listing: UnopenedListing) {
        // The replaced listing is closed after the lock on the listings is released.
        let _before = self.lock().push(directory, listing);
    }

    /// Removes and returns the listing of a directory.
    pub fn take(&self, directory: NodeId) -> Option<UnopenedListing> {
        self.lock().pop(&directory)
    }

    fn lock(&self) -> MutexGuard<'_, LruCache<NodeId, UnopenedListing, HashKey>> {
        self.0.lock().expect("a thread that panics ends the process")
    }
}
