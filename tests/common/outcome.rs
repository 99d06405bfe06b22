//! Commands that end by themselves, and the processes and mounts that remain.

use std::fs::{self, File};
use std::io::{ErrorKind, Read, Seek};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::{Fixture, TIMEOUT};

/// The outcome of a command.
pub struct Outcome {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// Starts a command. Tries again if the kernel reports that its program is open for writing: a test may have just copied the
/// program, and a process that another test has forked meanwhile has the copy open until its exec.
#[track_caller]
pub fn start(command: &mut Command) -> Child {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        match command.spawn() {
            Err(error) if error.kind() == ErrorKind::ExecutableFileBusy && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(2));
            }
            started => return started.expect("the command starts"),
        }
    }
}

/// Runs a command to its end.
#[track_caller]
pub fn finish(command: &mut Command) -> Outcome {
    finish_within(command, TIMEOUT)
}

/// Runs a command to its end, which may take this long.
#[track_caller]
pub fn finish_within(command: &mut Command, limit: Duration) -> Outcome {
    let (mut out, mut err) = (tempfile::tempfile().expect("a file"), tempfile::tempfile().expect("a file"));
    let same = |file: &File| Stdio::from(file.try_clone().expect("a descriptor"));
    let mut child = start(command.stdout(same(&out)).stderr(same(&err)));
    let deadline = Instant::now() + limit;
    let status = loop {
        match child.try_wait().expect("a child") {
            Some(status) => break Some(status),
            None if Instant::now() > deadline => break None,
            None => std::thread::sleep(Duration::from_millis(2)),
        }
    };
    if status.is_none() {
        let _ = child.kill();
        let _ = child.wait();
    }
    let (stdout, stderr) = (written(&mut out), written(&mut err));
    let status = status.unwrap_or_else(|| panic!("the command does not end by itself:\n{stderr}"));
    Outcome { code: status.code(), stdout, stderr }
}

fn written(file: &mut File) -> String {
    let mut bytes = Vec::new();
    file.rewind().expect("rewound");
    file.read_to_end(&mut bytes).expect("read");
    String::from_utf8_lossy(&bytes).into_owned()
}

impl Outcome {
    /// Checks the exit code, and that the last line of standard error is a sentence of podfs with all of `parts`.
    #[track_caller]
    pub fn says(&self, code: i32, parts: &[&str]) {
        let sentence = self.stderr.lines().last().unwrap_or_default();
        assert!(sentence.starts_with("podfs: "), "the last line is no sentence of podfs:\n{}", self.stderr);
        for part in parts {
            assert!(sentence.contains(part), "{part:?} is not in: {sentence}");
        }
        assert_eq!(self.code, Some(code), "{sentence}");
    }
}

impl Fixture {
    /// Runs a podfs that refuses its input, and checks that all of its processes have ended.
    #[track_caller]
    pub fn refused(&self, command: &mut Command) -> Outcome {
        let outcome = finish(self.mark(command).stdin(Stdio::null()));
        assert_eq!(self.processes(), [], "a process stays behind:\n{}", outcome.stderr);
        outcome
    }

    /// Checks that podfs has unmounted everything, ended its processes, and removed its directories.
    #[track_caller]
    pub fn assert_nothing_left(&self) {
        assert_eq!(self.mounts(), Vec::<PathBuf>::new());
        assert_eq!(self.processes(), []);
        for name in ["root", "run"] {
            assert_eq!(tree(&self.path(name)), Vec::<PathBuf>::new(), "{name} stays behind");
        }
    }
}

/// A path and all that is below it.
fn tree(path: &Path) -> Vec<PathBuf> {
    if path.symlink_metadata().is_err() {
        return Vec::new();
    }
    let below = fs::read_dir(path).into_iter().flatten().flatten().flat_map(|entry| tree(&entry.path()));
    [path.to_owned()].into_iter().chain(below).collect()
}
