//! The NFS of the Linux kernel, in a virtual machine: its server, and its client with this server and with a server on the host
//! (nfs-ganesha).
//!
//! The guest runs this test program, with the tests of [`guest`], which the host ignores.

mod guest;

use std::fs;

use crate::machine::{Guest, Linux, Machine, nfs};
use crate::nfs_rig::Ganesha;

/// The tests that run in the guest.
const TESTS: &str = "linux_nfs::guest";

#[test]
fn linux_serves_and_mounts_nfs() {
    let Some(machine) = Machine::find_or_skip(Linux::V6_1, "linux_serves_and_mounts_nfs") else { return };
    let ganesha = Ganesha::start();
    fs::write(ganesha.exported().join("from-outside"), "1").expect("written");
    let mut guest = Guest::new(&machine);
    nfs::add_client(&mut guest);
    if let Err(missing) = nfs::add_server(&mut guest) {
        eprintln!("skipped: linux_serves_and_mounts_nfs: {missing}; tests/run fetches it");
        return;
    }
    guest.network();
    guest.test_program();
    let (nfs_port, mount_port) = (ganesha.address().port(), ganesha.mount_address().port());
    let run = format!("/tests {TESTS} --ignored --test-threads=1");
    let outcome = guest.run(&format!("{} && PORTS='{nfs_port} {mount_port}' {run}", nfs::START_SERVER));
    outcome.assert_all_passed(TESTS);
    assert_eq!(outcome.code, Some(0));
    for version in ["3", "4.1"] {
        let written = fs::read_to_string(ganesha.exported().join(format!("from-guest-{version}")));
        assert_eq!(written.expect("there"), version);
    }
}

#[test]
fn a_guest_returns_the_output_and_exit_code_of_its_script() {
    let Some(machine) = Machine::find_or_skip(Linux::V6_1, "a_guest_returns_the_output_and_exit_code_of_its_script")
    else {
        return;
    };
    let mut guest = Guest::new(&machine);
    guest.test_program();
    let outcome = guest.run("uname -s; /tests --exact --list none; exit 7");
    assert_eq!((&*outcome.report, outcome.code), ("Linux\n0 tests, 0 benchmarks\n", Some(7)), "{}", outcome.console);
}
