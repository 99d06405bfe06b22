//! The tests kill and upgrade servers, keepers and supervisors at any time under mixed load: callers read, write, lock, list,
//! rename and watch in projections and in passthrough volumes with both data paths, and objects change. The tests also kill two
//! of the three processes at once, except the supervisor and the server together. No call may fail, no read may mix two
//! contents, and no effect may be lost or happen twice. One exception is allowed: an open file without a name may return
//! `ESTALE` in a volume whose files the server reads and writes.
//!
//! `PODFS_SOAK_KILLS` is the number of faults in the test with random faults. `PODFS_SOAK_ROUNDS` is the number of rounds in
//! the other tests. `PODFS_SOAK_SEED` repeats the random choices of an earlier run.

mod over_the_dead;

use crate::common::load::{self, Pod, faults};

#[test]
fn no_call_fails_when_processes_are_killed_at_random() {
    faults::inject_at_random(Pod::new(), load::number("PODFS_SOAK_KILLS").unwrap_or(120));
}

#[test]
fn a_supervisor_that_adopts_again_and_again_under_load_finds_everything_as_it_was() {
    load::rounds::adopt(Pod::new(), load::rounds_or(20), |_| {});
}

#[test]
fn a_pod_that_goes_from_version_to_version_under_load_loses_nothing() {
    load::rounds::upgrade(Pod::new(), load::rounds_or(20));
}
