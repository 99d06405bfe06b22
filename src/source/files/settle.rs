//! Which files are being written, and which are settled.
//!
//! A file that is rewritten in place is invalid for a while: empty, then half written. The writer's `close` ends that. Some
//! writers keep the file open or change it through a mapping; such a file is settled after a second without a change.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a file has to be unchanged if its writer does not close it, and absent before it counts as deleted.
pub(super) const SETTLE_DELAY: Duration = Duration::from_secs(1);

/// The pause before a directory is watched again that could not be watched.
const RETRY_PAUSE: Duration = Duration::from_secs(10);

/// Why a file is settled.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum SettledBy {
    /// Its writer closed it.
    Closed,
    /// It was unchanged for a while.
    Quiet,
}

/// Files that have settled since the last scan.
pub(super) type SettledFiles = HashMap<PathBuf, SettledBy>;

/// The events since the last scan began. Paths are real paths.
#[derive(Default)]
pub(super) struct Activity {
    /// When a process last wrote to a file, or made a directory, which it may be about to fill.
    writing: HashMap<PathBuf, Instant>,
    settled: SettledFiles,
    /// Whether a change needs a scan.
    scan_due: bool,
    /// When a scan is due without a change.
    scan_at: Option<Instant>,
}

impl Activity {
    /// Makes a scan due.
    pub(super) fn request_scan(&mut self) {
        self.scan_due = true;
    }

    /// Whether a scan is due.
    pub(super) fn is_scan_due(&self) -> bool {
        self.scan_due
    }

    /// Notes that the file is being written, or its directory filled, until [`Self::close`] or a time without a change.
    pub(super) fn write(&mut self, path: &Path) {
        self.settled.remove(path);
        self.writing.insert(path.to_owned(), Instant::now());
    }

    /// Notes that a writer has closed the file.
    pub(super) fn close(&mut self, path: &Path) {
        self.writing.remove(path);
        self.settled.insert(path.to_owned(), SettledBy::Closed);
        self.request_scan();
    }

    /// Notes that another file, or none, has the name now.
    pub(super) fn replace(&mut self, path: &Path) {
        self.writing.remove(path);
        self.settled.remove(path);
        self.request_scan();
    }

    /// Begins a scan. Returns the settled files.
    pub(super) fn begin_scan(&mut self) -> SettledFiles {
        self.scan_due = false;
        std::mem::take(&mut self.settled)
    }

    /// Whether a process is writing the file, or has written to it since the scan began with `settled`.
    pub(super) fn is_being_written(&self, path: &Path, settled: &SettledFiles) -> bool {
        let being_filled = || path.ancestors().skip(1).any(|directory| self.writing.contains_key(directory));
        self.writing.contains_key(path)
            || self.settled.contains_key(path)
            || !settled.contains_key(path) && being_filled()
    }

    /// Notes that a directory cannot be watched now: changes in it bring no event, so a scan is due after a pause.
    pub(super) fn scan_later(&mut self) {
        self.scan_at(Instant::now() + RETRY_PAUSE);
    }

    /// Makes a scan due at this time.
    pub(super) fn scan_at(&mut self, at: Instant) {
        self.scan_at = Some(self.scan_at.map_or(at, |earlier| earlier.min(at)));
    }

    /// When the next file becomes settled without an event, or a scan is due without one.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.writing.values().map(|last| *last + SETTLE_DELAY).chain(self.scan_at).min()
    }

    /// Marks files that have been unchanged for long enough as settled. Makes a scan due whose time has come.
    pub(super) fn reach_deadlines(&mut self) {
        let now = Instant::now();
        if self.scan_at.take_if(|at| *at <= now).is_some() {
            self.scan_due = true;
        }
        for (path, _) in self.writing.extract_if(|_, last| *last + SETTLE_DELAY <= now) {
            self.settled.insert(path, SettledBy::Quiet);
            self.scan_due = true;
        }
    }
}
