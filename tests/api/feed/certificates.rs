//! Pod certificates through `podfs node`: the daemon requests and renews them, and supervisors show them.

use std::fs;

use serde_json::Value;

use super::daemon::Cluster;
use crate::api_server::Order;
use crate::common::eventually;
use crate::signer::{REQUESTS, Signer, refuse, volume};

#[test]
fn pc_01_pc_03_the_daemon_asks_for_a_certificate_and_for_the_next_one_before_it_ends() {
    let (cluster, signer) = (Cluster::new(), Signer::new());
    cluster.put_pod("web", &volume("ED25519"));
    let _daemon = cluster.start();
    let node = &cluster.node;
    let request = signer.next(&cluster.server);
    eventually("the reason is reported", || reason(&cluster).contains("credential bundle is not issued yet"));
    let refused = node.refused(&["wait", "default/web", "--timeout", "0"]);
    assert!(refused.contains("unmounted volumes=[identity]"), "{refused}");
    // The renewal is due when half of a short lifetime is over.
    signer.issue(&cluster.server, request, 1, 8);
    node.expect(&["wait", "default/web"]);
    let shown = node.path("web", "identity");
    let read = |name: &str| fs::read_to_string(shown.join(name)).expect("a file");
    let first = read("both.pem");
    assert_eq!(first, read("key.pem") + &read("chain.pem"));
    signer.issue(&cluster.server, signer.next(&cluster.server), 3600, 7200);
    eventually("the next certificate is shown", || read("both.pem") != first);
    assert_ne!(read("key.pem"), first.split("-----BEGIN CERTIFICATE").next().unwrap_or_default());
    assert!(!node.log().contains("PRIVATE KEY"), "no key is logged");
    cluster.server.assert_conventions();
}

#[test]
fn pc_02_a_denied_certificate_is_the_reason_why_the_pod_waits_and_is_not_requested_again() {
    let (cluster, signer) = (Cluster::new(), Signer::new());
    cluster.put_pod("web", &volume("ECDSAP256"));
    let _daemon = cluster.start();
    refuse(&cluster.server, signer.next(&cluster.server), "Denied");
    let denied = "PodCertificateRequest was permanently denied: reason=\"UnsupportedKeyType\" message=\"use ED25519\"";
    eventually("the reason is reported", || reason(&cluster).contains(denied));
    let is_denial = |event: &Value| event["message"].as_str().is_some_and(|message| message.contains(denied));
    eventually("the pod gets an event", || cluster.server.objects("Event").iter().any(is_denial));
    // After a new connection, podfs does not request the certificate again.
    cluster.server.connections(Order::Refuse);
    eventually("the daemon reports the outage", || cluster.trouble().contains("cannot watch pods"));
    cluster.server.connections(Order::Serve);
    eventually("the outage is over", || cluster.trouble() == "[]");
    assert_eq!(cluster.server.count("create", REQUESTS), 1);
    assert!(reason(&cluster).contains(denied));
}

/// The reason that the daemon gives for the pod's volume.
fn reason(cluster: &Cluster) -> String {
    cluster
        .node
        .volume("web", "identity")
        .map(|volume| volume["reason"].to_string())
        .unwrap_or_default()
        .replace("\\\"", "\"")
}
