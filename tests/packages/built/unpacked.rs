//! The content of packages, unpacked into a directory.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use tempfile::TempDir;

use crate::common::packages::{packages, stdout_of};

/// The files of the two Debian packages, in one directory.
pub struct Unpacked(TempDir);

impl Unpacked {
    pub fn debian() -> Self {
        let tree = TempDir::with_prefix_in("podfs-test-", env!("CARGO_TARGET_TMPDIR")).expect("a directory");
        for package in [&packages().deb, &packages().dbgsym] {
            stdout_of(Command::new("dpkg-deb").arg("--extract").arg(package).arg(tree.path()));
        }
        Self(tree)
    }

    pub fn path(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    pub fn read(&self, path: &str) -> String {
        fs::read_to_string(self.path(path)).expect("a text")
    }

    /// The file of symbols of a program, found by the program's build id.
    pub fn symbols(&self, program: &str) -> PathBuf {
        let notes = stdout_of(Command::new("readelf").arg("--notes").arg(self.path(program)));
        let id = notes.lines().find_map(|line| line.trim().strip_prefix("Build ID: ")).expect("a build id");
        self.path(&format!("usr/lib/debug/.build-id/{}/{}.debug", &id[..2], &id[2..]))
    }
}
