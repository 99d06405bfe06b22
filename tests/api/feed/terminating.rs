//! VM-12: pods that are being deleted, or have ended, when a daemon first sees them or later.

use std::fs;

use serde_json::{Value, json};

use super::daemon::Cluster;
use crate::common::{eventually, wait_content};

const APP: &str = "[{name: config, configMap: {name: app}}]";

fn manifest(cluster: &Cluster, name: &str) -> Value {
    serde_json::from_str(&cluster.manifest(name, APP)).expect("JSON")
}

fn terminating(mut pod: Value) -> Value {
    pod["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z".into();
    pod
}

fn terminal(mut pod: Value) -> Value {
    pod["status"] = json!({"phase": "Succeeded"});
    pod
}

#[test]
fn vm_12_a_pod_that_ends_or_has_ended_when_it_is_first_seen_is_never_mounted() {
    let cluster = Cluster::new();
    cluster.put_config("one");
    // Two such pods exist before the daemon starts; two appear while it runs.
    cluster.server.put_value(terminating(manifest(&cluster, "ending")));
    cluster.server.put_value(terminal(manifest(&cluster, "ended")));
    cluster.put_pod("web", APP);
    let _daemon = cluster.start();
    let node = &cluster.node;
    eventually("the pod is known", || node.pod("web").is_some());
    node.expect(&["wait", "default/web"]);
    cluster.server.put_value(terminating(manifest(&cluster, "late-ending")));
    cluster.server.put_value(terminal(manifest(&cluster, "late-ended")));
    cluster.put_pod("last", APP);
    eventually("the last one is known", || node.pod("last").is_some());
    node.expect(&["wait", "default/last"]);
    for name in ["ending", "ended", "late-ending", "late-ended"] {
        assert!(cluster.is_clean(name), "{name}: {:?}", node.pod(name));
    }
}

#[test]
fn vm_12_a_pod_that_is_being_deleted_keeps_its_volumes_over_a_restart_of_the_daemon_and_they_follow_their_objects() {
    let cluster = Cluster::new();
    cluster.put_config("one");
    cluster.put_pod("web", APP);
    cluster.put_pod("done", APP);
    let daemon = cluster.start();
    let node = &cluster.node;
    for name in ["web", "done"] {
        eventually("the pod is known", || node.pod(name).is_some());
        node.expect(&["wait", &format!("default/{name}")]);
    }
    let (config, supervisor) = (node.path("web", "config").join("key"), node.supervisor("web"));
    cluster.server.put_value(terminating(manifest(&cluster, "web")));
    eventually("the pod ends", || node.pod("web").is_some_and(|pod| pod["stage"] == "terminating"));
    drop(daemon);
    // The pod `done` ends while no daemon runs.
    cluster.server.put_value(terminal(manifest(&cluster, "done")));
    let _daemon = cluster.start();
    eventually("both are known again", || {
        let stage = |name: &str| node.pod(name).map(|pod| pod["stage"].clone());
        stage("web") == Some("terminating".into()) && stage("done") == Some("terminal".into())
    });
    assert_eq!(fs::read_to_string(&config).expect("it is mounted"), "one");
    cluster.put_config("two");
    wait_content(&config, "two");
    wait_content(&node.path("done", "config").join("key"), "two");
    eventually("the supervisor is known", || node.pod("web").is_some_and(|pod| pod["supervisor"].is_number()));
    assert_eq!(node.supervisor("web"), supervisor);
    for name in ["web", "done"] {
        cluster.server.delete("Pod", "default", name);
        node.expect(&["release", &format!("default/{name}")]);
        eventually("nothing of the pod is left", || cluster.is_clean(name));
    }
}
