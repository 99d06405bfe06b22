//! podfs on an old kernel: a virtual machine with Debian's Linux 6.1, where podfs uses fallbacks for missing features
//! of the kernel.
//!
//! The guest runs this test program, with the tests of [`guest`], which the host ignores. One boot runs all tests.

mod guest;

use std::path::Path;

use crate::common::{PODFS, PODFS_FUSE};
use crate::machine::{Guest, Linux, Machine};

/// The tests that run in the guest.
const TESTS: &str = "old_kernel::guest";

#[test]
fn podfs_works_on_debians_linux_6_1() {
    let Some(machine) = Machine::find_or_skip(Linux::V6_1, "podfs_works_on_debians_linux_6_1") else { return };
    let mut guest = Guest::new(&machine);
    guest.directory(Path::new(env!("CARGO_TARGET_TMPDIR")));
    guest.module("fuse");
    guest.program(Path::new(PODFS), PODFS);
    guest.program(Path::new(PODFS_FUSE), PODFS_FUSE);
    guest.test_program();
    guest.run(&format!("/tests {TESTS} --ignored --test-threads=1")).assert_all_passed(TESTS);
}
