//! The copyright file has every crate, with its licence and its copyright holders.

use std::collections::BTreeSet;
use std::process::Command;

use crate::built::unpacked::Unpacked;
use crate::common::packages::{stdout_of, top};

#[test]
fn every_crate_in_the_program_is_in_the_copyright_file() {
    let copyright = Unpacked::debian().read("usr/share/doc/podfs/copyright");
    let tree = ["tree", "--locked", "--package=podfs", "--edges=normal", "--prefix=none", "--format={p}"];
    let tree = stdout_of(Command::new(env!("CARGO")).args(tree).current_dir(top()));
    let crates: BTreeSet<_> = tree.lines().filter(|line| !line.contains(" (/")).map(directory_name).collect();
    assert!(crates.len() > 150, "these are not all crates: {crates:?}");
    let listed: BTreeSet<_> = copyright.lines().filter_map(|line| line.strip_prefix("Files: crates/")).collect();
    let listed: BTreeSet<_> = listed.iter().map(|files| files.trim_end_matches("/*").to_owned()).collect();
    assert_eq!(listed, crates);
}

/// The name of a crate's directory, from a line such as `serde v1.0.0 (proc-macro)`.
fn directory_name(line: &str) -> String {
    let mut words = line.split(' ');
    let (name, version) = (words.next().expect("a name"), words.next().expect("a version"));
    format!("{name}-{}", version.trim_start_matches('v'))
}

#[test]
fn every_paragraph_of_the_copyright_file_has_holders_and_a_licence_with_a_text() {
    let copyright = Unpacked::debian().read("usr/share/doc/podfs/copyright");
    let paragraphs: Vec<_> = copyright.split("\n\n").map(str::trim).filter(|paragraph| !paragraph.is_empty()).collect();
    let texts: BTreeSet<_> = paragraphs.iter().filter_map(|paragraph| paragraph.strip_prefix("License: ")).collect();
    let texts: BTreeSet<_> = texts.iter().filter_map(|text| text.split_once('\n')).map(|(name, _)| name).collect();
    let mut used = BTreeSet::new();
    for paragraph in paragraphs.iter().filter(|paragraph| paragraph.starts_with("Files: ")) {
        let field = |name| paragraph.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        assert!(field("Copyright:").is_some_and(|holders| !holders.is_empty()), "{paragraph}");
        let licence = field("License:").unwrap_or_else(|| panic!("no licence:\n{paragraph}"));
        used.extend(
            licence.replace(',', "").split(' ').filter(|word| !matches!(*word, "and" | "or")).map(str::to_owned),
        );
    }
    assert_eq!(used.iter().map(String::as_str).collect::<BTreeSet<_>>(), texts);
}
