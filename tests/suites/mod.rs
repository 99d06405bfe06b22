//! Public suites for file systems, which `tests/run` installs: pjdfstest, which knows what POSIX says of every call, and fsx,
//! which knows what a file must hold after any sequence of them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use tempfile::TempDir;

/// The result and the output of a test of pjdfstest.
pub struct Ended {
    passed: bool,
    output: String,
}

/// Runs all of pjdfstest in `directory`, which other users can reach. `other` is the directory on a second file system that
/// pjdfstest needs.
pub fn pjdfstest(configuration: &str, directory: &Path, other: &Path) -> BTreeMap<String, Ended> {
    let beside = TempDir::new().expect("a directory");
    let file = beside.path().join("pjdfstest.toml");
    fs::write(&file, configuration).expect("written");
    let mut command = Command::new(suite("pjdfstest"));
    command.arg("--configuration-file").arg(&file).arg("--path").arg(directory).arg("--secondary-fs").arg(other);
    let output = command.output().expect("pjdfstest runs");
    parse(&String::from_utf8_lossy(&output.stdout))
}

/// Checks that more than `least` tests pass natively, and that all of these pass on the mount. Ignores the excluded tests.
#[track_caller]
pub fn assert_passes_as_well(
    native: &BTreeMap<String, Ended>,
    mounted: &BTreeMap<String, Ended>,
    least: usize,
    excluded: &[(&str, &str)],
) {
    let passing = native.iter().filter(|(_, test)| test.passed).map(|(name, _)| name);
    let passing: Vec<_> = passing.filter(|name| !excluded.iter().any(|(excluded, _)| excluded == name)).collect();
    assert!(passing.len() > least, "pjdfstest hardly runs without the mount: {} tests pass", passing.len());
    let failing = passing.iter().filter(|name| !mounted.get(**name).is_some_and(|test| test.passed));
    let failing: Vec<_> =
        failing.map(|name| format!("{name}: {}", mounted.get(*name).map_or("not run", |test| &test.output))).collect();
    assert!(failing.is_empty(), "{} fail through the mount:\n{}", failing.len(), failing.join("\n"));
}

/// `<name>   ok|skipped|FAILED`, and lines that start with a tab.
fn parse(report: &str) -> BTreeMap<String, Ended> {
    let mut tests = BTreeMap::<String, Ended>::new();
    let mut last = String::new();
    for line in report.lines() {
        if let [name, end @ ("ok" | "FAILED" | "skipped")] = line.split_whitespace().collect::<Vec<_>>()[..] {
            tests.insert(name.to_owned(), Ended { passed: end == "ok", output: String::new() });
            name.clone_into(&mut last);
        } else if let Some(test) = tests.get_mut(&last) {
            test.output += line.trim_start();
        }
    }
    tests
}

/// Sequences of operations on one file.
pub struct Exercise {
    /// The configuration of fsx, such as the weight of each operation.
    pub configuration: String,
    /// The seeds of the sequences.
    pub seeds: &'static [u64],
    /// The number of operations in each sequence, times `PODFS_SOAK_FSX` (default 1).
    pub operations: u32,
    /// Further environment variables of fsx.
    pub environment: Vec<(&'static str, PathBuf)>,
}

impl Exercise {
    /// Runs the sequence of this seed on a file in `directory`.
    #[track_caller]
    pub fn run(&self, directory: &Path, seed: u64) {
        let beside = TempDir::new().expect("a directory");
        let configuration = beside.path().join("fsx.toml");
        fs::write(&configuration, &self.configuration).expect("written");
        let mut command = Command::new(suite("fsx"));
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command.arg("-f").arg(&configuration).arg("-P").arg(beside.path());
        let times: u32 = env::var("PODFS_SOAK_FSX").map_or(1, |times| times.parse().expect("a number"));
        let operations = self.operations * times;
        command.args(["-S", &seed.to_string(), "-N", &operations.to_string()]).arg(directory.join("file"));
        let output = command.output().expect("fsx runs");
        let report = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && report.contains("A-OK"), "seed {seed}: {report}");
    }
}

/// A program that `tests/run` has installed.
fn suite(name: &str) -> PathBuf {
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("../suites/bin").join(name);
    assert!(program.exists(), "{} is missing; tests/run installs it", program.display());
    program
}
