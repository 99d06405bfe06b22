//! The Node object of the pod's node.

use std::fs;

use crate::api_server::{Answer, InitialEvents};
use crate::common::*;
use crate::rig::Rig;

/// A volume with the limit and the request of cpu of a container that has neither.
const LIMITS: &str = "[{name: limits, downwardAPI: {items: [\
    {path: cpu, resourceFieldRef: {containerName: web, resource: limits.cpu, divisor: 1m}}, \
    {path: request, resourceFieldRef: {containerName: web, resource: requests.cpu, divisor: 1m}}]}}]";

fn node(cpu: &str) -> String {
    format!(
        "{{apiVersion: v1, kind: Node, metadata: {{name: n1}}, status: {{allocatable: {{cpu: {cpu}, memory: 1Gi}}}}}}"
    )
}

#[test]
fn da_08_da_09_a_container_without_a_limit_shows_what_its_node_offers() {
    let rig = Rig::new(LIMITS);
    rig.server.put(&node("3500m"));
    let running = rig.run();
    let volume = running.volume("limits");
    assert_eq!(fs::read_to_string(volume.join("cpu")).expect("a file"), "3500");
    assert_eq!(fs::read_to_string(volume.join("request")).expect("a file"), "0");
    rig.wait_watched("Node", "n1");
    rig.server.put(&node("2500m"));
    wait_content(&volume.join("cpu"), "2500");
}

#[test]
fn da_09_nothing_is_made_up_while_the_node_may_not_be_read() {
    let rig = Rig::new(LIMITS);
    rig.server.put(&node("3500m"));
    rig.server.initial_events(InitialEvents::Refused);
    rig.server.fail_always("list", "nodes", Answer::Error(500));
    let mut running = rig.start();
    running.wait_log("cannot list node n1");
    assert!(!running.is_ready());
    eventually("the reason is reported", || {
        rig.reason("limits").is_some_and(|reason| reason.contains("cannot list node n1"))
    });
    rig.server.heal();
    running.wait_ready();
    assert_eq!(fs::read_to_string(running.volume("limits").join("cpu")).expect("a file"), "3500");
}

#[test]
fn a_node_that_no_volume_shows_is_not_read() {
    let rig = Rig::of_config("1");
    let _running = rig.run();
    assert_eq!(rig.server.lists("nodes"), 0);
}
