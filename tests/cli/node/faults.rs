//! Faults around a daemon: its run directory is deleted, the disk is full, its whole cgroup is killed, and two pods want a
//! claim that only one pod may use.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::Stdio;

use nix::sys::signal::{Signal, kill};

use super::lifecycle::pod;
use crate::common::cgroup::Cgroup;
use crate::common::namespace::mount_tmpfs;
use crate::common::node::Node;
use crate::common::outcome::finish;
use crate::common::{config_map, eventually, wait_content};

const CONFIG: &str = "{name: config, configMap: {name: app}}";
const SCRATCH: &str = "{name: scratch, emptyDir: {}}";

/// A node whose pod `web` has these volumes.
fn node_with_a_pod() -> Node {
    let node = Node::new();
    node.put("app.yaml", &config_map("app", &[("key", "one")]));
    node.put("web.yaml", &pod("web", &[CONFIG, SCRATCH], &["config", "scratch"]));
    node
}

fn set(node: &Node, value: &str) {
    node.put("app.yaml", &config_map("app", &[("key", value)]));
}

/// Deletes the run directory, as `rm -r /run/podfs` does. Supervisors may make files in it meanwhile.
fn delete_run_directory(node: &Node) {
    let run = node.fixture.path("run");
    eventually("the run directory is deleted", || fs::remove_dir_all(&run).is_ok());
}

/// Whether the daemon answers, and has the supervisor of the pod `web`.
fn knows_web(node: &Node) -> bool {
    node.ask(&["state"]).status.success() && node.pod("web").is_some_and(|pod| pod["supervisor"].is_number())
}

#[test]
fn a_deleted_run_directory_is_made_again_and_volumes_follow_their_objects() {
    let node = node_with_a_pod();
    let mut daemon = node.start();
    node.expect(&["wait", "default/web"]);
    let (config, scratch) = (node.path("web", "config"), node.path("web", "scratch"));
    let supervisor = node.supervisor("web");
    let mut open = File::create(scratch.join("file")).expect("a file");
    delete_run_directory(&node);
    set(&node, "two");
    assert_eq!(fs::read_to_string(config.join("key")).expect("it is served on").len(), 3);
    wait_content(&config.join("key"), "two");
    eventually("the daemon answers at a new socket", || knows_web(&node));
    assert_eq!(node.supervisor("web"), supervisor, "no other supervisor was started");

    // The new files replace the deleted ones: by them, the next supervisor finds the server, and the next daemon finds the pod.
    let of_pod = |name: &str| node.fixture.path("run/uid-web").join(name).exists();
    eventually("its files are there", || ["lock", "control.sock", "server.sock"].into_iter().all(of_pod));
    let log = node.log();
    kill(supervisor, Signal::SIGKILL).expect("killed");
    open.write_all(b"data").expect("the server goes on");
    eventually("another supervisor takes the server over", || {
        node.pod("web")
            .is_some_and(|pod| pod["supervisor"].as_i64().is_some_and(|pid| pid != i64::from(supervisor.as_raw())))
    });
    assert!(node.log()[log.len()..].contains("podfs takes them over"), "{}", node.log());
    daemon.signal(Signal::SIGKILL);
    daemon.wait();
    let _daemon = node.start();
    eventually("the next daemon knows it", || knows_web(&node));
    set(&node, "three");
    wait_content(&config.join("key"), "three");
    assert_eq!(fs::read_to_string(scratch.join("file")).expect("a file"), "data");
    drop(open);
    node.remove("web.yaml");
    eventually("no source has the pod", || node.pod("web").is_some_and(|pod| pod["stage"].is_null()));
    node.expect(&["release", "default/web"]);
    eventually("nothing of the pod is left", || node.is_clean("uid-web"));
}

#[test]
fn the_next_daemon_finds_the_pods_after_a_kill_with_a_deleted_run_directory() {
    let node = node_with_a_pod();
    let mut daemon = node.start();
    node.expect(&["wait", "default/web"]);
    let (config, supervisor) = (node.path("web", "config"), node.supervisor("web"));
    daemon.signal(Signal::SIGSTOP);
    delete_run_directory(&node);
    daemon.signal(Signal::SIGKILL);
    daemon.wait();
    eventually("the supervisor notices", || node.fixture.path("run/uid-web/control.sock").exists());
    let _daemon = node.start();
    eventually("the next daemon knows it", || knows_web(&node));
    assert_eq!(node.supervisor("web"), supervisor, "no other supervisor was started");
    set(&node, "two");
    wait_content(&config.join("key"), "two");
}

#[test]
fn files_of_the_run_directory_that_are_deleted_while_no_daemon_runs_are_made_again() {
    let node = node_with_a_pod();
    let mut daemon = node.start();
    node.expect(&["wait", "default/web"]);
    let (config, supervisor) = (node.path("web", "config"), node.supervisor("web"));
    daemon.signal(Signal::SIGKILL);
    daemon.wait();
    let socket = node.fixture.path("run/uid-web/control.sock");
    fs::remove_file(&socket).expect("it was there");
    eventually("the supervisor notices the missing socket", || socket.exists());
    delete_run_directory(&node);
    eventually("the supervisor notices the missing directory", || socket.exists());
    delete_run_directory(&node);
    // The supervisors that this daemon starts end: the first one has the volumes of the pod.
    let _daemon = node.start();
    let has_first = |pod: serde_json::Value| pod["supervisor"] == supervisor.as_raw();
    eventually("the next daemon finds the first supervisor", || node.pod("web").is_some_and(has_first));
    set(&node, "two");
    wait_content(&config.join("key"), "two");
}

#[test]
fn a_second_daemon_is_refused_also_while_the_run_directory_of_the_first_is_deleted() {
    let node = node_with_a_pod();
    let first = node.start();
    node.expect(&["wait", "default/web"]);
    let config = node.path("web", "config");
    first.signal(Signal::SIGSTOP);
    delete_run_directory(&node);
    let refused = finish(node.fixture.mark(&mut node.command()).stdin(Stdio::null()));
    let root = node.fixture.path("root");
    refused.says(1, &["a podfs node with another --run-dir uses ", root.to_str().expect("text"), "--root-dir"]);
    first.signal(Signal::SIGCONT);
    eventually("the first one knows the pod", || knows_web(&node));
    set(&node, "two");
    wait_content(&config.join("key"), "two");
}

/// Fills the file system that a file is on.
fn fill(file: &Path) {
    let mut file = File::create(file).expect("a file");
    // Writes of one byte fill the end, where no whole block fits.
    for size in [4096, 1] {
        while file.write_all(&vec![0; size]).is_ok() {}
    }
}

#[test]
fn a_full_run_directory_keeps_new_pods_waiting_and_running_ones_survive_every_restart() {
    let node = node_with_a_pod();
    let (run, filler) = (node.fixture.path("run"), node.fixture.path("run/filler"));
    fs::create_dir(&run).expect("a directory");
    mount_tmpfs(&run);
    let mut daemon = node.start();
    node.expect(&["wait", "default/web"]);
    let (config, supervisor) = (node.path("web", "config"), node.supervisor("web"));
    fill(&filler);
    node.put("late.yaml", &pod("late", &[CONFIG], &["config"]));
    let reason = || node.volume("late", "config")?["reason"].as_str().map(str::to_owned);
    eventually("its volume says why it waits", || {
        reason().is_some_and(|reason| {
            reason.starts_with("cannot record below ") && reason.contains("No space left on device")
        })
    });
    let status = String::from_utf8(node.ask(&["status"]).stdout).expect("text");
    assert!(status.contains("config: cannot record below "), "{status}");
    set(&node, "two");
    wait_content(&config.join("key"), "two");

    // Neither the next daemon nor the next supervisor needs more room than its predecessor.
    daemon.signal(Signal::SIGKILL);
    daemon.wait();
    let _daemon = node.start();
    eventually("the next daemon knows the pod", || knows_web(&node));
    kill(supervisor, Signal::SIGKILL).expect("killed");
    eventually("another supervisor serves the pod", || {
        node.pod("web")
            .is_some_and(|pod| pod["supervisor"].as_i64().is_some_and(|pid| pid != i64::from(supervisor.as_raw())))
    });
    set(&node, "three");
    wait_content(&config.join("key"), "three");

    fs::remove_file(&filler).expect("there is room again");
    node.expect(&["wait", "default/late"]);
    wait_content(&node.path("late", "config").join("key"), "three");
}

#[test]
fn a_kill_of_the_daemons_whole_cgroup_reaches_no_pod() {
    let Some(cgroup) = Cgroup::new("daemon") else { return };
    let node = node_with_a_pod();
    let mut command = node.command();
    cgroup.holds(&mut command);
    let mut daemon = node.start_command(command);
    node.expect(&["wait", "default/web"]);
    let (config, supervisor) = (node.path("web", "config"), node.supervisor("web"));
    cgroup.kill();
    daemon.wait();
    assert_eq!(fs::read_to_string(config.join("key")).expect("it is served on"), "one");
    let _daemon = node.start();
    eventually("the next daemon knows the pod", || knows_web(&node));
    assert_eq!(node.supervisor("web"), supervisor, "it was adopted");
    set(&node, "two");
    wait_content(&config.join("key"), "two");
}

#[test]
fn pv_05_of_two_pods_that_want_a_volume_for_one_pod_at_the_same_moment_one_waits_until_the_other_is_gone() {
    let node = Node::new();
    let source = node.fixture.path("source");
    fs::create_dir(&source).expect("a directory");
    node.put(
        "claim.yaml",
        "{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: data, uid: c-1}, spec: {volumeName: pv-1}, \
         status: {phase: Bound}}",
    );
    node.put(
        "volume.yaml",
        &format!(
            "{{apiVersion: v1, kind: PersistentVolume, metadata: {{name: pv-1}}, spec: {{accessModes: [ReadWriteOncePod], \
             claimRef: {{namespace: default, name: data, uid: c-1}}, local: {{path: {}}}}}}}",
            source.display()
        ),
    );
    let data = "{name: data, persistentVolumeClaim: {claimName: data}}";
    for name in ["one", "two"] {
        node.put(&format!("{name}.yaml"), &pod(name, &[data], &["data"]));
    }
    let mut command = node.command();
    command.arg("--release-when-gone");
    let _daemon = node.start_command(command);
    let is_mounted = |name: &str| node.volume(name, "data").is_some_and(|volume| volume["mount"] == "mounted");
    let text = "volume uses the ReadWriteOncePod access mode and is already in use by another pod";
    let waits = |name: &str| node.volume(name, "data").is_some_and(|volume| volume["reason"] == text);
    let mut outcome = None;
    eventually("one has it, and the other waits", || {
        outcome = [("one", "two"), ("two", "one")].into_iter().find(|(has, other)| is_mounted(has) && waits(other));
        outcome.is_some()
    });
    let (winner, waiting) = outcome.expect("it was seen");
    assert!(!is_mounted(waiting));
    node.remove(&format!("{winner}.yaml"));
    node.expect(&["wait", &format!("default/{waiting}")]);
    fs::write(node.path(waiting, "data").join("file"), "data").expect("it is writable");
    assert_eq!(fs::read_to_string(source.join("file")).expect("a file"), "data");
}
