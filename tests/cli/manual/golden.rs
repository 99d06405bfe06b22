//! The table of golden files (`tests/golden/README.md`) names each file, and no other.

use std::collections::BTreeSet;
use std::fs;

use crate::common::packages::top;

#[test]
fn the_table_of_golden_files_names_each_of_them() {
    let directory = top().join("tests/golden");
    let table = fs::read_to_string(directory.join("README.md")).expect("a page");
    let rows = table.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").nth(1));
    let named: BTreeSet<String> = rows
        .flat_map(|files| {
            files.split(", ").filter_map(|file| Some(file.strip_prefix('`')?.trim_end_matches('`').to_owned()))
        })
        .collect();
    let files = fs::read_dir(directory).expect("a directory").map(|file| file.expect("a file").file_name());
    let files: BTreeSet<String> =
        files.map(|file| file.into_string().expect("text")).filter(|file| file != "README.md").collect();
    assert!(files.len() > 20, "these are not all: {files:?}");
    assert_eq!(named, files, "give each golden file a row in tests/golden/README.md");
}
