//! A build from a copy of the tree in another directory makes the same packages, byte for byte.

use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::common::PODFS;
use crate::common::packages::{Packages, build, packages, stdout_of, top};

#[test]
fn a_copy_of_the_tree_makes_equal_packages() {
    let expected = packages();
    let copy = TempDir::with_prefix_in("podfs-test-", env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let entries = fs::read_dir(top()).expect("a directory").map(|entry| entry.expect("an entry").path());
    let entries = entries.filter(|path| !path.ends_with("target") && !path.ends_with(".git"));
    stdout_of(Command::new("cp").arg("--archive").args(entries).arg(copy.path()));
    // The copy uses the downloaded tools of this tree, and makes everything else again.
    let packaging = copy.path().join("target/packaging");
    fs::create_dir_all(&packaging).expect("a directory");
    symlink(of_this_tree("tools"), packaging.join("tools")).expect("a link");

    let mut command = Command::new(copy.path().join("packaging/build"));
    command.args(["--output", "made"]).env_remove("CARGO_TARGET_DIR").env("SOURCE_DATE_EPOCH", date());
    if let Some(program) = program() {
        command.arg("--program").arg(program);
    }
    if !reproduces() {
        command.arg("--fast");
    }
    build(copy.path(), &mut command);

    let from_copy = Packages::within(&copy.path().join("made"));
    for (expected, actual) in expected.all().into_iter().zip(from_copy.all()) {
        let is_equal = fs::read(expected).expect("a package") == fs::read(actual).expect("a package");
        assert!(is_equal, "{} and {} differ", expected.display(), actual.display());
    }
}

/// The program that the copy packs; `None` if the copy builds the program itself, which takes minutes.
fn program() -> Option<PathBuf> {
    (!reproduces()).then(|| PODFS.into())
}

/// Whether the copy builds its programs again, to compare them with those of a release.
fn reproduces() -> bool {
    packages().published && env::var_os("PODFS_TEST_REPRODUCE").is_some_and(|wanted| wanted == "1")
}

/// A file that `packaging/build` of this tree has made.
fn of_this_tree(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("packaging").join(name)
}

/// The date that `packaging/build` of this tree uses. The copy cannot determine it, because it has no Git history.
fn date() -> String {
    let last_commit =
        || stdout_of(Command::new("git").args(["log", "-1", "--format=%ct"]).current_dir(top())).trim().to_owned();
    env::var("SOURCE_DATE_EPOCH").unwrap_or_else(|_| last_commit())
}
