//! Two builds of podfs with different versions, and the directory in which one of them is installed.

use std::fs;
use std::path::{Path, PathBuf};

use nix::unistd::Pid;

use super::outcome::{Outcome, finish};
use super::{Fixture, PODFS, PODFS_FUSE, PODFS_SUPERVISOR, Running};

/// The version that this build reports.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The names of the programs that belong together.
pub const PROGRAMS: [&str; 3] = ["podfs", "podfs-supervisor", "podfs-fuse"];

/// The path of a program of this build.
fn program_of(name: &str) -> &'static str {
    match name {
        "podfs" => PODFS,
        "podfs-supervisor" => PODFS_SUPERVISOR,
        _ => PODFS_FUSE,
    }
}

/// Builds in the directory of a fixture, each in a directory of its own.
pub struct Builds {
    directory: PathBuf,
    versions: [String; 2],
    /// The index of the build that is installed.
    current: usize,
}

impl Builds {
    /// This build, and one that differs only in its version. This build is installed.
    pub fn new(fixture: &Fixture) -> Self {
        Self::of(fixture, another(VERSION), |name| other_build(&fs::read(program_of(name)).expect("a program")).1)
    }

    /// This build, and one of another version with the programs in a directory. This build is installed.
    pub fn with_programs(fixture: &Fixture, version: &str, directory: &Path) -> Self {
        Self::of(fixture, version.to_owned(), |name| fs::read(directory.join(name)).expect("a program"))
    }

    /// This build, and one of another version with these programs, by their names.
    fn of(fixture: &Fixture, version: String, other: impl Fn(&str) -> Vec<u8>) -> Self {
        let directory = fixture.path("builds");
        let builds = Self { directory, versions: [VERSION.to_owned(), version], current: 0 };
        for name in PROGRAMS {
            builds.write(&builds.in_build(0).join(name), &fs::read(program_of(name)).expect("a program"));
            builds.write(&builds.in_build(1).join(name), &other(name));
        }
        fs::create_dir(builds.on_disk()).expect("a directory");
        builds.put_build(0);
        builds
    }

    /// The path of the installed podfs.
    pub fn program(&self) -> PathBuf {
        self.on_disk().join("podfs")
    }

    /// The path of the installed podfs-fuse.
    pub fn server_program(&self) -> PathBuf {
        self.on_disk().join("podfs-fuse")
    }

    /// Starts the installed podfs, and waits until it is ready.
    pub fn run(&self, fixture: &Fixture) -> Running {
        let mut running = fixture.start_command(fixture.command_of(&self.program()));
        running.wait_ready();
        running
    }

    /// Installs the programs of a build in place of the installed ones.
    fn put_build(&self, build: usize) {
        PROGRAMS.iter().for_each(|name| self.put(&self.in_build(build).join(name), name));
    }

    /// Installs a file as the program of this name.
    fn put(&self, file: &Path, name: &str) {
        let new = self.on_disk().join(".new");
        fs::hard_link(file, &new).expect("a link");
        fs::rename(&new, self.on_disk().join(name)).expect("renamed");
        // A rename from one name of a file to another name of it does nothing (rename(2)).
        let _ = fs::remove_file(new);
    }

    /// Installs the podfs of the other build, and keeps the other programs. Returns the version of that podfs.
    pub fn put_podfs_alone(&self) -> &str {
        self.put(&self.in_build(1 - self.current).join("podfs"), "podfs");
        &self.versions[1 - self.current]
    }

    /// Installs a script with this text as podfs.
    pub fn put_script(&self, text: &str) {
        let script = self.directory.join("script");
        self.write(&script, format!("#!/bin/sh\n{text}\n").as_bytes());
        self.put(&script, "podfs");
    }

    /// The version of the installed build.
    pub fn version(&self) -> &str {
        &self.versions[self.current]
    }

    /// The podfs of the build that is not installed.
    pub fn other_program(&self) -> PathBuf {
        self.in_build(1 - self.current).join("podfs")
    }

    /// The podfs of the build that was installed last, whatever the test has put in its place since.
    pub fn last(&self) -> PathBuf {
        self.in_build(self.current).join("podfs")
    }

    /// Installs the other build.
    pub fn put_other(&mut self) {
        self.current = 1 - self.current;
        self.put_build(self.current);
    }

    /// Installs the other build, and upgrades the pods of the fixture to it.
    #[track_caller]
    pub fn upgrade(&mut self, fixture: &Fixture) {
        self.put_other();
        let _shown = ThreadsShown(fixture);
        let outcome = upgrade(fixture);
        let line = format!("done, podfs {} serves it", self.versions[self.current]);
        assert!(outcome.code == Some(0) && outcome.stdout.contains(&line), "{}{}", outcome.stdout, outcome.stderr);
    }

    /// The directory of the installed programs.
    fn on_disk(&self) -> PathBuf {
        self.directory.join("disk")
    }

    fn in_build(&self, build: usize) -> PathBuf {
        self.directory.join(&self.versions[build])
    }

    fn write(&self, path: &Path, content: &[u8]) {
        use std::os::unix::fs::PermissionsExt;
        fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
        fs::write(path, content).expect("written");
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("a program");
    }
}

/// `podfs upgrade` of all pods of the fixture.
#[track_caller]
pub fn upgrade(fixture: &Fixture) -> Outcome {
    finish(fixture.operator("upgrade").arg("--all"))
}

/// Prints what the processes of the fixture do when a test fails: a supervisor that does not answer is slow, or waits for something.
struct ThreadsShown<'a>(&'a Fixture);

impl Drop for ThreadsShown<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.processes().into_iter().for_each(|process| println!("{}", threads_of(process)));
        }
    }
}

/// What each thread of a process does: its name and state, the system call and the place in the kernel in which it waits.
fn threads_of(process: Pid) -> String {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    let describe = |task: fs::DirEntry| {
        let read = |name: &str| fs::read_to_string(task.path().join(name)).unwrap_or_default();
        let state = read("stat").rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()).unwrap_or('?');
        let (name, call, place) = (read("comm"), read("syscall"), read("stack"));
        format!("{process} {} {state} {}\n{place}", name.trim(), call.trim())
    };
    tasks.map(describe).collect()
}

/// Another version, and a copy of the program of this build that differs only in having that version.
pub fn other_build(program: &[u8]) -> (String, Vec<u8>) {
    let (version, mut other) = (another(VERSION), program.to_owned());
    replace(&mut other, VERSION.as_bytes(), version.as_bytes());
    (version, other)
}

/// Another version of the same length, so that it fits into the program in place of the first one.
pub fn another(version: &str) -> String {
    let (start, last) = version.split_at(version.len() - 1);
    format!("{start}{}", if last == "9" { "8" } else { "9" })
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
