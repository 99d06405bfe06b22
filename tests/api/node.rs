//! `podfs node` with an API server: pods of the node, their objects, events, the status of the Node object.

use std::process::Command;

use serde_json::{Value, json};

use crate::api_server::{Answer, ApiServer, Order, Style};
use crate::common::node::Node;
use crate::common::{config_map, eventually, wait_content};
use crate::rig::NODE;

/// A server, and a node of it.
struct Cluster {
    server: ApiServer,
    node: Node,
}

impl Cluster {
    fn new() -> Cluster {
        Cluster { server: ApiServer::start(), node: Node::new() }
    }

    fn command(&self) -> Command {
        let mut command = self.node.bare_command();
        command.arg("--kubeconfig").arg(self.server.kubeconfig(NODE, Style::Embedded)).arg("--node-name").arg(NODE);
        command
    }

    /// A pod of the node, whose container mounts the volume `config` of the ConfigMap of this name.
    fn put_pod(&self, name: &str, config: &str, more: &Value) {
        let mut pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": "default", "uid": format!("uid-{name}")},
            "spec": {
                "nodeName": NODE,
                "containers": [
                    {"name": "c", "image": "none", "volumeMounts": [{"name": "config", "mountPath": "/config"}]}
                ],
                "volumes": [{"name": "config", "configMap": {"name": config}}],
            },
        });
        if let Some(more) = more.as_object() {
            for (field, value) in more {
                match (&mut pod[field], value) {
                    (Value::Object(known), Value::Object(new)) => known.extend(new.clone()),
                    (known, new) => *known = new.clone(),
                }
            }
        }
        self.server.put_value(pod);
    }
}

#[test]
fn pods_of_the_node_are_served_until_they_are_deleted_and_released() {
    let cluster = Cluster::new();
    let Cluster { server, node } = &cluster;
    server.put(&config_map("app", &[("key", "one")]));
    cluster.put_pod("web", "app", &json!({}));
    cluster.put_pod("db", "app", &json!({}));
    cluster.put_pod("elsewhere", "app", &json!({"spec": {"nodeName": "n2"}}));
    let _daemon = node.start_command(cluster.command());
    for pod in ["default/web", "default/db"] {
        node.expect(&["wait", pod]);
    }
    assert!(node.pod("elsewhere").is_none());
    let (web, db) = (node.path("web", "config"), node.path("db", "config"));
    assert_eq!(server.watches("ConfigMap", "app"), 1, "MG-01: one watch for both pods");
    server.put(&config_map("app", &[("key", "two")]));
    wait_content(&web.join("key"), "two");
    wait_content(&db.join("key"), "two");

    cluster.put_pod("web", "app", &json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}));
    eventually("the pod is being deleted", || node.pod("web").is_some_and(|pod| pod["stage"] == "terminating"));
    server.put(&config_map("app", &[("key", "three")]));
    wait_content(&web.join("key"), "three");
    node.expect(&["release", "default/web"]);
    node.expect(&["wait", "--unmounted", "default/web"]);
    server.delete("Pod", "default", "web");
    eventually("nothing of the pod is left", || node.is_clean("uid-web") && node.pod("web").is_none());
    assert_eq!(std::fs::read_to_string(db.join("key")).expect("the other pod is served"), "three");
    server.assert_conventions();
}

#[test]
fn mg_04_the_ttl_annotation_of_the_node_delays_no_change() {
    let cluster = Cluster::new();
    let Cluster { server, node } = &cluster;
    let annotations = json!({"node.alpha.kubernetes.io/ttl": "86400"});
    server
        .put_value(json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE, "annotations": annotations}}));
    server.put(&config_map("app", &[("key", "one")]));
    cluster.put_pod("web", "app", &json!({}));
    let _daemon = node.start_command(cluster.command());
    node.expect(&["wait", "default/web"]);
    for value in ["two", "three"] {
        server.put(&config_map("app", &[("key", value)]));
        wait_content(&node.path("web", "config").join("key"), value);
    }
    assert_eq!(server.count("get", "configmaps"), 0, "the object is watched");
}

#[test]
fn a_pod_that_has_ended_when_it_is_first_seen_is_not_mounted() {
    let cluster = Cluster::new();
    cluster.server.put(&config_map("app", &[("key", "one")]));
    cluster.put_pod("done", "app", &json!({"status": {"phase": "Succeeded"}}));
    cluster.put_pod("web", "app", &json!({}));
    let _daemon = cluster.node.start_command(cluster.command());
    cluster.node.expect(&["wait", "default/web"]);
    assert!(cluster.node.volume("done", "config").is_none());
    assert!(!cluster.node.fixture.path("root/pods/uid-done").exists());
}

#[test]
fn me_02_a_volume_that_cannot_be_mounted_is_an_event_of_the_pod() {
    let cluster = Cluster::new();
    let Cluster { server, node } = &cluster;
    cluster.put_pod("web", "late", &json!({}));
    let _daemon = node.start_command(cluster.command());
    let has_event = |reason: &str, message: &str| {
        let events = server.objects("Event");
        events.iter().any(|event| {
            event["reason"] == reason && event["message"] == message && event["involvedObject"]["uid"] == "uid-web"
        })
    };
    let failure = "MountVolume.SetUp failed for volume \"config\" : configmap \"late\" not found";
    eventually("the failure is an event", || has_event("FailedMount", failure));
    server.put(&config_map("late", &[("key", "here")]));
    node.expect(&["wait", "default/web"]);
    let success = "MountVolume.SetUp succeeded for volume \"config\"";
    eventually("the success is an event", || has_event("SuccessfulMountVolume", success));
}

#[test]
fn static_pods_start_while_the_server_is_away() {
    let cluster = Cluster::new();
    let Cluster { server, node } = &cluster;
    server.put(&config_map("app", &[("key", "one")]));
    cluster.put_pod("web", "app", &json!({}));
    server.connections(Order::Refuse);
    node.put("local.yaml", &config_map("local", &[("key", "here")]));
    node.put(
        "static.yaml",
        "{apiVersion: v1, kind: Pod, metadata: {name: static, uid: uid-static}, spec: {volumes: [{name: config, \
         configMap: {name: local}}], containers: [{name: c, volumeMounts: [{name: config, mountPath: /c}]}]}}",
    );
    let mut command = cluster.command();
    command.arg("--manifests").arg(node.fixture.path("manifests"));
    let _daemon = node.start_command(command);
    node.expect(&["wait", "default/static"]);
    assert!(node.pod("web").is_none(), "the server has not answered");
    server.connections(Order::Serve);
    node.expect(&["wait", "default/web"]);
    wait_content(&node.path("web", "config").join("key"), "one");
}

#[test]
fn volumes_in_use_are_reported_in_the_status_of_the_node_with_the_option() {
    let cluster = Cluster::new();
    let Cluster { server, node } = &cluster;
    let stale = json!({"volumesInUse": ["kubernetes.io/stale/x"]});
    server.put_value(json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}, "status": stale}));
    let mut command = cluster.command();
    command.arg("--report-volumes-in-use");
    let _daemon = node.start_command(command);
    eventually("what is in use is reported", || {
        let object = server.object("Node", "", NODE).expect("the Node");
        object["status"]["volumesInUse"].as_array().is_some_and(Vec::is_empty)
    });
}

/// `volumesInUse` in the status of the Node object.
fn reported(server: &ApiServer) -> Value {
    server.object("Node", "", NODE).expect("the Node")["status"]["volumesInUse"].clone()
}

#[test]
fn volumes_that_a_controller_attaches_are_in_use_until_they_are_unmounted_and_stay_so_while_the_cluster_is_not_known() {
    let cluster = Cluster::new();
    let Cluster { server, node } = &cluster;
    let source = node.fixture.path("source");
    std::fs::create_dir(&source).expect("a directory");
    let host_path = format!("hostPath: {{path: {}}}", source.display());
    let data = |number: u32| format!("{{name: data{number}, persistentVolumeClaim: {{claimName: data{number}}}}}");
    let csi = ["csi: {driver: attached.io, volumeHandle: one}", "csi: {driver: other.io, volumeHandle: two}"];
    for (number, source) in [(1, csi[0]), (2, csi[1]), (3, host_path.as_str())] {
        server.put(&format!(
            "{{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {{name: data{number}, namespace: default}}, \
             spec: {{volumeName: pv{number}}}, status: {{phase: Bound}}}}"
        ));
        server.put(&format!(
            "{{apiVersion: v1, kind: PersistentVolume, metadata: {{name: pv{number}}}, spec: {{{source}, capacity: {{storage: 1Gi}}, \
             accessModes: [ReadWriteOnce], claimRef: {{namespace: default, name: data{number}}}}}}}"
        ));
    }
    let driver =
        "{apiVersion: storage.k8s.io/v1, kind: CSIDriver, metadata: {name: other.io}, spec: {attachRequired: false}}";
    server.put(driver);
    server.put(&format!("{{apiVersion: v1, kind: Node, metadata: {{name: {NODE}}}}}"));
    let volumes: Value = serde_saphyr::from_str(&format!("[{}, {}, {}]", data(1), data(2), data(3))).expect("YAML");
    let mounts: Vec<_> =
        (1..=3).map(|number| json!({"name": format!("data{number}"), "mountPath": format!("/{number}")})).collect();
    let containers = json!([{"name": "c", "image": "none", "volumeMounts": mounts}]);
    cluster.put_pod("web", "app", &json!({"spec": {"volumes": volumes, "containers": containers}}));
    let command = || {
        let mut command = cluster.command();
        command.args(["--report-volumes-in-use", "--release-when-gone"]);
        command
    };
    let attached = json!(["kubernetes.io/csi/attached.io^one"]);
    let daemon = node.start_command(command());
    eventually("what a controller attaches is reported", || reported(server) == attached);
    // Another client overwrites the status, as when an operator deletes the Node object and makes it anew.
    server.put(&format!("{{apiVersion: v1, kind: Node, metadata: {{name: {NODE}}}}}"));
    eventually("it is reported in the new object", || reported(server) == attached);
    eventually("the size is known", || node.volume("web", "data3").is_some_and(|volume| volume["size"] == 1 << 30));

    // Another daemon that may not read claims does not know what the volumes are.
    drop(daemon);
    server.fail_always("get", "persistentvolumeclaims", Answer::Error(403));
    server.forget_requests();
    let daemon = node.start_command(command());
    eventually("it is reported again", || server.count("patch", "nodes/status") > 0);
    assert_eq!(reported(server), attached);
    server.heal();
    server.delete("Pod", "default", "web");
    eventually("nothing is in use", || reported(server) == json!([]));
    drop(daemon);
}
