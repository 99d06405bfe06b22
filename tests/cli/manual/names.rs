//! Names of types mean one thing each.

use std::collections::BTreeMap;
use std::fs;

use crate::common::packages::top;
use crate::manual::source::sources;

/// The sources in which no two types may have one name. The types of `src/cli` are exempt: their names are the words
/// that a user types.
const ROOTS: [&str; 3] = ["src", "fuse/src", "fuse/nfs/src"];

/// The types that a source file defines, without those of its tests, and without associated types.
fn defined(text: &str) -> impl Iterator<Item = &str> {
    let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    code.lines().filter_map(|line| {
        let is_associated = line.starts_with(' ');
        let line = line.trim_start();
        let line = line.strip_prefix("pub").unwrap_or(line);
        let line = if line.starts_with('(') { line.split_once(')')?.1 } else { line };
        let line = line.trim_start().trim_start_matches("unsafe ");
        let kinds = ["struct ", "enum ", "trait ", "union ", "type "];
        let (kind, definition) = kinds.iter().find_map(|kind| Some((kind, line.strip_prefix(kind)?)))?;
        if *kind == "type " && is_associated {
            return None;
        }
        definition.split(|letter: char| !letter.is_alphanumeric()).next().filter(|name| !name.is_empty())
    })
}

#[test]
fn a_name_of_a_type_has_one_meaning() {
    let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for file in ROOTS.iter().flat_map(|root| sources(&top().join(root))) {
        let path = file.strip_prefix(top()).expect("below").display().to_string();
        if path.starts_with("src/cli/") {
            continue;
        }
        for name in defined(&fs::read_to_string(&file).expect("a source")) {
            places.entry(name.to_owned()).or_default().push(path.clone());
        }
    }
    assert!(places.len() > 1000, "only {} types were found", places.len());
    places.retain(|_, files| files.len() > 1);
    assert!(places.is_empty(), "give each meaning its own name: {places:#?}");
}
