//! Requests that the server answers later: they wait for a lock, for an NFS server, or for the requests before them. Before Linux
//! 6.9, the kernel cannot send a request again. There, a successor ends these requests, so that no caller waits for ever.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::shared::shared;

/// Most requests in the list.
pub(crate) const WAITS: usize = 512;

shared! {
    /// The requests that wait, in no order; 0 for a free place.
    pub(crate) struct Waits { uniques: [AtomicU64; WAITS] }
}

impl Waits {
    /// Adds the request `unique`, and returns its place; `None` if all places are taken.
    pub(crate) fn add(&self, unique: u64) -> Option<usize> {
        let free = |place: &AtomicU64| place.compare_exchange(0, unique, Release, Relaxed).is_ok();
        self.uniques.iter().position(free)
    }

    /// Removes the request at `place` after its answer.
    pub(crate) fn remove(&self, place: usize) {
        self.uniques[place].store(0, Release);
    }

    /// The requests that wait.
    pub(crate) fn all(&self) -> impl Iterator<Item = u64> {
        self.uniques.iter().map(|place| place.load(Acquire)).filter(|unique| *unique != 0)
    }

    /// Removes all requests: the kernel sends them again, or a server has ended them.
    pub(crate) fn clear(&self) {
        self.uniques.iter().for_each(|place| place.store(0, Release));
    }
}
