//! Whether attributes go along with the names of a directory.
//!
//! The kernel asks for both at the beginning of a directory (`FUSE_READDIRPLUS_AUTO`: about 200 entries), and takes names
//! alone. Finding attributes costs the server ten times what a
//! name costs, and saves a message for each entry that is looked at next: `ls -l` wants them, `find -name` does not.
//! The requests after the last listings show which it is.

use std::sync::atomic::{AtomicU32, Ordering};

/// For so many directories attributes are given, before names alone are tried again.
const TRUST: u32 = 32;

/// What a volume's callers did after listing a directory.
#[derive(Debug, Default)]
pub struct ReaddirplusPolicy {
    /// Names given alone since the last directory was opened.
    listed: AtomicU32,
    /// Names looked up since then.
    looked_up: AtomicU32,
    trust: AtomicU32,
}

impl ReaddirplusPolicy {
    /// A name was given alone.
    pub fn listed(&self) {
        self.listed.fetch_add(1, Ordering::Relaxed);
    }

    /// A name was looked up.
    pub fn looked_up(&self) {
        self.looked_up.fetch_add(1, Ordering::Relaxed);
    }

    /// A directory is opened: predicts whether its entries are going to be looked at.
    pub fn directory_opened(&self) -> bool {
        let (listed, looked_up) = (self.listed.swap(0, Ordering::Relaxed), self.looked_up.swap(0, Ordering::Relaxed));
        if listed > 0 && looked_up >= listed / 2 {
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
            (0..names).for_each(|_| readdirplus.listed());
            (0..looks).for_each(|_| readdirplus.looked_up());
        }
        attributes
    }

    #[test]
    fn who_looks_at_every_entry_gets_attributes_from_the_second_directory_on() {
        let readdirplus = ReaddirplusPolicy::default();
        let given = (0..100).filter(|_| list(&readdirplus, 50, 50)).count();
        assert!(!list(&ReaddirplusPolicy::default(), 50, 50), "nothing is known at the start");
        assert!(given > 90, "{given}");
    }

    #[test]
    fn who_wants_names_gets_names() {
        let readdirplus = ReaddirplusPolicy::default();
        assert_eq!((0..100).filter(|_| list(&readdirplus, 50, 3)).count(), 0);
    }
}
