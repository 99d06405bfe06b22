//! The validity of a file's cached attributes, and whether the kernel's cached pages have the file's current content.
//!
//! Times work as with Linux' own client (`nfs(5)`, *Attribute caching*): attributes hold for the shortest time first, and for
//! twice as long each time they turn out to be unchanged, up to the longest.
//!
//! If podfs asked for attributes before it made a change, they may be from before the change, so it drops them. To detect that,
//! it numbers queries and changes in one order.

use std::cell::Cell;
use std::time::{Duration, Instant};

use podfs_nfs::rpc::Credential;
use podfs_nfs::v3::{Attributes, FileType, Time, WccAttributes, WccData};

use super::super::options::Caching;

/// Users whose rights to one file are remembered.
const RIGHTS: usize = 4;

/// The order of questions and changes.
#[derive(Debug, Default)]
pub struct CallSequence(Cell<u64>);

impl CallSequence {
    /// A place after all others.
    pub fn next(&self) -> u64 {
        self.0.set(self.0.get() + 1);
        self.0.get()
    }
}

/// Cached attributes and rights of a file.
#[derive(Debug, Default)]
pub struct Freshness {
    attributes: Option<Attributes>,
    /// The time at which podfs requested the attributes.
    at: Option<Instant>,
    /// The place of that request in the order.
    asked: u64,
    /// The time for which the attributes are valid.
    holds: Duration,
    /// The place of the last change that was made here.
    changed: u64,
    /// Changes of its content that are under way.
    changing: u32,
    /// The content that the kernel's pages are of.
    content: Option<FileVersion>,
    rights: Vec<AccessRight>,
    /// The epoch of the connection over which podfs last wrote data of the file.
    epoch: u64,
}

/// A state of a file: another content has another version.
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
    asked: u32,
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
    /// None: the attributes are from before a change by podfs or are older than the cached ones.
    Outdated,
}

impl Freshness {
    /// The last attributes.
    pub fn attributes(&self) -> Option<&Attributes> {
        self.attributes.as_ref()
    }

    /// The time for which the attributes are still valid.
    pub fn remaining(&self, now: Instant) -> Duration {
        self.at.map_or(Duration::ZERO, |at| (at + self.holds).saturating_duration_since(now))
    }

    /// Takes in attributes whose question has the place `asked` in the order.
    pub fn learn(&mut self, found: &Attributes, asked: u64, now: Instant, caching: &Caching) -> AttributeChange {
        if asked < self.changed || asked < self.asked {
            return AttributeChange::Outdated;
        }
        let version = FileVersion::of(found);
        let known = self.attributes.as_ref().map(FileVersion::of);
        self.keep(found, asked, now, caching, known == Some(version));
        if self.changing > 0 {
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

    /// The kernel's pages are of this content from now on; returns whether they were before.
    pub fn opened(&mut self, found: &Attributes) -> bool {
        let version = FileVersion::of(found);
        let same = self.changing > 0 || self.content.is_some_and(|content| !content.differs(&version));
        self.content = Some(version);
        same
    }

    /// The epoch of the connection over which podfs last wrote data of the file.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Something is written by this connection.
    pub fn set_epoch(&mut self, epoch: u64) {
        self.epoch = epoch;
    }

    /// A change of the content is sent.
    pub fn change_begins(&mut self) {
        self.changing += 1;
    }

    /// It is made, or it failed.
    pub fn change_ends(&mut self, around: &WccData, place: u64, now: Instant, caching: &Caching) -> AttributeChange {
        self.changing = self.changing.saturating_sub(1);
        let alone = self.changing == 0;
        self.changed_here(around, alone, place, now, caching)
    }

    /// Something was changed here. With `alone` no other change is under way.
    pub fn changed_here(
        &mut self,
        around: &WccData,
        alone: bool,
        place: u64,
        now: Instant,
        caching: &Caching,
    ) -> AttributeChange {
        let by_another = |before: &WccAttributes| {
            alone && self.content.is_some_and(|content| content.differs(&FileVersion::before(before)))
        };
        let news = match &around.before {
            Some(before) if by_another(before) => AttributeChange::Changed,
            _ => AttributeChange::None,
        };
        self.changed = place;
        match &around.after {
            Some(after) => {
                self.keep(after, place, now, caching, false);
                self.content = self.content.filter(|_| news == AttributeChange::None).map(|_| FileVersion::of(after));
            }
            // The attributes after the change are unknown and have to be requested.
            None => self.at = None,
        }
        news
    }

    /// The attributes do not hold any more.
    pub fn expire(&mut self) {
        self.at = None;
    }

    /// The rights of `wanted` that the server granted this credential, as far as they are cached and valid.
    pub fn right(&self, credential: &Credential, wanted: u32, now: Instant, caching: &Caching) -> Option<u32> {
        let holds = caching.shortest(FileType::File);
        let ctime = self.attributes.as_ref()?.ctime;
        let known =
            self.rights.iter().find(|right| right.credential == *credential && right.asked & wanted == wanted)?;
        (known.ctime == ctime && now < known.at + holds).then_some(known.granted)
    }

    /// Records what the server granted this credential.
    pub fn set_right(&mut self, credential: Credential, asked: u32, granted: u32, now: Instant) {
        let Some(ctime) = self.attributes.as_ref().map(|attributes| attributes.ctime) else { return };
        self.rights.retain(|right| right.credential != credential);
        if self.rights.len() == RIGHTS {
            self.rights.remove(0);
        }
        self.rights.push(AccessRight { credential, granted, asked, ctime, at: now });
    }

    fn keep(&mut self, found: &Attributes, asked: u64, now: Instant, caching: &Caching, unchanged: bool) {
        let (shortest, longest) = (caching.shortest(found.kind), caching.longest(found.kind));
        // The time doubles only after the attributes were valid for all of it.
        let has_held = self.at.is_none_or(|at| now >= at + self.holds);
        self.holds = match (unchanged, has_held) {
            (true, true) => (self.holds * 2).clamp(shortest, longest),
            (true, false) => self.holds.clamp(shortest, longest),
            (false, _) => shortest,
        };
        (self.attributes, self.asked, self.at) = (Some(*found), asked, Some(now));
    }
}

impl FileVersion {
    fn of(found: &Attributes) -> Self {
        Self { size: found.size, mtime: found.mtime, ctime: found.ctime }
    }

    fn before(before: &WccAttributes) -> Self {
        Self { size: before.size, mtime: before.mtime, ctime: before.ctime }
    }

    /// Whether the content is another one. A change of nothing but the mode leaves it what it is.
    fn differs(&self, other: &Self) -> bool {
        (self.size, self.mtime) != (other.size, other.mtime)
    }
}
