//! Decides whether the server sends attributes with the names of a directory.
//!
//! The kernel asks for both at the beginning of a directory (`FUSE_READDIRPLUS_AUTO`: about 200 entries), and also accepts names
//! alone. Attributes cost the server ten times as much as a name, and save a message for each entry that the caller looks up next:
//! `ls -l` needs them, `find -name` does not. The requests after the last listings show which is the case. Directories do not
//! count: each walk looks them up, to enter them.

use std::sync::atomic::{AtomicU32, Ordering};

/// The value of `trust` after callers have looked at the entries of a directory.
const TRUST: u32 = 32;

/// Counts whether a volume's callers read attributes after listing a directory.
#[derive(Debug, Default)]
pub struct ReaddirplusPolicy {
    /// The number of files whose names were sent alone since the last directory was opened.
    listed: AtomicU32,
    /// The number of files looked up since then.
    looked_up: AtomicU32,
    /// The number of directories that get attributes before the server tries names alone again.
    trust: AtomicU32,
}

impl ReaddirplusPolicy {
    /// The server sends the name of a directory or another file without attributes.
    pub fn listed(&self, is_directory: bool) {
        self.listed.fetch_add(u32::from(!is_directory), Ordering::Relaxed);
    }

    /// The kernel lists `files` names of files from its cache, without attributes.
    pub fn listed_again(&self, files: u32) {
        self.listed.fetch_add(files, Ordering::Relaxed);
    }

    /// A name was looked up, of a directory or of another file.
    pub fn looked_up(&self, is_directory: bool) {
        self.looked_up.fetch_add(u32::from(!is_directory), Ordering::Relaxed);
    }

    /// A caller opens a directory. Returns whether the caller will probably look up the entries, so that they need attributes.
    pub fn directory_opened(&self) -> bool {
        let (listed, looked_up) = (self.listed.swap(0, Ordering::Relaxed), self.looked_up.swap(0, Ordering::Relaxed));
        if listed > 0 && looked_up >= listed.div_ceil(2) {
            self.trust.store(TRUST, Ordering::Relaxed);
        }
        let less = |trust: u32| trust.checked_sub(1);
        self.trust.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(readdirplus: &ReaddirplusPolicy, names: u32, looks: u32) -> bool {
        let attributes = readdirplus.directory_opened();
        if !attributes {
            (0..names).for_each(|_| readdirplus.listed(false));
            (0..looks).for_each(|_| readdirplus.looked_up(false));
        }
        attributes
    }

    #[test]
    fn a_caller_that_stats_every_entry_gets_attributes_from_the_second_directory_on() {
        let readdirplus = ReaddirplusPolicy::default();
        let given = (0..100).filter(|_| list(&readdirplus, 50, 50)).count();
        assert!(!list(&ReaddirplusPolicy::default(), 50, 50), "nothing is known at the start");
        assert!(given > 90, "{given}");
    }

    #[test]
    fn a_caller_that_only_reads_names_gets_no_attributes() {
        let readdirplus = ReaddirplusPolicy::default();
        assert_eq!((0..100).filter(|_| list(&readdirplus, 50, 3)).count(), 0);
        assert_eq!((0..100).filter(|_| list(&readdirplus, 1, 0)).count(), 0, "one name that nothing looked at");
    }

    #[test]
    fn a_walk_that_enters_directories_gets_names() {
        let readdirplus = ReaddirplusPolicy::default();
        let walk = || {
            let attributes = readdirplus.directory_opened();
            (0..50).for_each(|_| readdirplus.listed(true));
            (0..50).for_each(|_| readdirplus.looked_up(true));
            (0..50).filter(|_| list(&readdirplus, 100, 0)).count() + usize::from(attributes)
        };
        assert_eq!((0..3).map(|_| walk()).sum::<usize>(), 0);
    }
}
