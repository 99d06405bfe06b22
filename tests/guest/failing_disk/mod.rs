//! Local PersistentVolumes on a disk that fails. The tests need device mapper, which the host may lack, so they run in a
//! virtual machine.
//!
//! The guest runs this test program, with the tests of [`guest`], which the host ignores. The disk is a RAM disk of the guest
//! behind a table of device mapper, which says where reads and writes fail. The tests do not cover other faults of a dying
//! disk, such as late answers or wrong data.

mod guest;

use std::path::Path;

use crate::common::{PODFS, PODFS_FUSE};
use crate::machine::{Guest, Linux, Machine, skipped};

/// The tests that run in the guest.
const TESTS: &str = "failing_disk::guest";
const TEST: &str = "podfs_reports_a_disk_that_fails_and_formats_nothing_over_it";
/// The programs that podfs and the tests start in the guest.
const PROGRAMS: [&str; 6] = [
    "/usr/sbin/dmsetup",
    "/usr/sbin/blkid",
    "/usr/sbin/fsck",
    "/usr/sbin/fsck.ext4",
    "/usr/sbin/mkfs.ext4",
    "/usr/sbin/e2fsck",
];
const MODULES: [&str; 6] = ["fuse", "brd", "dm_mod", "dm_flakey", "ext4", "crc32c_generic"];

#[test]
fn podfs_reports_a_disk_that_fails_and_formats_nothing_over_it() {
    let Some(machine) = Machine::find_or_skip(Linux::V6_1, TEST) else { return };
    let mut guest = Guest::new(&machine);
    guest.directory(Path::new(env!("CARGO_TARGET_TMPDIR")));
    if let Some(missing) = PROGRAMS.iter().find(|program| !Path::new(program).exists()) {
        return skipped(TEST, &format!("there is no {missing}"));
    }
    PROGRAMS.iter().for_each(|program| guest.program(Path::new(program), program));
    guest.copy(Path::new("/etc/mke2fs.conf"), "/etc/mke2fs.conf");
    MODULES.iter().for_each(|module| guest.module(module));
    guest.program(Path::new(PODFS), PODFS);
    guest.program(Path::new(PODFS_FUSE), PODFS_FUSE);
    guest.test_program();
    // `/usr/sbin` comes first: busybox has programs of the same names.
    guest.run(&format!("PATH=/usr/sbin:$PATH /tests {TESTS} --ignored --test-threads=1")).assert_all_passed(TESTS);
}
