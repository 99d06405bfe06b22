//! The entries of a projection's root.
//!
//! A listing continues from a cookie. A name keeps its cookie while it exists, and a new name gets a higher one than all earlier
//! names. So a listing during a switch shows no entry twice and skips none (FU-15).

use std::collections::{BTreeMap, HashMap};

use super::super::steps::{DATA, DATA_TMP};
use super::{FIRST_COOKIE, NodeId, NodeKind};

/// The cookies of `..data` and `..data_tmp`, for any link.
const DATA_COOKIE: u64 = 3;
const DATA_TMP_COOKIE: u64 = 4;

/// The names in the root, with their nodes.
#[derive(Default)]
pub(super) struct Entries {
    cookies: HashMap<String, u64>,
    by_cookie: BTreeMap<u64, RootEntry>,
    /// The number of directories, for the root's link count. The kernel requests it during each commit.
    directories: u32,
}

pub(super) struct RootEntry {
    pub(super) name: String,
    pub(super) node: NodeId,
    pub(super) kind: NodeKind,
}

impl Entries {
    pub(super) fn insert(&mut self, name: &str, node: NodeId, kind: NodeKind) {
        let cookie = match name {
            DATA => DATA_COOKIE,
            DATA_TMP => DATA_TMP_COOKIE,
            _ => node.0 + FIRST_COOKIE,
        };
        self.directories += u32::from(kind == NodeKind::Directory);
        self.cookies.insert(name.to_owned(), cookie);
        self.by_cookie.insert(cookie, RootEntry { name: name.to_owned(), node, kind });
    }

    pub(super) fn remove(&mut self, name: &str) -> Option<RootEntry> {
        let cookie = self.cookies.remove(name)?;
        let entry = self.by_cookie.remove(&cookie)?;
        self.directories -= u32::from(entry.kind == NodeKind::Directory);
        Some(entry)
    }

    pub(super) fn find(&self, name: &str) -> Option<&RootEntry> {
        self.by_cookie.get(self.cookies.get(name)?)
    }

    /// The entries with cookies above `cookie`, each with its cookie.
    pub(super) fn after(&self, cookie: u64) -> impl Iterator<Item = (u64, &RootEntry)> {
        self.by_cookie.range(cookie.saturating_add(1)..).map(|(at, entry)| (*at, entry))
    }

    /// Number of entries that are directories.
    pub(super) fn directories(&self) -> u32 {
        self.directories
    }
}
