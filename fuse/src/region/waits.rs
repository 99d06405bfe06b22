//! Requests whose answer is left for later: waits for locks. Where the kernel cannot be made to ask again (before
//! Linux 6.9), a successor ends them, so that no caller waits for ever.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::shared::shared;

/// Most waits of a volume: each takes a thread.
pub(crate) const WAITS: usize = 512;

shared! {
    /// The requests that wait, each somewhere; 0 for a free place.
    pub(crate) struct Waits { uniques: [AtomicU64; WAITS] }
}

impl Waits {
    /// Remembers `unique`; returns its place.
    pub(crate) fn add(&self, unique: u64) -> Option<usize> {
        let free = |place: &AtomicU64| place.compare_exchange(0, unique, Release, Relaxed).is_ok();
        self.uniques.iter().position(free)
    }

    /// The wait at `place` is answered.
    pub(crate) fn remove(&self, place: usize) {
        self.uniques[place].store(0, Release);
    }

    /// The requests that wait.
    pub(crate) fn all(&self) -> impl Iterator<Item = u64> {
        self.uniques.iter().map(|place| place.load(Acquire)).filter(|unique| *unique != 0)
    }

    /// No wait is left: the kernel asks for all of them again, or they were ended.
    pub(crate) fn clear(&self) {
        self.uniques.iter().for_each(|place| place.store(0, Release));
    }
}
