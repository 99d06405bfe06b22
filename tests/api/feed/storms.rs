//! Storms of 409 and 410: a daemon keeps its objects, and has the last state when the storm is over.

use std::fs;
use std::time::Duration;

use serde_json::json;

use super::daemon::Cluster;
use crate::api_server::{Answer, End};
use crate::common::{eventually, wait_content};

const VOLUMES: &str = "[{name: config, configMap: {name: app}}, \
                       {name: access, projected: {sources: [{serviceAccountToken: {path: token}}]}}]";
/// The number of times that the server forgets its history.
const ROUNDS: u32 = 12;

#[test]
fn mg_06_a_storm_of_410_loses_no_pod_and_no_change_and_lists_no_more_than_it_has_to() {
    let cluster = Cluster::new();
    cluster.put_config("zero");
    cluster.put_pod("web", VOLUMES);
    let _daemon = cluster.start();
    let (server, node) = (&cluster.server, &cluster.node);
    eventually("the pod is known", || node.pod("web").is_some());
    node.expect(&["wait", "default/web"]);
    let (config, supervisor) = (node.path("web", "config").join("key"), node.supervisor("web"));
    wait_content(&config, "zero");
    server.forget_requests();
    for round in 0..ROUNDS {
        // The next requests get the answer 410, and later ones find that the server has forgotten its history.
        for (verb, resource) in [("watch", "configmaps"), ("list", "configmaps"), ("watch", "pods"), ("list", "pods")] {
            server.fail_only(verb, resource, 1, Answer::Gone);
        }
        server.cut(Some(1), Some(Duration::from_millis(20)), End::Clean);
        cluster.put_config(&format!("{round}"));
        server.compact();
        cluster.put_pod(&format!("pod{round}"), "[{name: scratch, emptyDir: {}}]");
        assert_ne!(fs::read_to_string(&config).expect("it is mounted throughout"), "");
    }
    server.heal();
    wait_content(&config, &format!("{}", ROUNDS - 1));
    for round in 0..ROUNDS {
        eventually("the pod is known", || node.pod(&format!("pod{round}")).is_some());
        node.expect(&["wait", &format!("default/pod{round}")]);
    }
    assert_eq!(node.supervisor("web"), supervisor, "no supervisor was started anew");
    eventually("there is no trouble left", || cluster.trouble() == "[]");
    cluster.put_config("after");
    wait_content(&config, "after");
    server.assert_conventions();
}

#[test]
fn tk_05_a_storm_of_409_delays_tokens_and_the_status_of_the_node_and_nothing_else() {
    let cluster = Cluster::new();
    let (server, node) = (&cluster.server, &cluster.node);
    cluster.put_config("one");
    for (verb, resource) in
        [("create", "serviceaccounts/token"), ("patch", "nodes/status"), ("create", "events"), ("patch", "events")]
    {
        server.fail_always(verb, resource, Answer::Error(409));
    }
    cluster.put_pod("web", VOLUMES);
    let mut command = cluster.command();
    command.arg("--report-volumes-in-use");
    let _daemon = node.start_command(command);
    eventually("the other volume is mounted", || {
        node.volume("web", "config").is_some_and(|volume| volume["mount"] == "mounted")
    });
    let config = node.path("web", "config").join("key");
    eventually("the reason is reported", || {
        node.volume("web", "access").is_some_and(|volume| volume["reason"].to_string().contains("has been modified"))
    });
    cluster.put_config("two");
    wait_content(&config, "two");
    eventually("the token is requested again and again", || server.count("create", "serviceaccounts/token") >= 3);
    eventually("the status is patched again and again", || server.count("patch", "nodes/status") >= 3);
    server.heal();
    node.expect(&["wait", "default/web"]);
    assert!(fs::read_to_string(node.path("web", "access").join("token")).is_ok_and(|token| !token.is_empty()));
    eventually("the status is reported", || {
        let object = server.object("Node", "", crate::rig::NODE).expect("the Node");
        object["status"]["volumesInUse"] == json!([])
    });
}
