//! The feed in `podfs node`: a real daemon, real supervisors and real mounts, with an API server.

use std::fs;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use crate::api_server::{Answer, ApiServer, Order, Style, claims};
use crate::common::node::Node;
use crate::common::{Running, config_map, eventually, wait_content};
use crate::rig::NODE;

/// An API server, and a node whose daemon uses it.
pub(super) struct Cluster {
    pub(super) server: ApiServer,
    pub(super) node: Node,
    /// A part of each pod's uid that differs in each test, because cgroups are named by the uid.
    serial: u64,
}

const APP: &str = "[{name: config, configMap: {name: app}}]";

impl Cluster {
    pub(super) fn new() -> Cluster {
        let server = ApiServer::start();
        server.put(&format!("{{apiVersion: v1, kind: Node, metadata: {{name: {NODE}}}}}"));
        server.put("{apiVersion: v1, kind: ServiceAccount, metadata: {name: default, namespace: default}}");
        Cluster { server, node: Node::new(), serial: fastrand::u64(..1 << 48) }
    }

    pub(super) fn start(&self) -> Running {
        self.node.start_command(self.command())
    }

    pub(super) fn command(&self) -> Command {
        let mut command = self.node.command();
        let kubeconfig = self.server.kubeconfig(NODE, Style::Embedded);
        command.arg("--kubeconfig").arg(kubeconfig).args(["--node-name", NODE]);
        command
    }

    pub(super) fn uid(&self, name: &str) -> String {
        format!("{name}-{:012x}", self.serial)
    }

    /// A pod with these volumes. Its container mounts all of them.
    pub(super) fn manifest(&self, name: &str, volumes: &str) -> String {
        let volumes: Value = serde_saphyr::from_str(volumes).expect("YAML");
        let names = volumes.as_array().expect("a list").iter().map(|volume| &volume["name"]);
        let mounts: Vec<_> = names
            .map(|name| json!({"name": name, "mountPath": format!("/{}", name.as_str().expect("text"))}))
            .collect();
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": "default", "uid": self.uid(name)},
            "spec": {
                "nodeName": NODE, "volumes": volumes,
                "containers": [{"name": "c", "image": "i", "volumeMounts": mounts}],
            },
        })
        .to_string()
    }

    pub(super) fn put_pod(&self, name: &str, volumes: &str) {
        self.server.put(&self.manifest(name, volumes));
    }

    pub(super) fn put_config(&self, value: &str) {
        self.server.put(&config_map("app", &[("key", value)]));
    }

    /// The problems of the sources of pods, as the daemon reports them.
    pub(super) fn trouble(&self) -> String {
        let state: Value = serde_json::from_str(&self.node.expect(&["state", "--output", "json"])).expect("JSON");
        state["trouble"].to_string()
    }

    pub(super) fn is_clean(&self, name: &str) -> bool {
        self.node.is_clean(&self.uid(name))
    }
}

#[test]
fn mg_08_a_pod_of_the_api_server_appears_changes_and_goes() {
    let cluster = Cluster::new();
    let claim = "{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: data, namespace: default, uid: c1}, \
                 spec: {volumeName: one}, status: {phase: Bound}}";
    let source = cluster.node.fixture.path("source");
    fs::create_dir(&source).expect("a directory");
    fs::write(source.join("file"), "on the node").expect("a file");
    cluster.server.put(claim);
    cluster.server.put(&format!(
        "{{apiVersion: v1, kind: PersistentVolume, metadata: {{name: one}}, spec: {{hostPath: {{path: {}}}, \
         accessModes: [ReadWriteOnce], capacity: {{storage: 1Gi}}, \
         claimRef: {{namespace: default, name: data, uid: c1}}}}}}",
        source.display()
    ));
    cluster.put_config("one");
    let _daemon = cluster.start();
    cluster.put_pod(
        "web",
        "[{name: config, configMap: {name: app}}, {name: data, persistentVolumeClaim: {claimName: data}}, \
         {name: access, projected: {sources: [{serviceAccountToken: {path: token}}, \
         {downwardAPI: {items: [{path: labels, fieldRef: {fieldPath: metadata.labels}}]}}]}}]",
    );
    let node = &cluster.node;
    eventually("the pod is known", || node.pod("web").is_some());
    node.expect(&["wait", "default/web"]);
    let (config, access) = (node.path("web", "config").join("key"), node.path("web", "access"));
    wait_content(&config, "one");
    wait_content(&node.path("web", "data").join("file"), "on the node");
    let token = claims(&fs::read_to_string(access.join("token")).expect("a token"));
    assert_eq!(token["kubernetes.io"]["pod"], json!({"name": "web", "uid": cluster.uid("web")}));
    cluster.put_config("two");
    wait_content(&config, "two");
    let mut pod = cluster.server.object("Pod", "default", "web").expect("a pod");
    pod["metadata"]["labels"] = json!({"color": "blue"});
    cluster.server.put_value(pod.clone());
    wait_content(&access.join("labels"), "color=\"blue\"");
    pod["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z".into();
    cluster.server.put_value(pod);
    eventually("the pod ends", || node.pod("web").is_some_and(|pod| pod["stage"] == "terminating"));
    cluster.put_config("three");
    wait_content(&config, "three");
    cluster.server.delete("Pod", "default", "web");
    node.expect(&["release", "default/web"]);
    eventually("nothing of the pod is left", || cluster.is_clean("web") && node.pod("web").is_none());
    eventually("nothing is watched for it", || cluster.server.watches("ConfigMap", "app") == 0);
    assert!(!node.log().contains("MountVolume.SetUp failed"), "{}", node.log());
    assert_eq!(cluster.server.connection_count(), 1);
    cluster.server.assert_conventions();
}

#[test]
fn cm_06_an_optional_object_that_may_not_be_read_is_not_taken_for_a_missing_one() {
    let cluster = Cluster::new();
    cluster.server.fail_always("watch", "configmaps", Answer::Error(500));
    cluster.put_pod("web", "[{name: config, configMap: {name: app, optional: true}}]");
    let _daemon = cluster.start();
    let node = &cluster.node;
    eventually("the server gets requests", || cluster.server.count("watch", "configmaps") > 1);
    eventually("the reason is reported", || {
        node.volume("web", "config")
            .is_some_and(|volume| volume["reason"].to_string().contains("configmap default/app"))
    });
    let refused = node.refused(&["wait", "default/web", "--timeout", "0"]);
    assert!(refused.contains("unmounted volumes=[config]"), "{refused}");
    cluster.server.heal();
    node.expect(&["wait", "default/web"]);
    assert!(!node.path("web", "config").join("key").exists());
}

#[test]
fn tk_05_tk_10_the_daemon_replaces_tokens_in_time_also_while_the_pod_ends() {
    let cluster = Cluster::new();
    cluster.server.change_behaviour(|behaviour| behaviour.token_lifetime = Some(Duration::from_secs(4)));
    cluster.put_pod("web", "[{name: access, projected: {sources: [{serviceAccountToken: {path: token}}]}}]");
    let _daemon = cluster.start();
    let node = &cluster.node;
    eventually("the pod is known", || node.pod("web").is_some());
    node.expect(&["wait", "default/web"]);
    let file = node.path("web", "access").join("token");
    let token = || fs::read_to_string(&file).expect("a token");
    let first = token();
    eventually("there is another token", || token() != first);
    let mut pod = cluster.server.object("Pod", "default", "web").expect("a pod");
    pod["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z".into();
    cluster.server.put_value(pod);
    eventually("the pod ends", || node.pod("web").is_some_and(|pod| pod["stage"] == "terminating"));
    let last = token();
    eventually("there is another token", || token() != last);
    assert!(!node.log().contains(&last), "no token is logged");
}

#[test]
fn a_server_that_is_away_at_the_start_keeps_static_pods_going_and_leaves_pods_of_the_server_alone() {
    let cluster = Cluster::new();
    cluster.put_config("one");
    cluster.put_pod("web", APP);
    let daemon = cluster.start();
    let node = &cluster.node;
    eventually("the pod is known", || node.pod("web").is_some());
    node.expect(&["wait", "default/web"]);
    let (config, supervisor) = (node.path("web", "config").join("key"), node.supervisor("web"));
    drop(daemon);
    cluster.server.connections(Order::Refuse);
    node.put("static.yaml", &cluster.manifest("static", "[{name: scratch, emptyDir: {}}]"));
    let _daemon = cluster.start();
    node.expect(&["wait", "default/static"]);
    eventually("the error is reported", || cluster.trouble().contains("cannot watch pods of node n1"));
    wait_content(&config, "one");
    cluster.server.connections(Order::Serve);
    eventually("the trouble is over", || cluster.trouble() == "[]");
    cluster.put_config("two");
    wait_content(&config, "two");
    assert_eq!(node.supervisor("web"), supervisor, "it was adopted");
}

#[test]
fn pods_that_may_not_be_listed_are_reported_and_static_pods_stay() {
    let cluster = Cluster::new();
    cluster.node.put("static.yaml", &cluster.manifest("static", "[{name: scratch, emptyDir: {}}]"));
    let mut command = cluster.node.command();
    command.arg("--kubeconfig").arg(cluster.server.kubeconfig("n2", Style::Embedded)).args(["--node-name", NODE]);
    let _daemon = cluster.node.start_command(command);
    cluster.node.expect(&["wait", "default/static"]);
    eventually("the refusal is reported", || {
        let trouble = cluster.trouble();
        trouble.contains("pods is forbidden") && trouble.contains("its credentials must be those of the node n1")
    });
}

#[test]
fn a_static_pod_with_a_mirror_pod_counts_once() {
    let cluster = Cluster::new();
    let mut mirror: Value = serde_json::from_str(&cluster.manifest("static-n1", "[]")).expect("JSON");
    mirror["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": cluster.uid("static")});
    cluster.server.put_value(mirror);
    cluster.node.put("static.yaml", &cluster.manifest("static", "[{name: scratch, emptyDir: {}}]"));
    cluster.put_pod("web", "[{name: scratch, emptyDir: {}}]");
    let _daemon = cluster.start();
    cluster.node.expect(&["wait", "default/static"]);
    eventually("the pods of the server are known", || cluster.node.pod("web").is_some());
    cluster.node.expect(&["wait", "default/web"]);
    assert!(cluster.node.pod("static-n1").is_none());
}
