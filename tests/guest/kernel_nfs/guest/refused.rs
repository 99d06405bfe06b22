//! podfs reports in one sentence why it cannot mount a volume, and retries.

use std::fs;
use std::net::TcpListener;
use std::thread;
use std::time::{Duration, Instant};

use super::{Outage, OutageKind, assert_stops_clean, fixture, volume_path};
use crate::common::*;

#[test]
#[ignore = "runs in the guest"]
fn the_error_names_the_fault_of_an_export() {
    for (path, options, sentence) in [
        ("/nowhere", "nfsvers=4.1", "127.0.0.1:/nowhere: NFS server 127.0.0.1 has no such export; correct the path"),
        ("/", "nfsvers=4.1,port=1", "NFS server 127.0.0.1 refuses the connection; start it, or correct the port"),
    ] {
        assert_reported(path, options, sentence);
    }
}

#[test]
#[ignore = "runs in the guest"]
fn tls_is_refused_by_a_kernel_that_has_none() {
    for options in ["nfsvers=4.1,xprtsec=tls", "xprtsec=mtls"] {
        let sentence = "127.0.0.1:/: the mount option xprtsec needs Linux 6.5, and this node has 6.1.";
        assert_reported("/", options, sentence);
    }
}

/// Asserts that podfs logs why it cannot mount the export, and that it mounts the pod's other volume.
fn assert_reported(path: &str, options: &str, sentence: &str) {
    let fixture = fixture(path, options);
    let mut running = fixture.start();
    running.wait_log("MountVolume.SetUp failed for volume \"data\" : ");
    let config = fixture.path("root/pods").join(uid(&fixture)).join("volumes/kubernetes.io~configmap/config/a");
    wait_content(&config, "1");
    running.wait_log(sentence);
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    fixture.assert_nothing_left();
}

/// The pod's uid, which podfs generates because the manifest has none.
fn uid(fixture: &Fixture) -> String {
    let mut uid = None;
    eventually("there is a directory of the pod", || {
        let pods = std::fs::read_dir(fixture.path("root/pods")).into_iter().flatten().flatten();
        uid = pods.map(|entry| entry.file_name().to_string_lossy().into_owned()).next();
        uid.is_some()
    });
    uid.expect("the loop has set it")
}

/// Longer than the time limit of podfs for one attempt to mount an export.
const LONG: Duration = Duration::from_secs(60);

/// Waits until the log contains `text`.
#[track_caller]
pub(super) fn wait_long(running: &Running, text: &str) {
    let deadline = Instant::now() + LONG;
    while !running.log().contains(text) {
        assert!(Instant::now() < deadline, "not in the log: {text}\n{}", running.log());
        thread::sleep(Duration::from_millis(50));
    }
}

/// Waits until podfs has mounted all volumes.
#[track_caller]
pub(super) fn wait_ready_long(running: &mut Running) {
    let deadline = Instant::now() + LONG;
    while !running.is_ready() {
        assert!(Instant::now() < deadline, "{}", running.log());
        thread::sleep(Duration::from_millis(50));
    }
    running.wait_ready();
}

#[test]
#[ignore = "runs in the guest"]
fn a_server_that_is_away_is_tried_again() {
    let fixture = fixture("/", "nfsvers=4.1");
    let outage = Outage::begin(OutageKind::Refusing);
    let mut running = fixture.start();
    wait_long(&running, "MountVolume.SetUp failed for volume \"data\" : 127.0.0.1:/: ");
    drop(outage);
    wait_ready_long(&mut running);
    assert!(volume_path(&running).is_dir());
    assert_stops_clean(running, &fixture);
}

#[test]
#[ignore = "runs in the guest"]
fn a_server_that_listens_and_says_nothing_is_given_up_after_30_s_and_spoils_nothing() {
    // The kernel accepts the connections of a listening socket, but nothing reads from them.
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = silent.local_addr().expect("an address").port();
    let waiting_fixture = fixture("/", &format!("nfsvers=4.1,port={port}"));
    let mut waiting = waiting_fixture.start();
    wait_long(&waiting, "127.0.0.1:/: the NFS server has not answered for 30 s; see that it runs and can be reached");
    let other = fixture("/", "nfsvers=4.1");
    other.write(
        "pod.yaml",
        &fs::read_to_string(other.pod()).expect("a pod").replace("name: web,", "name: web, uid: other,"),
    );
    let running = other.run();
    assert!(volume_path(&running).is_dir());
    assert_stops_clean(running, &other);
    assert_eq!(waiting.stop().code(), Some(0), "{}", waiting.log());
    eventually("no process is left", || waiting_fixture.processes().is_empty());
}
