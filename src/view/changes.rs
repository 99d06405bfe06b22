//! A change as text: a line for each file that differs, by the path that containers use.

use std::collections::{BTreeMap, BTreeSet};

use super::entries::{ViewEntry, ViewEntryKind, ViewVolumes};

/// The differences between two states of a view, a line each.
pub(super) fn lines(old: &ViewVolumes, new: &ViewVolumes) -> Vec<String> {
    let volumes: BTreeSet<&String> = old.0.keys().chain(new.0.keys()).collect();
    volumes
        .into_iter()
        .flat_map(|volume| match (old.0.get(volume), new.0.get(volume)) {
            (Some(old), Some(new)) if old == new => Vec::new(),
            (Some(old), Some(new)) => of_files(volume, old, new),
            (None, _) => vec![format!("{volume} appears")],
            (_, None) => vec![format!("{volume} disappears")],
        })
        .collect()
}

fn of_files(volume: &str, old: &[ViewEntry], new: &[ViewEntry]) -> Vec<String> {
    let (old, new) = (files(old), files(new));
    let paths: BTreeSet<&str> = old.keys().chain(new.keys()).copied().collect();
    let mut lines = Vec::new();
    for path in paths {
        let change = match (old.get(path), new.get(path)) {
            (Some(old), Some(new)) if old == new => continue,
            (None, Some(new)) => format!("is new, {}", size(new)),
            (_, None) => "is gone".to_owned(),
            (Some(old), Some(new)) => match (old.kind == new.kind, attributes(old) == attributes(new)) {
                (false, true) => format!("changes, {}", size(new)),
                (true, _) => format!("has other attributes: {}", attributes(new)),
                (false, false) => format!("changes, {}, and has other attributes: {}", size(new), attributes(new)),
            },
        };
        lines.push(format!("{volume}/{path} {change}"));
    }
    // Without a changed file, only directories differ.
    if lines.is_empty() { vec![format!("{volume} has other attributes")] } else { lines }
}

fn files(entries: &[ViewEntry]) -> BTreeMap<&str, &ViewEntry> {
    let is_file = |entry: &&ViewEntry| matches!(entry.kind, ViewEntryKind::File { .. });
    entries.iter().filter(is_file).filter_map(|entry| Some((entry.in_generation()?, entry))).collect()
}

fn size(entry: &ViewEntry) -> String {
    match &entry.kind {
        ViewEntryKind::File { fingerprint: (length, _), .. } => format!("{length} bytes"),
        ViewEntryKind::Directory | ViewEntryKind::Link(_) => String::new(),
    }
}

fn attributes(entry: &ViewEntry) -> String {
    format!("mode {:04o}, owner {}, group {}", entry.mode, entry.uid, entry.gid)
}
