//! The differences between two renderings: a unified diff for each entry, with modes and owners.
//!
//! Links, the generation's directory and the place of a file in it follow from the files, so the diff names an entry by the path
//! that containers use: `config/web.conf`, and not `config/..generation/web.conf`.

use std::collections::{BTreeMap, BTreeSet};

use super::lines::{Hunk, hunks};
use super::model::{EntryKind, GENERATION, RenderedContent, RenderedEntry, Rendering};
use super::tree::mode;

/// The differences as text; empty when there are none. It is not escaped: names and contents are those of the manifests.
pub fn text(old: &Rendering<'_>, new: &Rendering<'_>, reveal: bool) -> String {
    let (old, new) = (items(old), items(new));
    let paths: BTreeSet<&String> = old.keys().chain(new.keys()).collect();
    let mut text = String::new();
    for path in paths {
        let (before, after) = (old.get(path), new.get(path));
        if before != after {
            write_item(&mut text, path, before, after, reveal);
        }
    }
    text
}

/// The entry at a path.
#[derive(PartialEq)]
struct Item<'a> {
    /// Type, mode and owners of an entry, or a line about a place without entries.
    attributes: String,
    /// The bytes of a file.
    file: Option<File<'a>>,
}

struct File<'a> {
    content: &'a [u8],
    is_secret: bool,
}

/// The diff does not show whether a content is secret, so this makes no difference.
impl PartialEq for File<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.content == other.content
    }
}

fn items<'a>(rendering: &'a Rendering<'_>) -> BTreeMap<String, Item<'a>> {
    let mut items = BTreeMap::new();
    for place in &rendering.places {
        let mut add = |path: String, attributes: String, file| items.insert(path, Item { attributes, file });
        match &place.content {
            RenderedContent::OfNode(line) => drop(add(place.path.clone(), format!("{}: {line}", place.kind), None)),
            RenderedContent::Waiting(reason) => drop(add(place.path.clone(), format!("waits: {reason}"), None)),
            RenderedContent::Entries(entries) => {
                for entry in entries {
                    if let Some(below) = path_in_containers(entry) {
                        let path =
                            if below.is_empty() { place.path.clone() } else { format!("{}/{below}", place.path) };
                        let attributes = format!("{} {}:{}", mode(entry), entry.uid, entry.gid);
                        let file = match &entry.kind {
                            EntryKind::File { content, is_secret } => Some(File { content, is_secret: *is_secret }),
                            EntryKind::Directory | EntryKind::Link(_) => None,
                        };
                        add(path, attributes, file);
                    }
                }
            }
        }
    }
    items
}

/// The path by which containers find a file or directory; none for links and for the generation's directory, which only lead
/// to files.
fn path_in_containers<'a>(entry: &'a RenderedEntry<'_>) -> Option<&'a str> {
    match &entry.kind {
        EntryKind::Link(_) => None,
        _ if entry.path == GENERATION => None,
        _ => Some(entry.path.strip_prefix(GENERATION).map_or(entry.path.as_str(), |path| path.trim_start_matches('/'))),
    }
}

fn write_item(text: &mut String, path: &str, before: Option<&Item<'_>>, after: Option<&Item<'_>>, reveal: bool) {
    let side = |item: Option<&Item<'_>>| item.map_or("/dev/null".to_owned(), |_| path.to_owned());
    *text += &format!("--- {}\n+++ {}\n", side(before), side(after));
    let attributes = |item: Option<&Item<'_>>| item.map(|item| item.attributes.clone());
    match (attributes(before), attributes(after)) {
        (before, after) if before == after => {}
        (before, after) => {
            for (sign, attributes) in [('-', before), ('+', after)] {
                if let Some(attributes) = attributes {
                    *text += &format!("{sign}[{attributes}]\n");
                }
            }
        }
    }
    let files = [before, after].map(|item| item.and_then(|item| item.file.as_ref()));
    let [before, after] = files.map(|file| file.map_or(&b""[..], |file| file.content));
    if before == after {
        return;
    }
    let is_hidden = !reveal && files.iter().flatten().any(|file| file.is_secret);
    match (str::from_utf8(before), str::from_utf8(after)) {
        (Ok(before), Ok(after)) if !is_hidden => hunks(before, after).iter().for_each(|hunk| write_hunk(text, hunk)),
        (old, new) => {
            let note = if is_hidden || old.is_ok() && new.is_ok() { "" } else { ", not text" };
            for (sign, file) in [('-', files[0]), ('+', files[1])] {
                if let Some(file) = file {
                    *text += &format!("{sign}<{} bytes{note}>\n", file.content.len());
                }
            }
        }
    }
}

fn write_hunk(text: &mut String, hunk: &Hunk<'_>) {
    // In a unified diff, a side without lines has the number of the line before the hunk.
    let side = |first: usize, count: usize| format!("{},{count}", if count == 0 { first } else { first + 1 });
    let (old, new) = (side(hunk.old, hunk.old_count()), side(hunk.new, hunk.new_count()));
    *text += &format!("@@ -{old} +{new} @@\n");
    for (sign, line) in &hunk.lines {
        text.push(*sign);
        *text += line;
        if !line.ends_with('\n') {
            *text += "\n\\ No newline at end of file\n";
        }
    }
}
