//! `podfs node --nri` with an API server: which pods are chosen, and that podfs leaves the others and their volumes alone.

use std::fs;
use std::process::Command;

use serde_json::{Value, json};

use crate::api_server::{ApiServer, Style, User};
use crate::common::eventually;
use crate::common::node::Node;
use crate::rig::NODE;

/// A server, and a node of it with a kubelet and no container runtime.
struct Cluster {
    server: ApiServer,
    node: Node,
}

impl Cluster {
    fn new() -> Cluster {
        let (server, node) = (ApiServer::start(), Node::new());
        fs::create_dir_all(node.fixture.path("kubelet/pods")).expect("a directory");
        for namespace in ["default", "shop"] {
            let data = json!({"key": "one"});
            server.put_value(json!({"apiVersion": "v1", "kind": "ConfigMap", "data": data,
                "metadata": {"name": "app", "namespace": namespace}}));
        }
        Cluster { server, node }
    }

    fn command(&self) -> Command {
        let mut command = self.node.bare_command();
        command.arg("--kubeconfig").arg(self.server.kubeconfig(NODE, Style::Embedded)).arg("--node-name").arg(NODE);
        command.arg("--nri").arg(self.node.fixture.path("nri.sock"));
        command.arg("--kubelet-root").arg(self.node.fixture.path("kubelet"));
        command
    }

    fn put_pod(&self, namespace: &str, name: &str, metadata: &Value) {
        let mut pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": namespace, "uid": format!("uid-{name}")},
            "spec": {
                "nodeName": NODE,
                "containers": [{"name": "c", "image": "none", "volumeMounts": [
                    {"name": "config", "mountPath": "/config"}, {"name": "scratch", "mountPath": "/scratch"}]}],
                "volumes": [{"name": "config", "configMap": {"name": "app"}}, {"name": "scratch", "emptyDir": {}}],
            },
        });
        for (field, value) in metadata.as_object().into_iter().flatten() {
            pod["metadata"][field] = value.clone();
        }
        self.server.put_value(pod);
    }

    fn is_mounted(&self, pod: &str) -> bool {
        self.node.volume(pod, "config").is_some_and(|volume| volume["mount"] == "mounted")
    }
}

#[test]
fn marked_pods_have_their_payload_volumes_mounted_and_no_others_before_a_container_asks() {
    let cluster = Cluster::new();
    cluster.put_pod("default", "by-label", &json!({"labels": {"podfs.io/volumes": "true"}}));
    cluster.put_pod("default", "by-annotation", &json!({"annotations": {"podfs.io/volumes": "true"}}));
    cluster.put_pod("default", "plain", &json!({}));
    let daemon = cluster.node.start_command(cluster.command());
    for pod in ["by-label", "by-annotation"] {
        eventually("its volume is mounted", || cluster.is_mounted(pod));
        assert!(cluster.node.volume(pod, "scratch").is_none(), "the kubelet has that");
        assert!(!cluster.node.fixture.path(&format!("root/pods/uid-{pod}/volumes/kubernetes.io~empty-dir")).exists());
    }
    assert!(cluster.node.pod("plain").is_none());
    daemon.wait_log("pods are chosen by their own label or annotation podfs.io/volumes alone");
    // No runtime says that there were containers, and the kubelet has no directory of the pod.
    cluster.server.delete("Pod", "default", "by-label");
    eventually("nothing of the pod is left", || cluster.node.is_clean("uid-by-label"));
}

#[test]
fn pods_of_a_marked_namespace_are_chosen_where_podfs_may_list_namespaces() {
    let cluster = Cluster::new();
    cluster.server.permit(&User::node(NODE), &["list", "watch", "get"], "namespaces");
    cluster.put_pod("shop", "cart", &json!({}));
    cluster.put_pod("shop", "never", &json!({"labels": {"podfs.io/volumes": "false"}}));
    cluster.put_pod("default", "plain", &json!({}));
    let _daemon = cluster.node.start_command(cluster.command());
    let marked = r#"{apiVersion: v1, kind: Namespace, metadata: {name: shop, labels: {podfs.io/volumes: "true"}}}"#;
    cluster.server.put(marked);
    eventually("its volume is mounted", || cluster.is_mounted("cart"));
    assert!(cluster.node.pod("plain").is_none() && cluster.node.pod("never").is_none());
}
