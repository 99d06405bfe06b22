//! RC-04: volumes of an earlier daemon that cannot be set up again, or not be reconstructed.

use std::fs;

use nix::sys::signal::{Signal, kill};

use super::{CONFIG, SCRATCH, end_web, is, node_with, start_verbose};
use crate::common::node::Node;
use crate::common::{eventually, wait_content};

/// A node whose daemon and whose supervisor of the pod `web` were killed.
fn node_without_processes() -> Node {
    let node = node_with(&[CONFIG, SCRATCH], &["config", "scratch"]);
    let daemon = node.start();
    node.expect(&["wait", "default/web"]);
    fs::write(node.path("web", "scratch").join("file"), "data").expect("written");
    let supervisor = node.supervisor("web");
    daemon.signal(Signal::SIGKILL);
    drop(daemon);
    kill(supervisor, Signal::SIGKILL).expect("killed");
    eventually("the supervisor has ended", || !node.fixture.processes().contains(&supervisor));
    node
}

#[test]
fn rc_04_a_volume_of_an_earlier_daemon_that_cannot_be_set_up_is_uncertain_and_can_be_unmounted() {
    let node = node_without_processes();
    let config = node.fixture.path("root/pods/uid-web/volumes/kubernetes.io~configmap/config");
    // With a directory in the place of its socket, the next supervisor cannot listen.
    let socket = node.fixture.path("run/uid-web/control.sock");
    fs::remove_file(&socket).expect("removed");
    fs::create_dir_all(socket.join("in the way")).expect("a directory");
    let _daemon = start_verbose(&node);
    eventually("it cannot be set up", || {
        node.log().contains("pod default/web: MountVolume.SetUp failed for volume \"config\" : ")
    });
    assert!(is(&node, "config", "uncertain"), "{:?}", node.volume("web", "config"));
    assert_eq!(fs::read_to_string(config.join("key")).expect("its server goes on"), "one");
    fs::remove_dir_all(&socket).expect("out of the way");
    end_web(&node);
}

#[test]
fn rc_04_a_pod_whose_checkpoint_cannot_be_read_is_removed_if_no_source_describes_it() {
    let node = node_without_processes();
    let checkpoint = node.fixture.path("run/node/pods/uid-web/checkpoint.json");
    assert!(checkpoint.exists());
    fs::write(&checkpoint, "{").expect("written");
    node.remove("web.yaml");
    let _daemon = node.start();
    eventually("nothing of the pod is left", || node.is_clean("uid-web"));
    eventually("its processes have ended", || node.fixture.processes().len() == 1);
    assert!(node.log().contains("pod uid-web: no source describes it"), "{}", node.log());
}

#[test]
fn rc_04_a_pod_whose_checkpoint_cannot_be_read_stays_if_a_source_describes_it() {
    let node = node_without_processes();
    fs::write(node.fixture.path("run/node/pods/uid-web/checkpoint.json"), "{").expect("written");
    let _daemon = node.start();
    node.expect(&["wait", "default/web"]);
    wait_content(&node.path("web", "config").join("key"), "one");
    assert_eq!(fs::read_to_string(node.path("web", "scratch").join("file")).expect("it is kept"), "data");
    assert!(!node.log().contains("no source describes it"), "{}", node.log());
}

#[test]
fn rc_04_a_pod_whose_checkpoint_and_manifest_cannot_be_read_stays_until_its_manifest_can_be_read() {
    let node = node_without_processes();
    fs::write(node.fixture.path("run/node/pods/uid-web/checkpoint.json"), "{").expect("written");
    let manifest = fs::read_to_string(node.fixture.path("manifests/web.yaml")).expect("a manifest");
    node.put("web.yaml", "{");
    let _daemon = node.start();
    node.wait_for_pass();
    node.put("web.yaml", &manifest);
    node.expect(&["wait", "default/web"]);
    assert_eq!(fs::read_to_string(node.path("web", "scratch").join("file")).expect("it is kept"), "data");
    assert!(!node.log().contains("no source describes it"), "{}", node.log());
}
