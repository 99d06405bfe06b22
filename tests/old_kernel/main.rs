//! podfs on an old kernel: Debian's 6.1 in a virtual machine, where it works by its fallbacks.
//!
//! The guest boots this very test program, which runs the tests of [`guest`] there; on the host these are ignored.
//! One boot runs them all.

#[path = "../common/mod.rs"]
mod common;
mod guest;
#[path = "../../fuse/tests/machine/mod.rs"]
mod machine;

use std::path::Path;

use common::PODFS;
use machine::{Guest, Linux, Machine};

#[test]
fn podfs_works_on_debians_linux_6_1() {
    let Some(machine) = Machine::find_or_skip(Linux::V6_1, "podfs_works_on_debians_linux_6_1") else { return };
    let mut guest = Guest::new(&machine);
    guest.directory(Path::new(env!("CARGO_TARGET_TMPDIR")));
    guest.module("fuse");
    guest.program(Path::new(PODFS), PODFS);
    guest.test_program();
    guest.run("/tests --ignored --test-threads=1").assert_all_passed();
}
