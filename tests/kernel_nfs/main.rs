//! NFS volumes by the kernel's client: Debian's Linux 6.1 in a virtual machine, which has the client, and a server.
//!
//! The guest boots this very test program, which runs the tests of [`guest`] there; on the host these are ignored.
//! One boot runs them all; where no Kerberos realm can be made, all but those that need one. What needs no such kernel is
//! tested in `tests/nfs`.

#[path = "../common/mod.rs"]
mod common;
mod guest;
#[path = "../../fuse/tests/machine/mod.rs"]
mod machine;

use std::path::Path;

use common::PODFS;
use machine::{Guest, Machine, kerberos, nfs};

/// The tests that need a realm.
const KERBEROS: &str = "guest::kerberos";

#[test]
fn podfs_serves_exports_with_the_kernels_client() {
    let Some(machine) = Machine::find_or_skip("podfs_serves_exports_with_the_kernels_client") else { return };
    let mut guest = Guest::new(&machine);
    guest.directory(Path::new(env!("CARGO_TARGET_TMPDIR")));
    guest.module("fuse");
    nfs::add_client(&mut guest);
    if let Err(missing) = nfs::add_server(&mut guest) {
        machine::skipped("podfs_serves_exports_with_the_kernels_client", &missing);
        return;
    }
    let realm = kerberos::add(&mut guest);
    guest.program(Path::new(PODFS), PODFS);
    guest.test_program();
    let (realm, skipped) = match realm {
        Ok(()) => (kerberos::START, None),
        Err(missing) => {
            machine::skipped(KERBEROS, &missing);
            ("true", Some(KERBEROS))
        }
    };
    let skip = skipped.map(|tests| format!("--skip {tests}")).unwrap_or_default();
    let script = format!("{realm} && {} && /tests --ignored --test-threads=1 {skip}", nfs::START_SERVER);
    guest.run(&script).assert_all_passed_but(skipped);
}
