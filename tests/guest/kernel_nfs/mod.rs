//! NFS volumes with the kernel's client: a virtual machine with Debian's Linux, which has the client and an NFS server.
//!
//! The guest runs this test program, with the tests of [`guest`], which the host ignores. One boot of each kernel runs all
//! tests, except those that need a missing feature of the kernel or a missing download. NFS tests that do not need the kernel's
//! client are in `tests/nfs`.

mod guest;

use std::path::Path;

use crate::common::{PODFS, PODFS_FUSE};
use crate::machine::{Guest, Linux, Machine, kerberos, nfs, tls};

/// The tests that run in the guest.
const TESTS: &str = "kernel_nfs::guest";
/// The tests that need a Kerberos realm. The tests of TLS need it for its second server, which has no TLS.
const NEED_REALM: [&str; 3] = [
    "kernel_nfs::guest::kerberos",
    "kernel_nfs::guest::tls",
    "kernel_nfs::guest::user_namespace::a_user_of_the_pod_has_the_ticket_of_its_id_in_the_pod",
];
/// The tests that need TLS.
const NEED_TLS: &str = "kernel_nfs::guest::tls";
/// The tests that need features of kernels after Linux 6.1: TLS (6.5), resent requests of a dead server (6.9), and ID-mapped
/// mounts (6.12).
const NEED_LINUX_6_12: [&str; 3] = [NEED_TLS, "kernel_nfs::guest::killed", "kernel_nfs::guest::user_namespace"];
/// The tests that run on Linux 6.1 alone: one kernel is enough for them, and one of them needs a kernel without TLS.
const LINUX_6_1_ONLY: [&str; 4] = [
    "kernel_nfs::guest::away",
    "kernel_nfs::guest::identity",
    "kernel_nfs::guest::kerberos",
    "kernel_nfs::guest::refused",
];

#[test]
fn podfs_serves_exports_with_the_client_of_linux_6_1() {
    serve_exports(Linux::V6_1, "podfs_serves_exports_with_the_client_of_linux_6_1", &NEED_LINUX_6_12);
}

#[test]
fn podfs_serves_exports_with_the_client_of_linux_6_12() {
    serve_exports(Linux::V6_12, "podfs_serves_exports_with_the_client_of_linux_6_12", &LINUX_6_1_ONLY);
}

/// Runs all tests of the guest except `skipped`.
fn serve_exports(linux: Linux, test: &str, skipped: &[&str]) {
    let Some(machine) = Machine::find_or_skip(linux, test) else { return };
    let mut guest = Guest::new(&machine);
    guest.directory(Path::new(env!("CARGO_TARGET_TMPDIR")));
    guest.module("fuse");
    nfs::add_client(&mut guest);
    if let Err(missing) = nfs::add_server(&mut guest) {
        return crate::machine::skipped(test, &missing);
    }
    let mut skipped = skipped.to_vec();
    let mut start = nfs::START_SERVER.to_owned();
    match kerberos::add(&mut guest) {
        Ok(()) => start = format!("{} && {start}", kerberos::START),
        Err(missing) => {
            crate::machine::skipped("tests that need a Kerberos realm", &missing);
            skipped.extend(NEED_REALM);
        }
    }
    if !skipped.contains(&NEED_TLS)
        && let Err(missing) = tls::add(&mut guest)
    {
        crate::machine::skipped("tests that need TLS", &missing);
        skipped.push(NEED_TLS);
    }
    guest.program(Path::new(PODFS), PODFS);
    guest.program(Path::new(PODFS_FUSE), PODFS_FUSE);
    guest.test_program();
    let skip: String = skipped.iter().map(|tests| format!(" --skip {tests}")).collect();
    guest
        .run(&format!("{start} && /tests {TESTS} --ignored --test-threads=1{skip}"))
        .assert_all_passed_but(TESTS, &skipped);
}
