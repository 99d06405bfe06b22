//! The nodes of the file system, without the FUSE protocol. Of FUSE, the tree only counts the lookups by which the kernel holds
//! nodes.
//!
//! A node has one number for its whole life, and a number is never used for two nodes. The nodes below a generation's directory
//! never change; the next generation has other nodes. Directories of the view that do change, and links whose target stays, keep
//! their nodes. A node that is no longer shown stays until the kernel forgets it, so that open files and working directories stay
//! usable.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::SystemTime;

use podfs_fuse::projection::GenerationName;

use super::entries::{ViewEntry, ViewEntryKind, ViewVolumes};
use crate::render::model::DATA;

/// The number of a node, which FUSE has as its inode number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct ViewNodeId(pub(super) u64);

impl ViewNodeId {
    /// The view's root.
    pub(super) const ROOT: ViewNodeId = ViewNodeId(1);
}

/// All nodes, and their content.
pub(super) struct ViewTree {
    nodes: HashMap<ViewNodeId, ViewNode>,
    /// The next number.
    next: ViewNodeId,
    shown: ViewVolumes,
    volumes: BTreeMap<String, ViewVolume>,
}

/// A directory, link or file.
pub(super) struct ViewNode {
    pub(super) number: ViewNodeId,
    pub(super) mode: u16,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) modified: SystemTime,
    pub(super) kind: ViewNodeKind,
    /// Whether the node, with all nodes below it, never changes.
    pub(super) is_final: bool,
    /// Lookups of the node that the kernel has not forgotten (FUSE `nlookup`).
    lookups: u64,
    is_shown: bool,
}

pub(super) enum ViewNodeKind {
    Directory {
        /// The entries by name.
        entries: BTreeMap<String, ViewNodeId>,
        /// An entry that a lookup finds and a listing does not have.
        unlisted: Option<(String, ViewNodeId)>,
    },
    Link(String),
    File(Arc<[u8]>),
}

/// A name that the kernel should forget, and the number of the directory that it is in.
pub(super) type StaleName = (ViewNodeId, String);

/// The nodes of a volume.
struct ViewVolume {
    root: ViewNodeId,
    /// Nodes outside of the generations, by path.
    fixed: BTreeMap<String, ViewNodeId>,
    /// The link to the current generation.
    data: ViewNodeId,
    current: Generation,
    /// The generation before the current one.
    before: Option<Generation>,
}

struct Generation {
    name: String,
    directory: ViewNodeId,
    nodes: Vec<ViewNodeId>,
}

impl ViewTree {
    /// A tree that shows no volume.
    pub(super) fn new(now: SystemTime) -> ViewTree {
        let mut tree = ViewTree {
            nodes: HashMap::new(),
            next: ViewNodeId::ROOT,
            shown: ViewVolumes::default(),
            volumes: BTreeMap::new(),
        };
        // The root directory belongs to the user that mounts the view, not to a pod's user.
        let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        let root = ViewEntry { path: String::new(), mode: 0o755, uid, gid, kind: ViewEntryKind::Directory };
        tree.add(&root, now, false);
        tree
    }

    /// The volumes that are shown.
    pub(super) fn volumes(&self) -> &ViewVolumes {
        &self.shown
    }

    /// The node of this number.
    pub(super) fn node(&self, number: ViewNodeId) -> Option<&ViewNode> {
        self.nodes.get(&number)
    }

    /// The node of this name in a directory. Counts a lookup, because the kernel holds the node from now on.
    pub(super) fn look_up(&mut self, directory: ViewNodeId, name: &str) -> Option<&ViewNode> {
        let ViewNodeKind::Directory { entries, unlisted } = &self.nodes.get(&directory)?.kind else { return None };
        let unlisted = unlisted.iter().find(|(unlisted, _)| unlisted == name).map(|(_, number)| number);
        let number = *entries.get(name).or(unlisted)?;
        let node = self.nodes.get_mut(&number)?;
        node.lookups += 1;
        Some(node)
    }

    /// Handles FORGET: reduces the lookup count of a node.
    pub(super) fn forget(&mut self, number: ViewNodeId, lookups: u64) {
        let Some(node) = self.nodes.get_mut(&number) else { return };
        node.lookups = node.lookups.saturating_sub(lookups);
        if node.lookups == 0 && !node.is_shown {
            self.nodes.remove(&number);
        }
    }

    /// Shows these volumes from now on. Returns the names that lead to another node than before, or to none.
    pub(super) fn show(&mut self, volumes: ViewVolumes, now: SystemTime) -> Vec<StaleName> {
        let mut stale = Vec::new();
        let mut before = std::mem::take(&mut self.volumes);
        for (name, entries) in &volumes.0 {
            let old = before.remove(name).zip(self.shown.0.get(name).cloned());
            let volume = match old {
                Some((volume, shown)) if shown == *entries => volume,
                Some((volume, shown)) => self.change(volume, &shown, entries, now, &mut stale),
                None => self.add_volume(entries, now),
            };
            self.volumes.insert(name.clone(), volume);
        }
        for (name, volume) in before {
            stale.push((ViewNodeId::ROOT, name));
            self.hide_volume(volume);
        }
        let entries = self.volumes.iter().map(|(name, volume)| (name.clone(), volume.root)).collect();
        self.fill(ViewNodeId::ROOT, entries, None, now);
        self.shown = volumes;
        stale
    }

    fn add_volume(&mut self, entries: &[ViewEntry], now: SystemTime) -> ViewVolume {
        let mut fixed = BTreeMap::new();
        for entry in entries.iter().filter(|entry| is_fixed(entry)) {
            fixed.insert(entry.path.clone(), self.add(entry, now, is_link(entry)));
        }
        let (current, data) = self.add_generation(entries, now);
        let root = fixed.remove("").expect("a rendering begins with the volume itself");
        let volume = ViewVolume { root, fixed, data, current, before: None };
        self.fill_volume(&volume, now);
        volume
    }

    /// Turns a volume into one with other entries.
    fn change(
        &mut self,
        mut volume: ViewVolume,
        old: &[ViewEntry],
        new: &[ViewEntry],
        now: SystemTime,
        stale: &mut Vec<StaleName>,
    ) -> ViewVolume {
        let before = volume.fixed.clone();
        let is_kept = |path: &str| new.iter().any(|entry| entry.path == path && old.contains(entry));
        let (mut fixed, gone): (BTreeMap<_, _>, BTreeMap<_, _>) =
            std::mem::take(&mut volume.fixed).into_iter().partition(|(path, _)| is_kept(path));
        for (path, number) in gone {
            let (directory, name) = place(&before, volume.root, &path);
            stale.push((directory, name.to_owned()));
            self.hide(number);
        }
        for entry in new.iter().filter(|entry| is_fixed(entry)) {
            match entry.path.as_str() {
                "" => self.set_attributes(volume.root, entry, now),
                path if fixed.contains_key(path) => {}
                path => drop(fixed.insert(path.to_owned(), self.add(entry, now, is_link(entry)))),
            }
        }
        volume.fixed = fixed;
        let in_generation = |entries: &[ViewEntry]| -> Vec<ViewEntry> {
            entries.iter().filter(|entry| entry.in_generation().is_some()).cloned().collect()
        };
        if in_generation(old) != in_generation(new) {
            let (current, data) = self.add_generation(new, now);
            stale.push((volume.root, DATA.to_owned()));
            self.hide(volume.data);
            volume.data = data;
            if let Some(oldest) = volume.before.replace(std::mem::replace(&mut volume.current, current)) {
                stale.push((volume.root, oldest.name));
                oldest.nodes.into_iter().for_each(|number| self.hide(number));
            }
        }
        self.fill_volume(&volume, now);
        volume
    }

    /// Adds the directory of a new generation, with all nodes below it, and a link to it.
    fn add_generation(&mut self, entries: &[ViewEntry], now: SystemTime) -> (Generation, ViewNodeId) {
        let name = GenerationName::new(now).to_string();
        let mut numbers: BTreeMap<&str, ViewNodeId> = BTreeMap::new();
        let mut children: BTreeMap<&str, BTreeMap<String, ViewNodeId>> = BTreeMap::new();
        for (entry, path) in entries.iter().filter_map(|entry| Some((entry, entry.in_generation()?))) {
            let number = self.add(entry, now, true);
            numbers.insert(path, number);
            if !path.is_empty() {
                let (directory, name) = path.rsplit_once('/').unwrap_or(("", path));
                children.entry(directory).or_default().insert(name.to_owned(), number);
            }
        }
        for (directory, entries) in children {
            if let Some(number) = numbers.get(directory) {
                self.fill(*number, entries, None, now);
            }
        }
        let link = entries.iter().find(|entry| entry.path == DATA).cloned();
        let link = link.expect("a rendering has the link to its generation");
        let data = self.add(&ViewEntry { kind: ViewEntryKind::Link(name.clone()), ..link }, now, true);
        let directory = *numbers.get("").expect("a rendering has the directory of its generation");
        (Generation { name, directory, nodes: numbers.into_values().collect() }, data)
    }

    /// Puts the entries of a volume into those of its directories that may change.
    fn fill_volume(&mut self, volume: &ViewVolume, now: SystemTime) {
        let mut children: BTreeMap<ViewNodeId, BTreeMap<String, ViewNodeId>> = BTreeMap::new();
        let of_root = children.entry(volume.root).or_default();
        of_root.insert(DATA.to_owned(), volume.data);
        of_root.insert(volume.current.name.clone(), volume.current.directory);
        for (path, number) in &volume.fixed {
            let (directory, name) = place(&volume.fixed, volume.root, path);
            children.entry(directory).or_default().insert(name.to_owned(), *number);
        }
        for (directory, entries) in children {
            let before = volume.before.as_ref().filter(|_| directory == volume.root);
            let unlisted = before.map(|before| (before.name.clone(), before.directory));
            self.fill(directory, entries, unlisted, now);
        }
    }

    fn fill(
        &mut self,
        directory: ViewNodeId,
        entries: BTreeMap<String, ViewNodeId>,
        unlisted: Option<(String, ViewNodeId)>,
        now: SystemTime,
    ) {
        if let Some(node) = self.nodes.get_mut(&directory) {
            node.kind = ViewNodeKind::Directory { entries, unlisted };
            node.modified = now;
        }
    }

    fn add(&mut self, entry: &ViewEntry, now: SystemTime, is_final: bool) -> ViewNodeId {
        let number = self.next;
        self.next = ViewNodeId(number.0 + 1);
        let kind = match &entry.kind {
            ViewEntryKind::Directory => ViewNodeKind::Directory { entries: BTreeMap::new(), unlisted: None },
            ViewEntryKind::Link(target) => ViewNodeKind::Link(target.clone()),
            ViewEntryKind::File { content, .. } => ViewNodeKind::File(Arc::clone(content)),
        };
        let ViewEntry { mode, uid, gid, .. } = *entry;
        let node = ViewNode { number, mode, uid, gid, modified: now, kind, is_final, lookups: 0, is_shown: true };
        self.nodes.insert(number, node);
        number
    }

    fn set_attributes(&mut self, number: ViewNodeId, entry: &ViewEntry, now: SystemTime) {
        if let Some(node) = self.nodes.get_mut(&number) {
            (node.mode, node.uid, node.gid, node.modified) = (entry.mode, entry.uid, entry.gid, now);
        }
    }

    fn hide_volume(&mut self, volume: ViewVolume) {
        let generations = std::iter::once(volume.current).chain(volume.before);
        let numbers = generations.flat_map(|generation| generation.nodes).chain(volume.fixed.into_values());
        numbers.chain([volume.root, volume.data]).for_each(|number| self.hide(number));
    }

    /// Hides a node that no directory shows any more. It stays until the kernel forgets it.
    fn hide(&mut self, number: ViewNodeId) {
        if let Some(node) = self.nodes.get_mut(&number) {
            node.is_shown = false;
            if node.lookups == 0 {
                self.nodes.remove(&number);
            }
        }
    }
}

/// Whether an entry is neither in a generation nor the link to it.
fn is_fixed(entry: &ViewEntry) -> bool {
    entry.path != DATA && entry.in_generation().is_none()
}

fn is_link(entry: &ViewEntry) -> bool {
    matches!(entry.kind, ViewEntryKind::Link(_))
}

/// The directory that a path of a volume is in, and its name there.
fn place<'a>(fixed: &BTreeMap<String, ViewNodeId>, root: ViewNodeId, path: &'a str) -> (ViewNodeId, &'a str) {
    match path.rsplit_once('/') {
        Some((directory, name)) => (fixed.get(directory).copied().unwrap_or(root), name),
        None => (root, path),
    }
}
