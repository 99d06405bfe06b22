//! The end of a supervisor while a disk that it needs takes no write: its log names the path, and it ends cleanly once the disk
//! answers.

use std::fs;
use std::os::unix::net::UnixDatagram;

use nix::sys::signal::{Signal, kill};

use crate::common::frozen::FreezableDisk;
use crate::common::loop_device::LoopDevice;
use crate::common::node::Node;
use crate::common::*;

/// A pod with the volumes `config` and `scratch`, and a disk at a directory of its fixture.
fn pod_and_disk(fixture: &Fixture, device: &LoopDevice, at: &str) -> FreezableDisk {
    let volumes = format!(
        "[{{name: config, configMap: {{name: app}}}}, {{name: scratch, emptyDir: {{}}}}, \
         {{name: host, hostPath: {{path: {}, type: DirectoryOrCreate}}}}]",
        fixture.path("host/data").display()
    );
    fixture.write("pod.yaml", &pod(&volumes));
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    for directory in ["host", "root", "run"].into_iter().filter(|directory| *directory != at) {
        fs::create_dir(fixture.path(directory)).expect("a directory");
    }
    FreezableDisk::mount(device, &fixture.path(at))
}

/// Checks that podfs has removed everything from its directories, which the test has made, and has ended.
#[track_caller]
fn assert_empty(fixture: &Fixture, disk: FreezableDisk) {
    for directory in ["root", "run"] {
        let entries: Vec<_> = fs::read_dir(fixture.path(directory)).expect("a directory").flatten().collect();
        assert!(entries.is_empty(), "{entries:?}");
    }
    drop(disk);
    assert_eq!(fixture.mounts(), [] as [&std::path::Path; 0]);
    eventually("no process is left", || fixture.processes().is_empty());
}

/// What `podfs status` prints.
fn status(fixture: &Fixture) -> String {
    let mut command = std::process::Command::new(PODFS);
    command.args(["status", "--run-dir"]).arg(fixture.path("run"));
    String::from_utf8(command.output().expect("podfs runs").stdout).expect("text")
}

#[test]
fn a_pod_whose_empty_dir_is_on_a_frozen_disk_ends_when_the_disk_answers() {
    let (device, fixture) = (LoopDevice::new(16), Fixture::new(""));
    let disk = pod_and_disk(&fixture, &device, "root");
    let mut running = fixture.run();
    fs::write(running.volume("scratch").join("f"), "1").expect("written");
    let uid = running.json()["pod"]["uid"].as_str().expect("a uid").to_owned();
    let home = disk.at().join("pods").join(uid).join("plugins/kubernetes.io~empty-dir/scratch");

    let frozen = disk.freeze();
    running.signal(Signal::SIGTERM);
    let waits = format!("waits to unmount volume \"scratch\" and to delete its content in {}; a disk", home.display());
    running.wait_log(&format!("podfs still {waits}"));
    assert!(status(&fixture).contains("podfs ends and unmounts the volumes"), "{}", status(&fixture));
    running.signal(Signal::SIGTERM);
    drop(frozen);
    assert!(running.wait().success(), "{}", running.log());
    assert!(running.log().contains("podfs no longer waits to unmount volume \"scratch\""), "{}", running.log());
    assert_empty(&fixture, disk);
}

#[test]
fn a_pod_whose_run_directory_is_on_a_frozen_disk_ends_when_the_disk_answers() {
    let (device, fixture) = (LoopDevice::new(16), Fixture::new(""));
    let disk = pod_and_disk(&fixture, &device, "run");
    let mut running = fixture.run();
    let uid = running.json()["pod"]["uid"].as_str().expect("a uid").to_owned();

    let frozen = disk.freeze();
    running.signal(Signal::SIGTERM);
    let (root, run) = (fixture.path("root/pods").join(&uid), disk.at().join(&uid));
    running.wait_log(&format!(
        "podfs still waits to remove the pod's directories in {} and its files in {}; a disk",
        root.display(),
        run.display()
    ));
    let told = status(&fixture);
    assert!(told.contains("not answering") && told.contains("as for a disk that is slow, frozen or failing"), "{told}");
    drop(frozen);
    assert!(running.wait().success(), "{}", running.log());
    assert_empty(&fixture, disk);
}

#[test]
fn a_pod_that_ends_before_its_run_directory_is_made_on_a_frozen_disk_leaves_nothing() {
    let (device, fixture) = (LoopDevice::new(16), Fixture::new(""));
    let disk = pod_and_disk(&fixture, &device, "run");
    let frozen = disk.freeze();
    let mut running = fixture.start();
    running.wait_log(&format!("podfs still waits to lock the pod below {}", disk.at().display()));
    running.signal(Signal::SIGTERM);
    drop(frozen);
    assert!(running.wait().success(), "{}", running.log());
    assert_empty(&fixture, disk);
}

#[test]
fn a_pod_whose_mount_points_are_on_a_frozen_disk_starts_and_ends_when_the_disk_answers() {
    let (device, fixture) = (LoopDevice::new(16), Fixture::new(""));
    let disk = pod_and_disk(&fixture, &device, "root");
    // Dropped in the other order: podfs cannot end while the disk is frozen.
    let mut running;
    let frozen = disk.freeze();
    running = fixture.start();
    running.wait_log(&format!("podfs still waits to make the mount points in {}/pods/", disk.at().display()));
    running.signal(Signal::SIGTERM);
    drop(frozen);
    assert!(running.wait().success(), "{}", running.log());
    assert_empty(&fixture, disk);
}

#[test]
fn a_pod_that_ends_while_a_source_is_on_a_frozen_disk_leaves_nothing() {
    let (device, fixture) = (LoopDevice::new(16), Fixture::new(""));
    let disk = pod_and_disk(&fixture, &device, "host");
    // Dropped in the other order: podfs cannot end while the disk is frozen.
    let mut running;
    let frozen = disk.freeze();
    running = fixture.start();
    running.wait_log("volume is mounted volume=\"scratch\"");
    running.signal(Signal::SIGTERM);
    let source = disk.at().join("data");
    running.wait_log(&format!("podfs ends without waiting for volume \"host\" ({})", source.display()));
    eventually("podfs has removed its files", || is_empty(&fixture));
    // The kernel cannot end the process before its thread has made the directory of the source.
    drop(frozen);
    assert!(running.wait().success(), "{}", running.log());
    assert_empty(&fixture, disk);
}

fn is_empty(fixture: &Fixture) -> bool {
    let is_empty = |name| fs::read_dir(fixture.path(name)).is_ok_and(|mut entries| entries.next().is_none());
    ["root", "run"].into_iter().all(is_empty)
}

#[test]
fn a_supervisor_that_is_killed_while_it_waits_for_a_frozen_disk_is_replaced_by_the_next_one() {
    let (device, fixture) = (LoopDevice::new(16), Fixture::new(""));
    let disk = pod_and_disk(&fixture, &device, "root");
    let mut running = fixture.run();
    fs::write(running.volume("scratch").join("f"), "1").expect("written");

    let frozen = disk.freeze();
    running.signal(Signal::SIGTERM);
    running.wait_log("podfs still waits to unmount volume \"scratch\"");
    running.signal(Signal::SIGKILL);
    drop(frozen);
    running.wait();
    let mut running = fixture.run();
    assert!(running.stop().success(), "{}", running.log());
    assert_empty(&fixture, disk);
}

#[test]
fn a_pod_of_a_node_is_unmounted_when_its_frozen_disk_answers() {
    let (device, node) = (LoopDevice::new(16), Node::new());
    let disk = FreezableDisk::mount(&device, &node.fixture.path("root"));
    node.put(
        "web.yaml",
        "{apiVersion: v1, kind: Pod, metadata: {name: web}, spec: {containers: [{name: c, image: none, volumeMounts: [\
         {name: config, mountPath: /config}, {name: scratch, mountPath: /scratch}]}], \
         volumes: [{name: config, configMap: {name: app}}, {name: scratch, emptyDir: {}}]}}",
    );
    node.put("app.json", &config_map("app", &[("a", "1")]));
    let daemon = node.start();
    node.expect(&["wait", "default/web"]);
    let uid = node.pod("web").expect("the pod")["uid"].as_str().expect("a uid").to_owned();
    fs::write(node.path("web", "scratch").join("f"), "1").expect("written");

    let frozen = disk.freeze();
    node.remove("web.yaml");
    eventually("the pod is released", || node.ask(&["release", "default/web"]).status.success());
    daemon.wait_log(&format!(
        "podfs still waits to remove the pod's directories in {}",
        disk.at().join("pods").join(&uid).display()
    ));
    assert!(node.refused(&["wait", "default/web", "--unmounted", "--timeout", "0"]).contains("scratch"));
    drop(frozen);
    node.expect(&["wait", "default/web", "--unmounted"]);
    eventually("nothing is left", || node.is_clean(&uid));
    kill(daemon.pid(), Signal::SIGTERM).expect("the daemon is there");
}

#[test]
fn a_supervisor_notifies_systemd_while_a_thread_waits_for_a_frozen_disk() {
    let (device, fixture) = (LoopDevice::new(16), Fixture::new(""));
    let disk = pod_and_disk(&fixture, &device, "root");
    // A projection is left out, because the supervisor makes its mount point before it serves.
    let source = fixture.path("host/data");
    let host = format!("[{{name: host, hostPath: {{path: {}, type: DirectoryOrCreate}}}}]", source.display());
    fixture.write("pod.yaml", &pod(&host));
    let socket = UnixDatagram::bind(fixture.path("notify")).expect("a socket");
    socket.set_read_timeout(Some(TIMEOUT)).expect("a timeout");
    let mut command = fixture.command();
    command.env("NOTIFY_SOCKET", fixture.path("notify")).env("WATCHDOG_USEC", "20000");

    let frozen = disk.freeze();
    let mut running = fixture.start_command(command);
    eventually("a thread waits to make the mount point", || source.exists());
    let (mut message, mut beats) = ([0; 4096], 0);
    while beats < 200
        && let Ok(length) = socket.recv(&mut message)
    {
        beats += usize::from(message[..length].starts_with(b"WATCHDOG=1"));
    }
    drop((frozen, socket));
    assert_eq!(beats, 200, "the supervisor makes no progress");
    running.wait_ready();
    assert!(running.stop().success(), "{}", running.log());
    assert_empty(&fixture, disk);
}
