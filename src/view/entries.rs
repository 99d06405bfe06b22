//! The entries of each volume in a view: those of a rendering, without bytes that the user may not see.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use crate::render::model::{self, GENERATION, RenderedContent, Rendering, visible};

/// The entries of each volume, by its name.
#[derive(Clone, Default)]
pub struct ViewVolumes(pub(super) BTreeMap<String, Arc<[ViewEntry]>>);

/// A directory, link or file. It does not implement `Debug`, because its content may be secret.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct ViewEntry {
    /// The path below the volume; empty for the volume itself.
    pub(super) path: String,
    /// Permission bits, setgid and sticky included.
    pub(super) mode: u16,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) kind: ViewEntryKind,
}

#[derive(Clone, PartialEq, Eq)]
pub(super) enum ViewEntryKind {
    Directory,
    Link(String),
    File {
        /// The bytes that are shown.
        content: Arc<[u8]>,
        /// Distinguishes contents, also hidden ones: their length, and a hash with a key of this process.
        fingerprint: (usize, u64),
        is_hidden: bool,
    },
}

/// Takes entries from renderings.
pub struct Reader {
    reveal: bool,
    hasher: RandomState,
}

impl Reader {
    /// `reveal`: whether the contents of secret files are shown.
    pub fn new(reveal: bool) -> Reader {
        Reader { reveal, hasher: RandomState::new() }
    }

    /// The volumes of a rendering that have entries. A volume that would wait has its entries of `before`.
    pub fn read(&self, rendering: &Rendering<'_>, before: &ViewVolumes) -> ViewVolumes {
        let volumes = rendering.places.iter().filter_map(|place| {
            let entries = match &place.content {
                RenderedContent::Entries(entries) => entries.iter().map(|entry| self.entry(entry)).collect(),
                RenderedContent::Waiting(_) => Arc::clone(before.0.get(&place.path)?),
                RenderedContent::OfNode(_) => return None,
            };
            Some((place.path.clone(), entries))
        });
        ViewVolumes(volumes.collect())
    }

    fn entry(&self, entry: &model::RenderedEntry<'_>) -> ViewEntry {
        let kind = match &entry.kind {
            model::EntryKind::Directory => ViewEntryKind::Directory,
            model::EntryKind::Link(target) => ViewEntryKind::Link(target.clone()),
            model::EntryKind::File { content, is_secret } => {
                let shown = visible(content, *is_secret, self.reveal);
                ViewEntryKind::File {
                    content: shown.unwrap_or_default().into(),
                    fingerprint: (content.len(), self.hasher.hash_one(&**content)),
                    is_hidden: shown.is_none(),
                }
            }
        };
        ViewEntry { path: entry.path.clone(), mode: entry.mode, uid: entry.uid, gid: entry.gid, kind }
    }
}

impl ViewEntry {
    /// The path below the directory of the generation, if the entry is in there.
    pub(super) fn in_generation(&self) -> Option<&str> {
        let rest = self.path.strip_prefix(GENERATION)?;
        if rest.is_empty() { Some(rest) } else { rest.strip_prefix('/') }
    }
}
