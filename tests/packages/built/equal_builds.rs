//! The same packages come out of a copy of the tree in another directory, byte for byte.

use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::common::PODFS;
use crate::common::packages::{Packages, build, packages, told_by, top};

#[test]
fn a_copy_of_the_tree_makes_equal_packages() {
    let expected = packages();
    let copy = TempDir::with_prefix_in("podfs-test-", env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let entries = fs::read_dir(top()).expect("a directory").map(|entry| entry.expect("an entry").path());
    let entries = entries.filter(|path| !path.ends_with("target") && !path.ends_with(".git"));
    told_by(Command::new("cp").arg("--archive").args(entries).arg(copy.path()));
    // All but the tools is made anew.
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

    let made = Packages::within(&copy.path().join("made"));
    for (one, other) in expected.all().into_iter().zip(made.all()) {
        let equal = fs::read(one).expect("a package") == fs::read(other).expect("a package");
        assert!(equal, "{} and {} differ", one.display(), other.display());
    }
}

/// The program that the copy packs; none if it builds its own, which takes minutes.
fn program() -> Option<PathBuf> {
    match packages().published {
        true if reproduces() => None,
        true => Some(of_this_tree("target/packaged/podfs")),
        false => Some(PODFS.into()),
    }
}

/// The packages are those of a release, and the copy builds its programs anew.
fn reproduces() -> bool {
    packages().published && env::var_os("PODFS_TEST_REPRODUCE").is_some_and(|wanted| wanted == "1")
}

/// A file that `packaging/build` of this tree keeps.
fn of_this_tree(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("packaging").join(name)
}

/// The date that `packaging/build` of this tree takes. The copy has no history to find it in.
fn date() -> String {
    let ask = || told_by(Command::new("git").args(["log", "-1", "--format=%ct"]).current_dir(top())).trim().to_owned();
    env::var("SOURCE_DATE_EPOCH").unwrap_or_else(|_| ask())
}
