//! Public test suites in an NFS volume: pjdfstest, which tests that system calls conform to POSIX, and fsx, which tests the
//! content of a file after random operations. The test with pjdfstest also runs the suite in the exported directory: a test
//! that passes there must pass through the mount. `tests/run` installs the suites.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::mounted::{Mounted, Tmpfs};
use crate::nfs_rig::Ganesha;
use crate::suites::{Ended, Exercise, assert_passes_as_well};

/// Tests of pjdfstest that pass in the exported directory, but need not pass through the mount, each with its reason.
const EXCLUDED: &[(&str, &str)] = &[
    ("link::link_count_max", "pathconf goes by the type of a file system and knows no LINK_MAX of FUSE"),
    ("utimensat::follow_symlink", "ganesha reads a link once more after its times were set, which sets its atime"),
    ("utimensat::y2038", "NFSv3 counts seconds until 2106, and the test sets a later time"),
];

/// All features of NFSv3. Tests that remount are left out: they would make the host's disk read-only for a while. The naps are
/// longer than a tick of the kernel's clock.
const PJDFSTEST: &str = r#"
[features]
rename_ctime = {}
utime_now = {}
utimensat = {}
[settings]
naptime = 0.01
[dummy_auth]
entries = [["nobody", "nogroup"], ["daemon", "daemon"]]
"#;

#[test]
fn every_test_of_pjdfstest_that_passes_in_the_exported_directory_passes_through_the_mount() {
    let server = Ganesha::start();
    let on_server = server.exported().join("native");
    fs::create_dir(&on_server).expect("created");
    let expected = pjdfstest(&on_server);
    let mounted = Mounted::new(&server).shown();
    let in_mount = mounted.path().join("mounted");
    fs::create_dir(&in_mount).expect("created");
    assert_passes_as_well(&expected, &pjdfstest(&in_mount), 300, EXCLUDED);
}

fn pjdfstest(directory: &Path) -> BTreeMap<String, Ended> {
    // pjdfstest runs some calls as other users, which need access to the directory and its parents.
    let temporary = std::env::temp_dir();
    let parents = directory.ancestors().skip(1);
    for parent in parents.take_while(|parent| parent.starts_with(&temporary) && *parent != temporary) {
        let _ = fs::set_permissions(parent, fs::Permissions::from_mode(0o755));
    }
    fs::set_permissions(directory, fs::Permissions::from_mode(0o755)).expect("the mode is set");
    crate::suites::pjdfstest(PJDFSTEST, directory, Tmpfs::new().path())
}

#[test]
fn fsx_finds_nothing_in_buffered_reads_and_writes() {
    fsx("", BUFFERED, &[1, 2], 4_000);
}

#[test]
fn fsx_finds_nothing_in_mappings_mixed_with_reads_and_writes() {
    fsx("nomsyncafterwrite = true\n", MAPPED, &[3, 4], 4_000);
    fsx("", MAPPED, &[5], 1_000);
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
sendfile = 1
";

#[track_caller]
fn fsx(options: &str, weights: &str, seeds: &'static [u64], operations: u32) {
    let exercise =
        Exercise { configuration: format!("{options}{weights}"), seeds, operations, environment: Vec::new() };
    let server = Ganesha::start();
    let mounted = Mounted::new(&server).shown();
    for seed in exercise.seeds {
        println!("fsx: seed {seed}");
        exercise.run(mounted.path(), *seed);
    }
}
