//! VM: the operations of the reconciler and the executor, and their order.

use std::fs;
use std::process::Command;

use nix::sys::signal::{Signal, kill};

use super::super::lifecycle::pod;
use super::{CONFIG, LATE, SCRATCH, count, end_web, is, line, node_with, reason, start_verbose};
use crate::common::node::Node;
use crate::common::{PODFS, Running, config_map, eventually, wait_content};

#[test]
fn vm_11_a_mounted_volume_that_leaves_the_manifest_stays_until_the_pod_is_released() {
    let node = node_with(&[CONFIG, SCRATCH], &["config", "scratch"]);
    let daemon = node.start();
    node.expect(&["wait", "default/web"]);
    let (config, scratch) = (node.path("web", "config"), node.path("web", "scratch"));
    fs::write(scratch.join("file"), "data").expect("written");
    let says = |sentence: &str| node.pod("web").is_some_and(|pod| pod["notes"].to_string().contains(sentence));
    let stays = || {
        wait_content(&scratch.join("file"), "data");
        assert!(is(&node, "scratch", "mounted") && is(&node, "config", "mounted"));
    };

    // The volume with the smaller name is new: it is mounted beside those that stay.
    const ALSO: &str = "{name: also, emptyDir: {}}";
    node.put("web.yaml", &pod("web", &[CONFIG, ALSO], &["also"]));
    eventually("the new volume is there", || is(&node, "also", "mounted"));
    assert!(says("is no longer in the manifest, and stays until the pod is released"));
    assert!(says("is used by no container of the manifest any more, and stays until the pod is released"));
    stays();
    node.put("app.yaml", &config_map("app", &[("key", "two")]));
    wait_content(&config.join("key"), "two");

    drop(daemon);
    let _daemon = node.start();
    eventually("the next daemon has read the manifest", || says("is no longer in the manifest"));
    eventually("its supervisor has reported", || is(&node, "scratch", "mounted"));
    stays();

    node.put("web.yaml", &pod("web", &[CONFIG, SCRATCH], &["config", "scratch"]));
    eventually("the manifest has them again", || !says("scratch"));
    stays();
    end_web(&node);
}

#[test]
fn vm_02_nothing_is_unmounted_while_a_source_has_not_listed_its_pods() {
    let node = node_with(&[CONFIG], &["config"]);
    let daemon = node.start();
    node.expect(&["wait", "default/web"]);
    let config = node.path("web", "config");
    drop(daemon);
    // As long as the directory of manifests does not exist, the daemon does not know whether the pod still exists.
    let (manifests, away) = (node.fixture.path("manifests"), node.fixture.path("away"));
    fs::rename(&manifests, &away).expect("moved");
    fs::remove_file(away.join("web.yaml")).expect("removed");
    let _daemon = start_verbose(&node);
    eventually("the pod is adopted", || node.pod("web").is_some_and(|pod| pod["supervisor"].is_number()));
    let refused = node.refused(&["release", "uid-web"]);
    assert!(refused.contains("its source has not listed its pods yet"), "{refused}");
    let status = String::from_utf8(node.ask(&["status"]).stdout).expect("text");
    assert!(status.contains(" unknown "), "{status}");
    let waits = node.refused(&["wait", "uid-web", "--timeout", "0"]);
    assert!(waits.contains("its source has not listed its pods yet"), "{waits}");
    assert!(is(&node, "config", "mounted"));
    assert_eq!(fs::read_to_string(config.join("key")).expect("it is mounted"), "one");
    assert_eq!(count(&node, "config", "volume_unmount", "begins"), 0, "{}", node.log());
    fs::rename(&away, &manifests).expect("moved back");
    eventually("its source does not have it", || node.ask(&["release", "uid-web"]).status.success());
    eventually("the pod is gone", || node.is_clean("uid-web"));
    assert_eq!(count(&node, "config", "volume_unmount", "begins"), 1, "{}", node.log());
}

/// `podfs run` for the pod `web`, which no daemon has started.
fn foreign(node: &Node) -> Running {
    node.fixture.write("foreign.yaml", &pod("web", &[SCRATCH], &["scratch"]));
    let mut command = Command::new(PODFS);
    command.arg("run").arg("--pod").arg(node.fixture.path("foreign.yaml"));
    command.arg("--root-dir").arg(node.fixture.path("root")).arg("--run-dir").arg(node.fixture.path("run"));
    let mut running = node.fixture.start_command(command);
    running.wait_ready();
    running
}

#[test]
fn vm_04_vm_05_a_mount_that_fails_is_tried_again_after_pauses_that_double_and_leaves_nothing_to_unmount() {
    let node = node_with(&[SCRATCH], &["scratch"]);
    let foreign = foreign(&node);
    let _daemon = start_verbose(&node);
    eventually("it is refused", || reason(&node, "scratch").contains("which podfs node did not start"));
    assert!(is(&node, "scratch", "notMounted"));
    for pause in ["500ms", "1s", "2s"] {
        let text = format!("(durationBeforeRetry {pause}). Error: the pod is served by podfs run");
        eventually("the next attempt pauses for longer", || node.log().contains(&text));
    }
    node.remove("web.yaml");
    eventually("the pod is released", || {
        node.ask(&["release", "uid-web"]);
        node.pod("web").is_none_or(|pod| pod["released"] == true)
    });
    assert_eq!(count(&node, "scratch", "volume_unmount", "begins"), 0, "{}", node.log());
    assert_eq!(node.fixture.mounts().len(), 1, "the volume of podfs run stays");
    drop(foreign);
    eventually("the daemon forgets the pod when podfs run has ended", || node.pod("web").is_none());
}

#[test]
fn vm_04_vm_05_a_mount_that_did_not_end_is_uncertain_and_is_unmounted_at_once_when_the_pod_goes() {
    let node = node_with(&[LATE], &["late"]);
    let _daemon = start_verbose(&node);
    eventually("the pod has a supervisor", || node.pod("web").is_some_and(|pod| pod["supervisor"].is_number()));
    kill(node.supervisor("web"), Signal::SIGKILL).expect("killed");
    eventually("the mount has failed", || count(&node, "late", "volume_mount", "ends") == 1);
    eventually("the volume is uncertain", || is(&node, "late", "uncertain"));
    end_web(&node);
    let log = node.log();
    let begins = log.find(&line("late", "volume_unmount", "begins")).unwrap_or_else(|| panic!("no unmount:\n{log}"));
    assert!(!log[begins..].contains("No retries permitted"), "another operation does not pause: {log}");
}

#[test]
fn vm_04_vm_08_a_refresh_that_fails_leaves_the_volume_mounted_and_is_tried_again() {
    let node = node_with(&[CONFIG], &["config"]);
    let _daemon = start_verbose(&node);
    node.expect(&["wait", "default/web"]);
    let (config, supervisor) = (node.path("web", "config"), node.supervisor("web"));
    kill(supervisor, Signal::SIGSTOP).expect("stopped");
    node.expect(&["remount", "uid-web"]);
    let failed = "pod default/web: MountVolume.SetUp failed for volume \"config\" : ";
    eventually("the refresh has failed", || node.log().contains(failed));
    assert!(is(&node, "config", "mounted"), "{:?}", node.volume("web", "config"));
    assert_eq!(fs::read_to_string(config.join("key")).expect("it is served on"), "one");
    let attempts = count(&node, "config", "volume_mount", "begins");
    kill(supervisor, Signal::SIGCONT).expect("it goes on");
    eventually("it is tried again", || {
        let (begun, ended) =
            (count(&node, "config", "volume_mount", "begins"), count(&node, "config", "volume_mount", "ends"));
        begun > attempts && ended == begun && reason(&node, "config") == "null"
    });
    end_web(&node);
    assert_eq!(count(&node, "config", "volume_unmount", "begins"), 1);
}

#[test]
fn vm_06_a_volume_has_one_operation_at_a_time_and_those_of_other_volumes_run_beside_it() {
    let node = node_with(&[CONFIG, LATE], &["config", "late"]);
    let _daemon = start_verbose(&node);
    eventually("the other volume is mounted", || is(&node, "config", "mounted"));
    // Each of these changes causes a pass of the reconciler.
    for name in ["one", "two", "three"] {
        node.put(&format!("{name}.yaml"), &pod(name, &[SCRATCH], &["scratch"]));
        node.expect(&["wait", &format!("default/{name}")]);
    }
    let log = node.log();
    let (begins, ends) = (line("late", "volume_mount", "begins"), line("late", "volume_mount", "ends"));
    let mut running = 0;
    for line in log.lines() {
        running += i32::from(line.contains(&begins)) - i32::from(line.contains(&ends));
        assert!((0..=1).contains(&running), "{log}");
    }
    let at = |text: &str| log.find(text).unwrap_or_else(|| panic!("{text} is not logged:\n{log}"));
    let config_ends = at(&line("config", "volume_mount", "ends"));
    let is_later = log.find(&ends).is_none_or(|end| config_ends < end);
    assert!(at(&begins) < config_ends && is_later, "they run at the same time: {log}");
}
