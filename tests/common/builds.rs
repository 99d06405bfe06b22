//! Two builds of podfs of different version, and the place on disk where one of them is.

use std::fs;
use std::path::{Path, PathBuf};

use super::outcome::{Outcome, finish};
use super::{Fixture, PODFS, Running};

/// The version that this build tells.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Programs in the directory of a fixture.
pub struct Builds {
    directory: PathBuf,
    versions: [String; 2],
    /// Which of them is on disk.
    current: usize,
}

impl Builds {
    /// This build, and one that differs only in the version it tells. The first is on disk.
    pub fn new(fixture: &Fixture) -> Self {
        let directory = fixture.path("builds");
        fs::create_dir(&directory).expect("a directory");
        let program = fs::read(PODFS).expect("a program");
        let (other, other_program) = other_build(&program);
        let builds = Self { directory, versions: [VERSION.to_owned(), other], current: 0 };
        builds.write(&builds.name(0), &program);
        builds.write(&builds.name(1), &other_program);
        builds.put(&builds.last());
        builds
    }

    /// Where podfs is on disk.
    pub fn program(&self) -> PathBuf {
        self.path("podfs")
    }

    /// Starts the podfs on disk, and waits until it is ready.
    pub fn run(&self, fixture: &Fixture) -> Running {
        let mut running = fixture.start_command(fixture.command_of(&self.program()));
        running.wait_ready();
        running
    }

    /// Puts this program in the place of the one on disk.
    pub fn put(&self, program: &Path) {
        let new = self.path(".new");
        fs::hard_link(program, &new).expect("a link");
        fs::rename(new, self.program()).expect("renamed");
    }

    /// Puts this script in the place of the program on disk.
    pub fn put_script(&self, text: &str) {
        self.write("script", format!("#!/bin/sh\n{text}\n").as_bytes());
        self.put(&self.path("script"));
    }

    /// The build that was on disk last, whatever is there now.
    pub fn last(&self) -> PathBuf {
        self.path(&self.name(self.current))
    }

    /// Puts the other build on disk, and lets the pods of the fixture go on as that.
    #[track_caller]
    pub fn upgrade(&mut self, fixture: &Fixture) {
        self.current = 1 - self.current;
        self.put(&self.last());
        let outcome = upgrade(fixture);
        let told = format!("done, podfs {} serves it", self.versions[self.current]);
        assert!(outcome.code == Some(0) && outcome.stdout.contains(&told), "{}{}", outcome.stdout, outcome.stderr);
    }

    /// It begins as the names of all podfs' processes do.
    fn name(&self, build: usize) -> String {
        format!("podfs-{}", self.versions[build])
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    fn write(&self, name: &str, content: &[u8]) {
        use std::os::unix::fs::PermissionsExt;
        fs::write(self.path(name), content).expect("written");
        fs::set_permissions(self.path(name), fs::Permissions::from_mode(0o755)).expect("a program");
    }
}

/// `podfs upgrade` of all pods of the fixture.
#[track_caller]
pub fn upgrade(fixture: &Fixture) -> Outcome {
    finish(fixture.operator("upgrade").arg("--all"))
}

/// A build that differs from this one only in the version it tells, and that version.
pub fn other_build(program: &[u8]) -> (String, Vec<u8>) {
    let (version, mut other) = (another(VERSION), program.to_owned());
    replace(&mut other, VERSION.as_bytes(), version.as_bytes());
    (version, other)
}

/// A version that is as long, so that it fits where the first one is written.
fn another(version: &str) -> String {
    let (rest, last) = version.split_at(version.len() - 1);
    format!("{rest}{}", if last == "9" { "8" } else { "9" })
}

fn replace(bytes: &mut [u8], from: &[u8], to: &[u8]) {
    let mut at = 0;
    while at + from.len() <= bytes.len() {
        if bytes[at] == from[0] && bytes[at..].starts_with(from) {
            bytes[at..at + to.len()].copy_from_slice(to);
        }
        at += 1;
    }
}
