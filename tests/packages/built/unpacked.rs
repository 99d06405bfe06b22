//! Packages, unpacked without being installed.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use tempfile::TempDir;

use crate::common::packages::{packages, told_by};

/// The files of the two Debian packages, in one tree.
pub struct Unpacked(TempDir);

impl Unpacked {
    pub fn debian() -> Self {
        let tree = TempDir::with_prefix_in("podfs-test-", env!("CARGO_TARGET_TMPDIR")).expect("a directory");
        for package in [&packages().deb, &packages().dbgsym] {
            told_by(Command::new("dpkg-deb").arg("--extract").arg(package).arg(tree.path()));
        }
        Self(tree)
    }

    pub fn path(&self, inside: &str) -> PathBuf {
        self.0.path().join(inside)
    }

    pub fn read(&self, inside: &str) -> String {
        fs::read_to_string(self.path(inside)).expect("a text")
    }

    /// The file of symbols of a program, found by the program's build id.
    pub fn symbols(&self, program: &str) -> PathBuf {
        let notes = told_by(Command::new("readelf").arg("--notes").arg(self.path(program)));
        let id = notes.lines().find_map(|line| line.trim().strip_prefix("Build ID: ")).expect("a build id");
        self.path(&format!("usr/lib/debug/.build-id/{}/{}.debug", &id[..2], &id[2..]))
    }
}
