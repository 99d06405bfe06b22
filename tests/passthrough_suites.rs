//! Public suites through a passthrough mount: pjdfstest, which knows what POSIX says of every call, and
//! fsx, which knows what a file must hold after any sequence of them. Both run on the disk too, in the
//! same test: what passes there passes through the mount. `tests/run` installs them.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use common::passthrough::{Mounted, disk_directory};
use common::scratch::Scratch;

/// Tests of pjdfstest that pass on the disk and need not pass through the mount, each with its reason.
const EXCLUDED: &[(&str, &str)] = &[(
    "link::link_count_max",
    "pathconf goes by the type of a file system and knows no LINK_MAX of FUSE; EMLINK has a test among those of names",
)];

/// Everything Linux has. Remounts are left out: they would make the disk itself read-only for a while.
/// The naps are longer than a tick of the kernel's clock.
const PJDFSTEST: &str = r#"
[features]
posix_fallocate = {}
rename_ctime = {}
utime_now = {}
utimensat = {}
[settings]
naptime = 0.01
[dummy_auth]
entries = [["nobody", "nogroup"], ["daemon", "daemon"]]
"#;

#[test]
fn every_test_of_pjdfstest_that_passes_on_the_disk_passes_through_the_mount() {
    let (native, mounted) = (disk_directory(), Mounted::new());
    let expected = pjdfstest(native.path());
    let passing = expected.iter().filter(|(_, test)| test.passed).map(|(name, _)| name);
    let passing: Vec<_> = passing.filter(|name| !EXCLUDED.iter().any(|(excluded, _)| excluded == name)).collect();
    assert!(passing.len() > 350, "pjdfstest hardly runs on the disk: {} tests pass", passing.len());

    let through = pjdfstest(mounted.path());
    let failing = passing.iter().filter(|name| !through.get(**name).is_some_and(|test| test.passed));
    let failing: Vec<_> =
        failing.map(|name| format!("{name}: {}", through.get(*name).map_or("not run", |test| &test.output))).collect();
    assert!(failing.is_empty(), "{} fail through the mount:\n{}", failing.len(), failing.join("\n"));
}

/// How a test of pjdfstest ended, and what it said.
struct Ended {
    passed: bool,
    output: String,
}

/// Runs all of pjdfstest in `directory`, with a tmpfs as the second file system it asks for.
fn pjdfstest(directory: &Path) -> BTreeMap<String, Ended> {
    let (other, beside) = (Scratch::tmpfs("size=1m"), TempDir::new().expect("a directory"));
    let configuration = beside.path().join("pjdfstest.toml");
    fs::write(&configuration, PJDFSTEST).expect("written");
    // It becomes other users, who need a way in.
    let directory = Scratch::bind(directory);
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).expect("the mode is set");
    let output = Command::new(suite("pjdfstest"))
        .arg("--configuration-file")
        .arg(&configuration)
        .arg("--path")
        .arg(directory.path())
        .arg("--secondary-fs")
        .arg(other.path())
        .output()
        .expect("pjdfstest runs");
    parse(&String::from_utf8_lossy(&output.stdout))
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

#[test]
fn fsx_finds_nothing_in_buffered_reads_and_writes() {
    fsx(&Exercise { weights: BUFFERED, options: "", seeds: &[1, 2], operations: 25_000, direct: false });
}

#[test]
fn fsx_finds_nothing_in_mappings_mixed_with_reads_and_writes() {
    let options = "nomsyncafterwrite = true\n";
    fsx(&Exercise { weights: MAPPED, options, seeds: &[3, 4], operations: 20_000, direct: false });
    fsx(&Exercise { weights: MAPPED, options: "", seeds: &[5], operations: 2_000, direct: false });
}

#[test]
fn fsx_finds_nothing_in_direct_reads_and_writes() {
    fsx(&Exercise {
        weights: DIRECT,
        options: "[opsize]\nalign = 4096\n",
        seeds: &[6],
        operations: 10_000,
        direct: true,
    });
}

const BUFFERED: &str = "
[weights]
close_open = 2
read = 10
write = 10
mapread = 0
mapwrite = 0
truncate = 5
fsync = 0.05
fdatasync = 0.05
posix_fallocate = 3
punch_hole = 3
sendfile = 3
posix_fadvise = 1
copy_file_range = 3
";

const MAPPED: &str = "
[weights]
close_open = 1
invalidate = 1
read = 5
write = 5
mapread = 10
mapwrite = 10
truncate = 5
fsync = 0.05
posix_fallocate = 1
punch_hole = 1
sendfile = 1
";

const DIRECT: &str = "
[weights]
close_open = 1
read = 10
write = 10
mapread = 1
mapwrite = 1
truncate = 2
punch_hole = 1
";

/// Sequences of operations on one file, the same ones on the disk and through the mounts.
struct Exercise {
    weights: &'static str,
    options: &'static str,
    seeds: &'static [u64],
    operations: u32,
    direct: bool,
}

#[track_caller]
fn fsx(exercise: &Exercise) {
    let (native, mounted, limited) = (disk_directory(), Mounted::new(), Mounted::with_limit(1 << 30));
    let places = [
        ("the disk", native.path()),
        ("a mount", mounted.path()),
        ("a mount whose server reads and writes", limited.path()),
    ];
    for (seed, (place, directory)) in exercise.seeds.iter().flat_map(|seed| places.map(|place| (seed, place))) {
        println!("fsx on {place}: {} operations, seed {seed}", exercise.operations);
        exercise.run(directory, *seed);
    }
}

#[test]
fn fsx_finds_nothing_where_nothing_may_be_cached() {
    let source = disk_directory();
    let mounted = Mounted::of_with_limit(source.path(), 1 << 30);
    let exercise = Exercise { weights: BUFFERED, options: "", seeds: &[7], operations: 10_000, direct: false };
    exercise.run(mounted.path(), exercise.seeds[0]);
}

impl Exercise {
    #[track_caller]
    fn run(&self, directory: &Path, seed: u64) {
        let beside = TempDir::new().expect("a directory");
        let configuration = beside.path().join("fsx.toml");
        fs::write(&configuration, format!("{}{}", self.options, self.weights)).expect("written");
        let mut command = Command::new(suite("fsx"));
        if self.direct {
            command.env("LD_PRELOAD", direct_library(beside.path()));
        }
        command.arg("-f").arg(&configuration).args(["-N", &self.operations.to_string(), "-S", &seed.to_string()]);
        let output = command.arg("-P").arg(beside.path()).arg(directory.join("file")).output().expect("fsx runs");
        let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.contains("A-OK"), "seed {seed}, {}: {said}", directory.display());
    }
}

/// Compiles what lets fsx use `O_DIRECT`.
fn direct_library(directory: &Path) -> PathBuf {
    let library = directory.join("direct.so");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/peers/direct.c");
    let status = Command::new("gcc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(source).status();
    assert!(status.expect("gcc runs").success());
    library
}

/// A program that `tests/run` installs beside the build.
fn suite(name: &str) -> PathBuf {
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("suites").join("bin").join(name);
    assert!(program.exists(), "{} is missing: tests/run installs it", program.display());
    program
}
