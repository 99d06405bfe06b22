//! Names of types mean one thing each.

use std::collections::BTreeMap;
use std::fs;

use crate::common::packages::top;
use crate::manual::source::sources;

/// The sources whose types share their names. Those of `src/cli` are named by the words that the user types.
const ROOTS: [&str; 3] = ["src", "fuse/src", "fuse/nfs/src"];
/// Fewer modules than this may define a type of one name: a volume as it is described, and as it is served.
const TOO_MANY: usize = 3;

/// The types that a source file defines, without those of its tests.
fn defined(text: &str) -> impl Iterator<Item = &str> {
    let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    code.lines().filter_map(|line| {
        let line = line.trim_start();
        let line = line.strip_prefix("pub").unwrap_or(line);
        let line = if line.starts_with('(') { line.split_once(')')?.1 } else { line };
        let kinds = ["struct ", "enum ", "trait "];
        let rest = kinds.iter().find_map(|kind| line.trim_start().strip_prefix(kind))?;
        rest.split(|letter: char| !letter.is_alphanumeric()).next().filter(|name| !name.is_empty())
    })
}

#[test]
fn no_name_of_a_type_has_three_meanings() {
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
    places.retain(|_, files| files.len() >= TOO_MANY);
    assert!(places.is_empty(), "give each meaning its own name: {places:#?}");
}
