//! Listings that the kernel has cached, of directories that processes of the host may change, too: whether the next caller may get
//! one of them.
//!
//! 1. At OPENDIR the server reads when the directory was changed last. If that is the same as at the OPENDIR before, the kernel may
//!    use its listing again. Otherwise it drops the listing, and caches the next one.
//! 2. File systems count time in ticks of up to 10 ms. So the server remembers the time of a change only when it is older than
//!    that: no later change can have the same time.
//! 3. A caller that opened a directory before a change may still be reading, and the kernel may cache what this caller reads late.
//!    So while a directory is open, the server remembers no later time of change.
//! 4. The kernel checks a listing by itself, too, with its cached attributes: they are at most a second old (`auto`).

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::fs::Statx;

use super::hashing::HashKey;
use crate::session::NodeId;

/// After this time no change can have the same time as an earlier one.
const SETTLED: Duration = Duration::from_millis(100);
/// Attributes that came with a listing are valid for a second; a caller that looks at them needs some of that.
const ATTRIBUTES: Duration = Duration::from_millis(500);
/// If the table has more directories than this, podfs drops those that are closed.
const MOST: usize = 4096;

/// The directories that were listed, and those that are open.
#[derive(Debug, Default)]
pub struct CachedListings(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    directories: HashMap<NodeId, Directory, HashKey>,
    /// The number of directories that stayed when podfs dropped closed ones last.
    dropped_at: usize,
}

#[derive(Debug, Default)]
struct Directory {
    /// The number of times that callers have the directory open.
    open: u32,
    /// The last change before the kernel began to cache its listing.
    change: Option<Change>,
    /// The number of files in that listing whose names the server sent without attributes.
    names: u32,
    /// When the server sent that listing with attributes, if it did.
    with_attributes: Option<Instant>,
}

/// When a directory was changed last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    ctime: (i64, u32),
    mtime: (i64, u32),
}

impl Change {
    /// Returns the times of the last change from the attributes of a directory.
    pub fn of(found: &Statx) -> Self {
        let time = |time: &rustix::fs::StatxTimestamp| (time.tv_sec, time.tv_nsec);
        Self { ctime: time(&found.stx_ctime), mtime: time(&found.stx_mtime) }
    }

    /// Whether every later change gets a later time. `false` for a time in the future: then the clock was set back.
    fn is_settled(self, now: SystemTime) -> bool {
        let (seconds, nanoseconds) = self.ctime.max(self.mtime);
        let Ok(seconds) = u64::try_from(seconds) else { return true };
        let changed = UNIX_EPOCH.checked_add(Duration::new(seconds, nanoseconds));
        changed.and_then(|changed| now.duration_since(changed).ok()).is_some_and(|age| age >= SETTLED)
    }
}

impl CachedListings {
    /// Starts with the directories that callers of a dead server have open, one item for each open.
    pub fn with_open(directories: impl Iterator<Item = NodeId>) -> Self {
        let mut table = Table::default();
        directories.for_each(|directory| table.directories.entry(directory).or_default().open += 1);
        Self(Mutex::new(table))
    }

    /// A caller opens a directory whose last change is `change`, and may want the attributes of its entries. If the kernel may use
    /// its cached listing, returns the number of files in that listing whose names the server sent without attributes.
    pub fn opened(&self, id: NodeId, change: Change, with_attributes: bool) -> Option<u32> {
        let mut table = self.lock();
        // Open directories stay. The table has to double before podfs drops closed ones again, so that not each call looks at all.
        if table.directories.len() > MOST.max(2 * table.dropped_at) {
            table.directories.retain(|_, directory| directory.open > 0);
            table.dropped_at = table.directories.len();
        }
        let directory = table.directories.entry(id).or_default();
        directory.open += 1;
        let has_attributes = || directory.with_attributes.is_some_and(|given| given.elapsed() < ATTRIBUTES);
        if directory.change == Some(change) && (!with_attributes || has_attributes()) {
            return Some(directory.names);
        }
        let is_first = directory.open == 1;
        directory.change = (is_first && change.is_settled(SystemTime::now())).then_some(change);
        directory.names = 0;
        directory.with_attributes = with_attributes.then(Instant::now);
        None
    }

    /// A caller that reads the directory got the names of so many files without attributes.
    pub fn listed(&self, id: NodeId, names: u32) {
        if let Some(directory) = self.lock().directories.get_mut(&id) {
            directory.names = directory.names.saturating_add(names);
        }
    }

    /// A caller has closed the directory.
    pub fn closed(&self, id: NodeId) {
        let mut table = self.lock();
        let Some(directory) = table.directories.get_mut(&id) else { return };
        directory.open = directory.open.saturating_sub(1);
        if directory.open == 0 && directory.change.is_none() {
            table.directories.remove(&id);
        }
    }

    /// The kernel has forgotten the directory, and its listing.
    pub fn forget(&self, id: NodeId) {
        self.lock().directories.remove(&id);
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().expect("a thread that panics ends the process")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIRECTORY: NodeId = NodeId(7);

    /// A change that long ago.
    fn change(age: Duration) -> Change {
        let at = SystemTime::now().duration_since(UNIX_EPOCH).expect("a time") - age;
        let time = (at.as_secs().cast_signed(), at.subsec_nanos());
        Change { ctime: time, mtime: time }
    }

    fn old() -> Change {
        change(Duration::from_secs(60))
    }

    /// Whether a caller that opens, reads and closes the directory gets the kernel's listing.
    fn is_cached(listings: &CachedListings, change: Change) -> bool {
        let kept = listings.opened(DIRECTORY, change, false);
        listings.closed(DIRECTORY);
        kept.is_some()
    }

    #[test]
    fn a_listing_is_used_again_until_the_directory_changes() {
        let (listings, first) = (CachedListings::default(), old());
        assert!(!is_cached(&listings, first), "nothing is cached yet");
        assert!(is_cached(&listings, first));
        let second = change(Duration::from_secs(30));
        assert!(!is_cached(&listings, second));
        assert!(is_cached(&listings, second));
        listings.forget(DIRECTORY);
        assert!(!is_cached(&listings, second));
    }

    #[test]
    fn a_listing_soon_after_a_change_is_not_used_again() {
        let (listings, now) = (CachedListings::default(), change(Duration::ZERO));
        assert!(!is_cached(&listings, now));
        assert!(!is_cached(&listings, now), "another change may have the same time");
        let tomorrow = Change { ctime: (now.ctime.0 + 86_400, 0), ..now };
        assert!(!is_cached(&listings, tomorrow));
        assert!(!is_cached(&listings, tomorrow), "the clock was set back");
    }

    #[test]
    fn a_change_while_a_caller_reads_is_not_remembered() {
        let (listings, first, second) = (CachedListings::default(), old(), change(Duration::from_secs(30)));
        assert_eq!(listings.opened(DIRECTORY, first, false), None);
        assert!(!is_cached(&listings, second));
        assert!(
            !is_cached(&listings, second),
            "the first caller may have the kernel cache what it read before the change"
        );
        listings.closed(DIRECTORY);
        assert!(!is_cached(&listings, second));
        assert!(is_cached(&listings, second));
    }

    #[test]
    fn directories_that_were_open_before_a_takeover_count_as_open() {
        let (listings, first) = (CachedListings::with_open([DIRECTORY, DIRECTORY].into_iter()), old());
        for _ in 0..2 {
            assert!(!is_cached(&listings, first));
            assert!(!is_cached(&listings, first));
            listings.closed(DIRECTORY);
        }
        assert!(!is_cached(&listings, first));
        assert!(is_cached(&listings, first));
    }

    #[test]
    fn closed_directories_are_dropped_when_there_are_many_and_open_ones_stay() {
        let (listings, first) = (CachedListings::default(), old());
        let known = || listings.lock().directories.len();
        (0..2 * MOST as u64).for_each(|id| assert_eq!(listings.opened(NodeId(id), first, false), None));
        assert_eq!(known(), 2 * MOST, "all are open");
        (0..2 * MOST as u64).for_each(|id| listings.closed(NodeId(id)));
        for id in 0..20 * MOST as u64 {
            listings.opened(NodeId(id), first, false);
            listings.closed(NodeId(id));
        }
        assert!(known() <= MOST + 1, "{} are known", known());
    }

    #[test]
    fn attributes_are_read_again_while_names_are_cached() {
        let (listings, first) = (CachedListings::default(), old());
        let open = |with_attributes| {
            let kept = listings.opened(DIRECTORY, first, with_attributes);
            listings.closed(DIRECTORY);
            kept
        };
        assert_eq!(open(false), None);
        listings.listed(DIRECTORY, 5);
        assert_eq!(open(false), Some(5), "for the policy, callers got five names again");
        assert_eq!(open(true), None, "names alone are cached");
        assert_eq!(open(true), Some(0), "attributes came a moment ago");
        assert_eq!(open(false), Some(0));
    }
}
