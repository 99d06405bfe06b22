//! Public test suites in a passthrough volume: pjdfstest, which tests that system calls conform to POSIX, and fsx,
//! which tests the content of a file after random operations. The tests also run both suites on the disk: what passes
//! there must pass through the mount. `tests/run` installs the suites. The script `tests/xfstests` runs xfstests from a
//! checkout; docs/reference/xfstests.md has the results.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::common::passthrough::{Mounted, disk_directory};
use crate::common::scratch::Scratch;
use crate::suites::{Ended, Exercise, assert_passes_as_well};

/// Tests of pjdfstest that pass on the disk, but need not pass through the mount, each with its reason.
const EXCLUDED: &[(&str, &str)] = &[(
    "link::link_count_max",
    "pathconf goes by the type of a file system and knows no LINK_MAX of FUSE; EMLINK has a test among those of names",
)];

/// All features of Linux. Tests that remount are left out: they would make the host's disk read-only for a while. The
/// naps are longer than a tick of the kernel's clock.
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
    assert_passes_as_well(&pjdfstest(native.path()), &pjdfstest(mounted.path()), 350, EXCLUDED);
}

fn pjdfstest(directory: &Path) -> BTreeMap<String, Ended> {
    // pjdfstest runs some calls as other users, which need access to the directory. A bind mount elsewhere gives them
    // this access.
    let directory = Scratch::bind(directory);
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).expect("the mode is set");
    crate::suites::pjdfstest(PJDFSTEST, directory.path(), Scratch::tmpfs("size=1m").path())
}

#[test]
fn fsx_finds_nothing_in_buffered_reads_and_writes() {
    fsx(&exercise("", BUFFERED, &[1, 2], 6_000));
}

#[test]
fn fsx_finds_nothing_in_mappings_mixed_with_reads_and_writes() {
    fsx(&exercise("nomsyncafterwrite = true\n", MAPPED, &[3, 4], 5_000));
    fsx(&exercise("", MAPPED, &[5], 1_000));
}

#[test]
fn fsx_finds_nothing_in_direct_reads_and_writes() {
    let directory = TempDir::new().expect("a directory");
    let environment = vec![("LD_PRELOAD", direct_library(directory.path()))];
    fsx(&Exercise { environment, ..exercise("[opsize]\nalign = 4096\n", DIRECT, &[6], 3_000) });
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

fn exercise(options: &str, weights: &str, seeds: &'static [u64], operations: u32) -> Exercise {
    Exercise { configuration: format!("{options}{weights}"), seeds, operations, environment: Vec::new() }
}

/// Runs the same operations on the disk and through the mounts.
#[track_caller]
fn fsx(exercise: &Exercise) {
    let (native, mounted, limited) = (disk_directory(), Mounted::new(), Mounted::with_limit(1 << 30));
    let places = [
        ("the disk", native.path()),
        ("a mount", mounted.path()),
        ("a mount whose server reads and writes", limited.path()),
    ];
    for (seed, (place, directory)) in exercise.seeds.iter().flat_map(|seed| places.map(|place| (seed, place))) {
        println!("fsx on {place}: seed {seed}");
        exercise.run(directory, *seed);
    }
}

#[test]
fn fsx_finds_nothing_where_nothing_may_be_cached() {
    let source = disk_directory();
    let mounted = Mounted::of_with_limit(source.path(), 1 << 30);
    exercise("", BUFFERED, &[7], 3_000).run(mounted.path(), 7);
}

/// Compiles the preloaded library that makes fsx use `O_DIRECT`.
fn direct_library(directory: &Path) -> PathBuf {
    let library = directory.join("direct.so");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/peers/direct.c");
    let status = Command::new("gcc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(source).status();
    assert!(status.expect("gcc runs").success());
    library
}
