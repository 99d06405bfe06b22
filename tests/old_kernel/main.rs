//! podfs on an old kernel: Debian's 6.1 in a virtual machine, where it works by its fallbacks.
//!
//! The guest boots this very test program, which runs the tests of [`guest`] there; on the host these are ignored.
//! One boot runs them all. `tests/run` fetches the kernel and QEMU; where there are none, the test is skipped.
//!
//! | module | owns |
//! |---|---|
//! | [`machine`] | kernel and QEMU: found, booted, ended |
//! | [`initramfs`] | the files that the guest starts with |
//! | [`guest`] | what is tested there |

#[path = "../common/mod.rs"]
mod common;
mod guest;
mod initramfs;
mod machine;

use std::env::current_exe;
use std::io::{Write, stderr};
use std::process::Command;

use machine::{Ended, Machine};

#[test]
fn podfs_works_on_debians_linux_6_1() {
    let machine = match Machine::find() {
        Ok(machine) => machine,
        Err(missing) => {
            // Past the test harness, which shows what a test prints only if it fails.
            let _ = writeln!(stderr(), "skipped: podfs_works_on_debians_linux_6_1: {missing}; tests/run fetches it");
            return;
        }
    };
    let ended = machine.boot();
    let tests = tests_of_the_guest();
    let outcomes: Vec<_> = tests.iter().map(|test| (test, ended.outcome(test))).collect();
    outcomes.iter().for_each(|(test, outcome)| println!("{test}: {outcome}"));
    let failing = outcomes.iter().filter(|(_, outcome)| *outcome != "ok").count();
    let Ended { report, console, .. } = &ended;
    assert_eq!(failing, 0, "tests that fail in the guest; its report:\n{report}\nits console:\n{console}");
}

/// The names of all tests that this program runs in the guest only.
fn tests_of_the_guest() -> Vec<String> {
    let mut list = Command::new(current_exe().expect("this program"));
    let list = list.args(["--list", "--ignored", "--format", "terse"]).output().expect("it runs");
    let list = String::from_utf8(list.stdout).expect("text");
    let tests: Vec<_> = list.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect();
    assert!(!tests.is_empty(), "no test is for the guest");
    tests
}
