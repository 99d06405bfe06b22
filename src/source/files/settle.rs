//! Which files are being written, and which are at rest.
//!
//! A file that is rewritten in place is invalid for a while: empty, then half written. The writer's `close` ends that. Some
//! writers keep the file open or change it through a mapping; such a file is at rest after a second without a change.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a file has to be unchanged if its writer does not close it.
const QUIET: Duration = Duration::from_secs(1);

/// Why a file is at rest.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Rest {
    /// Its writer closed it.
    Closed,
    /// It was unchanged for a while.
    Quiet,
}

/// Files that have come to rest since the last scan.
pub(super) type Rested = HashMap<PathBuf, Rest>;

/// The events since the last scan began. Paths are real paths.
#[derive(Default)]
pub(super) struct Activity {
    /// When a file was last written to, or a directory was made: a new directory is about to be filled.
    writing: HashMap<PathBuf, Instant>,
    rested: Rested,
    /// Whether something has changed that only a scan can find.
    stirred: bool,
}

impl Activity {
    /// Makes a scan due.
    pub(super) fn stir(&mut self) {
        self.stirred = true;
    }

    /// Whether a scan is due.
    pub(super) fn is_stirred(&self) -> bool {
        self.stirred
    }

    /// Notes that the file is being written, or its directory filled, until [`Self::close`] or a time without a change.
    pub(super) fn write(&mut self, path: &Path) {
        self.rested.remove(path);
        self.writing.insert(path.to_owned(), Instant::now());
    }

    /// Notes that a writer has closed the file.
    pub(super) fn close(&mut self, path: &Path) {
        self.writing.remove(path);
        self.rested.insert(path.to_owned(), Rest::Closed);
        self.stir();
    }

    /// Notes that another file, or none, has the name now.
    pub(super) fn replace(&mut self, path: &Path) {
        self.writing.remove(path);
        self.rested.remove(path);
        self.stir();
    }

    /// Begins a scan, with the files that have come to rest.
    pub(super) fn begin_scan(&mut self) -> Rested {
        self.stirred = false;
        std::mem::take(&mut self.rested)
    }

    /// Whether the file is being written, or was written to since the scan began with `rested`.
    pub(super) fn is_restless(&self, path: &Path, rested: &Rested) -> bool {
        let being_filled = || path.ancestors().skip(1).any(|directory| self.writing.contains_key(directory));
        self.writing.contains_key(path)
            || self.rested.contains_key(path)
            || !rested.contains_key(path) && being_filled()
    }

    /// When the next file will have been unchanged for long enough.
    pub(super) fn next_quiet(&self) -> Option<Instant> {
        self.writing.values().min().map(|last| *last + QUIET)
    }

    /// Marks files that have been unchanged for long enough as at rest.
    pub(super) fn let_rest(&mut self) {
        let now = Instant::now();
        for (path, _) in self.writing.extract_if(|_, last| *last + QUIET <= now) {
            self.rested.insert(path, Rest::Quiet);
            self.stirred = true;
        }
    }
}
