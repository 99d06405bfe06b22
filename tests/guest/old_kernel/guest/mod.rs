//! The tests that run in the guest. Each test asserts that podfs leaves no mount and no process behind.

mod containers;
mod crash;
mod passthrough;
mod projections;

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::common::outcome::finish;
use crate::common::{Fixture, PODFS, Running};

#[test]
#[ignore = "runs in the guest"]
fn the_kernel_is_linux_6_1_and_podfs_runs() {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").expect("a release");
    assert!(release.starts_with("6.1."), "{release}");
    let version = finish(Command::new(PODFS).arg("version"));
    assert_eq!((version.code, &*version.stdout), (Some(0), concat!("podfs ", env!("CARGO_PKG_VERSION"), "\n")));
}

/// A hostPath volume, in a pod's manifest.
fn host(name: &str, path: &Path, kind: &str) -> String {
    format!("{{name: {name}, hostPath: {{path: {}, type: {kind}}}}}", path.display())
}

/// The mode of a volume in the readiness object.
#[track_caller]
fn mode(running: &Running, name: &str) -> String {
    let volumes = running.json()["volumes"].as_array().expect("volumes");
    let volume = volumes.iter().find(|volume| volume["name"] == name).expect("a volume of this name");
    volume["mode"].as_str().expect("a mode").to_owned()
}

/// Stops podfs, and asserts that it leaves nothing behind.
#[track_caller]
fn assert_stops_clean(mut running: Running, fixture: &Fixture) {
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    fixture.assert_nothing_left();
}
