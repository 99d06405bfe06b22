//! `podfs node --register-csi-drivers`: drivers of the node in the CSINode and the Node object.

use std::process::Command;

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::api_server::{Answer, ApiServer, Order, Style};
use crate::common::node::Node;
use crate::common::{Running, eventually};
use crate::csi_driver::{CsiDriver, DRIVER, Fault};
use crate::rig::NODE;
use crate::roles::node::account;
use crate::roles::{Account, permissions_in};
use podfs::csi::v1::{NodeGetInfoResponse, Topology};
use tonic::Code;

const NODE_IDS: &str = "csi.volume.kubernetes.io/nodeid";

/// A server with the Node, and a node of it.
struct Cluster {
    server: ApiServer,
    podfs: Account,
    node: Node,
}

impl Cluster {
    fn new() -> Cluster {
        let server = ApiServer::start();
        server.put_value(json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": NODE, "uid": "node-uid", "labels": {"kubernetes.io/hostname": NODE}},
        }));
        let podfs = account(&server, &["csi-drivers.yaml"]);
        Cluster { server, podfs, node: Node::new() }
    }

    fn start(&self) -> Running {
        let mut command: Command = self.node.bare_command();
        command.arg("--kubeconfig").arg(self.server.kubeconfig_of(&self.podfs.user, Style::Token));
        command.arg("--node-name").arg(NODE);
        command.arg("--register-csi-drivers");
        self.node.start_command(command)
    }

    fn driver(&self) -> CsiDriver {
        let source = self.node.fixture.path("source");
        std::fs::create_dir_all(&source).expect("a directory");
        CsiDriver::start(&self.node.fixture.path("root"), &source, &[])
    }

    fn csi_node(&self) -> Value {
        self.server.object("CSINode", "", NODE).unwrap_or_default()
    }

    fn drivers(&self) -> Value {
        self.csi_node()["spec"]["drivers"].clone()
    }

    fn metadata(&self) -> Value {
        self.server.object("Node", "", NODE).expect("the Node")["metadata"].clone()
    }
}

/// A driver's answer to NodeGetInfo: the node's name, its zone, and the most volumes that it can have.
fn info(node_id: &str, zone: &str, most: i64) -> NodeGetInfoResponse {
    let segments = [("topology.acme.com/zone".to_owned(), zone.to_owned())].into();
    NodeGetInfoResponse {
        node_id: node_id.to_owned(),
        max_volumes_per_node: most,
        accessible_topology: Some(Topology { segments }),
    }
}

fn entry(node_id: &str) -> Value {
    json!([{"name": DRIVER, "nodeID": node_id, "topologyKeys": ["topology.acme.com/zone"], "allocatable": {"count": 24}}])
}

#[test]
fn cs_16_a_driver_that_registers_is_in_the_cluster_until_it_goes() {
    let cluster = Cluster::new();
    let _daemon = cluster.start();
    eventually("the CSINode is there without a driver", || cluster.drivers() == json!([]));
    let metadata = &cluster.csi_node()["metadata"];
    assert_eq!(
        metadata["ownerReferences"],
        json!([{"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": "node-uid"}])
    );
    let migrated = metadata["annotations"]["storage.alpha.kubernetes.io/migrated-plugins"].as_str().expect("text");
    assert!(migrated.starts_with("kubernetes.io/aws-ebs,kubernetes.io/azure-disk,"), "{migrated}");

    let driver = cluster.driver();
    eventually("the driver has its entry", || cluster.drivers()[0]["name"] == DRIVER);
    assert_eq!(cluster.drivers(), json!([{"name": DRIVER, "nodeID": "worker-1", "topologyKeys": []}]));
    assert_eq!(cluster.metadata()["annotations"][NODE_IDS], json!({DRIVER: "worker-1"}).to_string());
    eventually("podfs tells the driver", || driver.answers() == [""]);
    driver.unregister(&cluster.node.fixture.path("root"));
    eventually("the driver has no entry", || cluster.drivers() == json!([]));
    eventually("the driver has no name for the node", || cluster.metadata()["annotations"][NODE_IDS].is_null());
    let added = permissions_in("examples/rbac/csi-drivers.yaml", "podfs-csi-drivers");
    assert_eq!(added.difference(&cluster.podfs.used(&cluster.server)).count(), 0, "rules that podfs does not need");
    cluster.podfs.assert_suffices(&cluster.server);
    cluster.server.assert_conventions();
}

#[test]
fn cs_16_the_topology_of_a_driver_becomes_labels_and_its_limit_is_allocatable() {
    let cluster = Cluster::new();
    let driver = cluster.driver();
    driver.answer_info(info("i-1", "a", 24));
    let _daemon = cluster.start();
    eventually("the driver has its entry", || cluster.drivers() == entry("i-1"));
    let labels = json!({"kubernetes.io/hostname": NODE, "topology.acme.com/zone": "a"});
    assert_eq!(cluster.metadata()["labels"], labels);
    driver.unregister(&cluster.node.fixture.path("root"));
    eventually("the driver has no entry", || cluster.drivers() == json!([]));
    assert_eq!(cluster.metadata()["labels"], labels, "volumes may have an affinity to these labels");
    cluster.server.assert_conventions();
}

#[test]
fn cs_16_a_driver_that_calls_the_node_differently_after_a_restart_has_its_new_entry() {
    let cluster = Cluster::new();
    let mut driver = cluster.driver();
    driver.answer_info(info("old", "a", 24));
    let mut daemon = cluster.start();
    eventually("the driver has its entry", || cluster.drivers() == entry("old"));
    daemon.signal(Signal::SIGKILL);
    daemon.wait();
    driver.answer_info(info("new", "a", 24));
    let _daemon = cluster.start();
    eventually("its entry is the new one", || cluster.drivers() == entry("new"));
    driver.answer_info(info("newer", "a", 24));
    driver.listen(&cluster.node.fixture.path("root"));
    eventually("its entry is that of the new socket", || cluster.drivers() == entry("newer"));
    assert_eq!(cluster.metadata()["annotations"][NODE_IDS], json!({DRIVER: "newer"}).to_string());
    cluster.server.assert_conventions();
}

#[test]
fn cs_16_another_writer_of_the_objects_is_respected() {
    let cluster = Cluster::new();
    let other = json!({"name": "other.io", "nodeID": "x", "topologyKeys": null});
    cluster.server.put_value(json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "CSINode", "metadata": {"name": NODE},
        "spec": {"drivers": [other]},
    }));
    for resource in ["csinodes", "nodes/status"] {
        cluster.server.fail_only("patch", resource, 1, Answer::Error(409));
    }
    let driver = cluster.driver();
    let _daemon = cluster.start();
    eventually("both drivers have entries", || cluster.drivers().as_array().is_some_and(|drivers| drivers.len() == 2));
    assert_eq!(cluster.drivers()[0]["name"], "other.io");
    assert!(cluster.server.count("patch", "csinodes") >= 3, "the annotation, a conflict, and the driver");
    eventually("podfs tells the driver of success alone", || driver.answers() == [""]);
    cluster.server.assert_conventions();
}

#[test]
fn cs_16_a_driver_that_fails_or_contradicts_the_node_gets_the_reason_and_is_asked_again() {
    let cluster = Cluster::new();
    let mut node = cluster.server.object("Node", "", NODE).expect("the Node");
    node["metadata"]["labels"]["topology.acme.com/zone"] = "b".into();
    cluster.server.put_value(node.clone());
    let driver = cluster.driver();
    driver.answer_info(info("i-1", "a", 24));
    driver.fail("NodeGetInfo", Fault::Fails(Code::Internal));
    let daemon = cluster.start();
    eventually("podfs tells the driver of both", || driver.answers().len() >= 2);
    let answers = driver.answers();
    assert!(answers[0].contains("NodeGetInfo failed (Internal): as the test says"), "{answers:?}");
    assert!(answers[1].starts_with("detected topology value collision: "), "{answers:?}");
    assert_eq!(cluster.drivers(), json!([]), "{}", daemon.log());
    node["metadata"]["labels"]["topology.acme.com/zone"] = "a".into();
    cluster.server.put_value(node);
    eventually("it is asked again", || cluster.drivers() == entry("i-1"));
    cluster.server.assert_conventions();
}

#[test]
fn cs_16_a_driver_waits_for_a_server_that_is_away_and_leaves_while_it_is() {
    let cluster = Cluster::new();
    let driver = cluster.driver();
    cluster.server.connections(Order::Refuse);
    let _daemon = cluster.start();
    eventually("the driver was asked", || driver.count("NodeGetInfo") == 1);
    assert_eq!(driver.answers(), Vec::<String>::new());
    cluster.server.connections(Order::Serve);
    eventually("podfs tells the driver", || driver.answers() == [""]);
    cluster.server.connections(Order::Refuse);
    driver.unregister(&cluster.node.fixture.path("root"));
    cluster.server.connections(Order::Serve);
    eventually("the driver has no entry", || cluster.drivers() == json!([]));
}
