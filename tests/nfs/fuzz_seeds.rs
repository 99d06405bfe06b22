//! The seeds of the fuzz targets are well-formed, each for its target. A target refuses a malformed seed at once, and
//! `fuse/fuzz/run` does not notice it.
//!
//! The targets are functions of the crate `fuse/fuzz`, which is not in the workspace of podfs; so this file includes their
//! source.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

#[path = "../../fuse/fuzz/src/lib.rs"]
mod fuzz;

type Target = fn(&[u8]) -> bool;

const TARGETS: [(&str, Target); 4] = [
    ("mount", fuzz::mount::look),
    ("record", fuzz::record::look),
    ("reply", fuzz::reply::look),
    ("results", fuzz::results::look),
];

/// The names of the entries of a directory of `fuse/fuzz`.
fn names(directory: &str) -> BTreeSet<String> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuse/fuzz").join(directory);
    let entries = fs::read_dir(directory).expect("a directory");
    entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("text")).collect()
}

#[test]
fn every_target_has_seeds() {
    let targets = BTreeSet::from(TARGETS.map(|(name, _)| name.to_owned()));
    assert_eq!(names("seeds"), targets);
    assert_eq!(names("fuzz_targets"), targets.iter().map(|name| format!("{name}.rs")).collect());
    assert!(targets.iter().all(|name| !names(&format!("seeds/{name}")).is_empty()));
}

#[test]
fn every_seed_is_read_to_its_end_by_its_target() {
    for (target, look) in TARGETS {
        for name in names(&format!("seeds/{target}")) {
            let path = format!("{}/fuse/fuzz/seeds/{target}/{name}", env!("CARGO_MANIFEST_DIR"));
            let seed = fs::read(path).expect("a seed");
            assert!(look(&seed), "{target} refuses {name}");
        }
    }
}
