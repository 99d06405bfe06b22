//! The validity of a file's cached attributes, and whether the kernel's cached pages have the file's current content.
//!
//! Times work as with Linux' own client (`nfs(5)`, *Attribute caching*): attributes are valid for the shortest time first, and for
//! twice as long each time they turn out to be unchanged, up to the longest.
//!
//! If podfs requested attributes before it made a change, they may be from before the change, so podfs drops them. To detect
//! that, podfs numbers queries and changes in one order.

use std::cell::Cell;
use std::time::{Duration, Instant};

use podfs_nfs::rpc::Credential;
use podfs_nfs::v3::{Attributes, FileType, Time, WccAttributes, WccData};

use super::super::options::Caching;

/// Most users whose rights to one file are cached.
const RIGHTS: usize = 4;

/// The numbers of queries and changes, in one order.
#[derive(Debug, Default)]
pub struct CallSequence(Cell<u64>);

impl CallSequence {
    /// A number after all earlier ones.
    pub fn next(&self) -> u64 {
        self.0.set(self.0.get() + 1);
        self.0.get()
    }
}

/// Cached attributes and rights of a file.
#[derive(Debug, Default)]
pub struct Freshness {
    attributes: Option<Attributes>,
    /// The time at which podfs got the attributes; none if they are not valid any more.
    at: Option<Instant>,
    /// The number of the query or change that returned the attributes.
    query: u64,
    /// The time for which the attributes are valid.
    valid_for: Duration,
    /// The number of the last change that podfs made.
    last_change: u64,
    /// The number of changes of its content that are in flight.
    changes_in_flight: u32,
    /// The version of the content that the kernel's pages have.
    content: Option<FileVersion>,
    /// The kernel may still have pages of an earlier version.
    has_old_pages: bool,
    rights: Vec<AccessRight>,
    /// The epoch of the connection over which podfs last wrote data of the file.
    epoch: u64,
}

/// A version of a file. Another content has another version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileVersion {
    size: u64,
    mtime: Time,
    ctime: Time,
}

#[derive(Debug)]
struct AccessRight {
    credential: Credential,
    /// Bits of ACCESS.
    granted: u32,
    /// Bits that were requested.
    requested: u32,
    ctime: Time,
    at: Instant,
}

/// The change that new attributes show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttributeChange {
    /// No change of the content by another client.
    None,
    /// Another client has changed the content.
    Changed,
    /// No change is known: the attributes are from before a change by podfs, or are older than the cached ones.
    Outdated,
}

impl Freshness {
    /// The last attributes.
    pub fn attributes(&self) -> Option<&Attributes> {
        self.attributes.as_ref()
    }

    /// The time for which the attributes are still valid.
    pub fn remaining(&self, now: Instant) -> Duration {
        self.at.map_or(Duration::ZERO, |at| (at + self.valid_for).saturating_duration_since(now))
    }

    /// Caches attributes. `query` is the number of the call that returned them.
    pub fn learn(&mut self, found: &Attributes, query: u64, now: Instant, caching: &Caching) -> AttributeChange {
        if query < self.last_change || query < self.query {
            return AttributeChange::Outdated;
        }
        let version = FileVersion::of(found);
        let known = self.attributes.as_ref().map(FileVersion::of);
        self.keep(found, query, now, caching, known == Some(version));
        if self.changes_in_flight > 0 {
            return AttributeChange::None;
        }
        match self.content {
            Some(content) if content.differs(&version) => {
                self.content = None;
                AttributeChange::Changed
            }
            Some(_) => {
                self.content = Some(version);
                AttributeChange::None
            }
            None => AttributeChange::None,
        }
    }

    /// Records that the kernel's pages have this content from now on, because the kernel drops older ones when it gets the answer to an
    /// OPEN. Returns whether they had it before.
    pub fn opened(&mut self, found: &Attributes) -> bool {
        let version = FileVersion::of(found);
        let same = self.changes_in_flight > 0 || self.content.is_some_and(|content| !content.differs(&version));
        self.content = Some(version);
        !std::mem::take(&mut self.has_old_pages) && same
    }

    /// Records that pages which the kernel reads from now on have this content, and that the kernel may still have older ones: podfs makes
    /// it drop them, but does not wait for that.
    pub fn begins_to_drop_pages(&mut self, found: &Attributes) {
        self.content = Some(FileVersion::of(found));
        self.has_old_pages = true;
    }

    /// The epoch of the connection over which podfs last wrote data of the file.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Records the epoch of the connection over which podfs writes data of the file.
    pub fn set_epoch(&mut self, epoch: u64) {
        self.epoch = epoch;
    }

    /// Records that podfs sends a change of the content.
    pub fn change_begins(&mut self) {
        self.changes_in_flight += 1;
    }

    /// Records that a change of the content is made, or has failed. `number` is the number of the change.
    pub fn change_ends(&mut self, around: &WccData, number: u64, now: Instant, caching: &Caching) -> AttributeChange {
        self.changes_in_flight = self.changes_in_flight.saturating_sub(1);
        let alone = self.changes_in_flight == 0;
        self.changed_here(around, alone, number, now, caching)
    }

    /// Records a change that podfs made. `alone`: no other change by podfs is in flight.
    pub fn changed_here(
        &mut self,
        around: &WccData,
        alone: bool,
        number: u64,
        now: Instant,
        caching: &Caching,
    ) -> AttributeChange {
        let by_another = |before: &WccAttributes| {
            alone && self.content.is_some_and(|content| content.differs(&FileVersion::before(before)))
        };
        let change = match &around.before {
            Some(before) if by_another(before) => AttributeChange::Changed,
            _ => AttributeChange::None,
        };
        self.last_change = number;
        match &around.after {
            Some(after) => {
                self.keep(after, number, now, caching, false);
                self.content = self.content.filter(|_| change == AttributeChange::None).map(|_| FileVersion::of(after));
            }
            // The attributes after the change are unknown and have to be requested.
            None => self.at = None,
        }
        change
    }

    /// Makes the cached attributes invalid.
    pub fn expire(&mut self) {
        self.at = None;
    }

    /// The rights of `wanted` that the server granted this credential, as far as they are cached and valid.
    pub fn right(&self, credential: &Credential, wanted: u32, now: Instant, caching: &Caching) -> Option<u32> {
        let valid_for = caching.shortest(FileType::File);
        let ctime = self.attributes.as_ref()?.ctime;
        let known =
            self.rights.iter().find(|right| right.credential == *credential && right.requested & wanted == wanted)?;
        (known.ctime == ctime && now < known.at + valid_for).then_some(known.granted)
    }

    /// Records what the server granted this credential.
    pub fn set_right(&mut self, credential: Credential, requested: u32, granted: u32, now: Instant) {
        let Some(ctime) = self.attributes.as_ref().map(|attributes| attributes.ctime) else { return };
        self.rights.retain(|right| right.credential != credential);
        if self.rights.len() == RIGHTS {
            self.rights.remove(0);
        }
        self.rights.push(AccessRight { credential, granted, requested, ctime, at: now });
    }

    fn keep(&mut self, found: &Attributes, query: u64, now: Instant, caching: &Caching, unchanged: bool) {
        let (shortest, longest) = (caching.shortest(found.kind), caching.longest(found.kind));
        // The time doubles only after the attributes were valid for all of it.
        let is_over = self.at.is_none_or(|at| now >= at + self.valid_for);
        self.valid_for = match (unchanged, is_over) {
            (true, true) => (self.valid_for * 2).clamp(shortest, longest),
            (true, false) => self.valid_for.clamp(shortest, longest),
            (false, _) => shortest,
        };
        (self.attributes, self.query, self.at) = (Some(*found), query, Some(now));
    }
}

impl FileVersion {
    fn of(found: &Attributes) -> Self {
        Self { size: found.size, mtime: found.mtime, ctime: found.ctime }
    }

    fn before(before: &WccAttributes) -> Self {
        Self { size: before.size, mtime: before.mtime, ctime: before.ctime }
    }

    /// Whether the content is another one. A change of the mode alone does not change the content.
    fn differs(&self, other: &Self) -> bool {
        (self.size, self.mtime) != (other.size, other.mtime)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_size(size: u64) -> Attributes {
        let time = Time::default();
        Attributes {
            kind: FileType::File,
            mode: 0o644,
            links: 1,
            uid: 0,
            gid: 0,
            size,
            used: size,
            device: (0, 0),
            fsid: 0,
            fileid: 1,
            atime: time,
            mtime: time,
            ctime: time,
        }
    }

    #[test]
    fn an_open_after_a_change_drops_pages_although_podfs_has_begun_to_drop_them() {
        let (caching, now) = (Caching::default(), Instant::now());
        let mut freshness = Freshness::default();
        assert!(!freshness.opened(&of_size(18)));
        assert!(freshness.opened(&of_size(18)));
        // The release of the last open is not there yet, so the file counts as open.
        assert_eq!(freshness.learn(&of_size(5), 1, now, &caching), AttributeChange::Changed);
        freshness.begins_to_drop_pages(&of_size(5));
        assert!(!freshness.opened(&of_size(5)), "the kernel may still have the old pages");
        assert!(freshness.opened(&of_size(5)));
    }
}
