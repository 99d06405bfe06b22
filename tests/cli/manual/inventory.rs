//! `docs/reference/kubelet-inventory.md`: each row names tests that exist or gives a reason, and each id in the code has a row.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use crate::common::packages::top;

const INVENTORY: &str = include_str!("../../../docs/reference/kubelet-inventory.md");

/// The directories of sources that quote ids.
const SOURCES: [&str; 5] = ["src", "tests", "benches", "fuse/nfs/src", "fuse/src"];

struct Row<'a> {
    answer: &'a str,
    tests: Vec<&'a str>,
}

/// The rows by their ids.
fn rows() -> BTreeMap<&'static str, Row<'static>> {
    let mut rows = BTreeMap::new();
    for line in INVENTORY.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| id ")) {
        let cells: Vec<_> = line.trim_matches('|').split(" |").map(str::trim).collect();
        let [id, _behaviour, answer, tests] = cells[..] else { panic!("not four cells: {line}") };
        let tests = tests.split('`').skip(1).step_by(2).collect();
        assert!(rows.insert(id, Row { answer, tests }).is_none(), "{id} has two rows");
    }
    assert!(rows.len() > 200, "these are not all: {}", rows.len());
    rows
}

fn sources() -> Vec<String> {
    let mut files = Vec::new();
    SOURCES.iter().for_each(|directory| collect(&top().join(directory), &mut files));
    assert!(files.len() > 500, "these are not all: {}", files.len());
    files.iter().map(|file| fs::read_to_string(file).expect("a source")).collect()
}

fn collect(directory: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

/// The names of functions.
fn functions(sources: &[String]) -> BTreeSet<&str> {
    let names = sources.iter().flat_map(|source| source.split("fn ").skip(1));
    names
        .map(|text| text.split(|letter: char| !letter.is_alphanumeric() && letter != '_').next().expect("a word"))
        .collect()
}

/// Words such as `AW-14`.
fn ids(source: &str) -> impl Iterator<Item = &str> {
    let words = source.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '-');
    words.filter(|word| {
        let bytes = word.as_bytes();
        bytes.len() == 5
            && bytes[2] == b'-'
            && bytes[..2].iter().all(u8::is_ascii_uppercase)
            && bytes[3..].iter().all(u8::is_ascii_digit)
    })
}

#[test]
fn every_row_names_tests_that_exist_or_gives_a_reason() {
    let sources = sources();
    let functions = functions(&sources);
    for (id, row) in rows() {
        let unknown: Vec<_> = row.tests.iter().filter(|test| !functions.contains(**test)).collect();
        assert!(unknown.is_empty(), "{id} names tests that do not exist: {unknown:?}");
        assert!(!row.answer.is_empty(), "{id} has no answer");
        assert!(!row.tests.is_empty() || row.answer != "the same", "{id} has neither a test nor a reason");
    }
}

#[test]
fn every_id_in_the_code_has_a_row() {
    let rows = rows();
    let groups: BTreeSet<_> = rows.keys().map(|id| &id[..2]).collect();
    let sources = sources();
    let quoted: BTreeSet<_> = sources.iter().flat_map(|source| ids(source)).collect();
    let unknown: Vec<_> = quoted.iter().filter(|id| groups.contains(&id[..2]) && !rows.contains_key(**id)).collect();
    assert!(unknown.is_empty(), "the inventory has no rows for {unknown:?}");
}
