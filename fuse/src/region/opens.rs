//! Counters of an audited projection: opens, and their lost lines.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use super::shared::shared;

/// The opens of an audited projection since it was mounted, and their lost lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenCount {
    /// Opens.
    pub opens: u64,
    /// Opens whose log lines are lost.
    pub lost: u64,
}

shared! {
    /// The counters. Only the thread of the session writes them.
    pub(crate) struct Opens {
        opens: AtomicU64,
        lost: AtomicU64,
        /// Lost lines that a later line has reported.
        reported: AtomicU64,
    }
}

impl Opens {
    /// The counts so far.
    pub(crate) fn counted(&self) -> OpenCount {
        OpenCount { opens: self.opens.load(Relaxed), lost: self.lost.load(Relaxed) }
    }

    /// The number of lost lines that no line has reported yet.
    pub(crate) fn unreported(&self) -> u64 {
        self.lost.load(Relaxed).saturating_sub(self.reported.load(Relaxed))
    }

    /// Counts an open whose line was written. The line reported `reported` lost lines.
    pub(crate) fn written(&self, reported: u64) {
        self.opens.fetch_add(1, Relaxed);
        self.reported.fetch_add(reported, Relaxed);
    }

    /// Counts an open whose line is lost.
    pub(crate) fn count_lost(&self) {
        self.opens.fetch_add(1, Relaxed);
        self.lost.fetch_add(1, Relaxed);
    }
}
