//! Packages, unpacked without being installed.

use std::fs;
use std::path::{Path, PathBuf};
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

    pub fn program(&self) -> PathBuf {
        self.path("usr/bin/podfs")
    }

    /// The only file of symbols, wherever the package of symbols has it.
    pub fn symbols(&self) -> PathBuf {
        let only = |directory: &Path| {
            let mut entries = fs::read_dir(directory).expect("a directory");
            let entry = entries.next().expect("an entry").expect("an entry");
            assert!(entries.next().is_none(), "{} has several entries", directory.display());
            entry.path()
        };
        only(&only(&self.path("usr/lib/debug/.build-id")))
    }
}
