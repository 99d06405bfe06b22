//! `podfs node --nri` with an API server: which pods podfs chooses, and that it does not touch other pods and volumes.

use std::process::Command;

use podfs::node::nri::messages::nri::Event;
use serde_json::{Value, json};

use crate::api_server::{ApiServer, Style, User};
use crate::common::eventually;
use crate::rig::NODE;
use crate::runtime::{Machine, container};

/// A server, and a node of it with a kubelet.
struct Cluster {
    server: ApiServer,
    machine: Machine,
}

impl Cluster {
    fn new() -> Cluster {
        let (server, machine) = (ApiServer::start(), Machine::new());
        for namespace in ["default", "shop"] {
            let data = json!({"key": "one"});
            server.put_value(json!({"apiVersion": "v1", "kind": "ConfigMap", "data": data,
                "metadata": {"name": "app", "namespace": namespace}}));
        }
        Cluster { server, machine }
    }

    fn command(&self) -> Command {
        let mut command = self.machine.node.bare_command();
        command.arg("--kubeconfig").arg(self.server.kubeconfig(NODE, Style::Embedded)).arg("--node-name").arg(NODE);
        command.arg("--nri").arg(self.machine.socket());
        command.arg("--kubelet-root").arg(self.machine.root());
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
        self.machine.node.volume(pod, "config").is_some_and(|volume| volume["mount"] == "mounted")
    }
}

#[test]
fn marked_pods_have_their_payload_volumes_mounted_and_no_others_before_a_container_asks() {
    let cluster = Cluster::new();
    cluster.put_pod("default", "by-label", &json!({"labels": {"podfs.io/volumes": "true"}}));
    cluster.put_pod("default", "by-annotation", &json!({"annotations": {"podfs.io/volumes": "true"}}));
    cluster.put_pod("default", "plain", &json!({}));
    let daemon = cluster.machine.node.start_command(cluster.command());
    for pod in ["by-label", "by-annotation"] {
        eventually("its volume is mounted", || cluster.is_mounted(pod));
        assert!(cluster.machine.node.volume(pod, "scratch").is_none(), "the kubelet mounts emptyDirs");
        assert!(
            !cluster
                .machine
                .node
                .fixture
                .path(&format!("root/pods/uid-{pod}/volumes/kubernetes.io~empty-dir"))
                .exists()
        );
    }
    assert!(cluster.machine.node.pod("plain").is_none());
    daemon.wait_log("podfs chooses pods only by their own label or annotation podfs.io/volumes");
    // podfs may unmount: no runtime has reported containers of the pod, and the kubelet has no directory of the pod.
    cluster.server.delete("Pod", "default", "by-label");
    eventually("nothing of the pod is left", || cluster.machine.node.is_clean("uid-by-label"));
}

#[test]
fn pods_of_a_marked_namespace_are_chosen_where_podfs_may_list_namespaces() {
    let cluster = Cluster::new();
    cluster.server.permit(&User::node(NODE), &["list", "watch", "get"], "namespaces");
    cluster.put_pod("shop", "cart", &json!({}));
    cluster.put_pod("shop", "never", &json!({"labels": {"podfs.io/volumes": "false"}}));
    cluster.put_pod("default", "plain", &json!({}));
    let _daemon = cluster.machine.node.start_command(cluster.command());
    let marked = r#"{apiVersion: v1, kind: Namespace, metadata: {name: shop, labels: {podfs.io/volumes: "true"}}}"#;
    cluster.server.put(marked);
    eventually("its volume is mounted", || cluster.is_mounted("cart"));
    assert!(cluster.machine.node.pod("plain").is_none() && cluster.machine.node.pod("never").is_none());
}

#[test]
fn a_container_with_the_kubelets_volume_although_its_pod_is_marked_is_an_event_of_the_pod() {
    let cluster = Cluster::new();
    let Cluster { server, machine } = &cluster;
    // The pod's namespace has no ConfigMap yet, so podfs cannot mount the volume.
    cluster.put_pod("late", "web", &json!({"labels": {"podfs.io/volumes": "true"}}));
    let runtime = machine.listen();
    let _daemon = machine.node.start_command(cluster.command());
    let mut pod = machine.sandbox("web", Some("true"));
    pod.namespace = "late".to_owned();
    let mut plugin = runtime.begin(vec![pod.clone()], Vec::new());
    eventually("podfs knows the pod", || machine.node.pod("web").is_some());
    let mounts = || vec![machine.mount("web", "volumes/kubernetes.io~configmap/config", "/config")];
    let (first, second) = (container(&pod, "first", mounts()), container(&pod, "second", mounts()));
    assert_eq!(plugin.create(&pod, &first), []);
    let reason = "podfs did not have it mounted in time; podfs node state says why";
    let message = format!("Container \"first\" has the kubelet's volume at \"/config\" : {reason}");
    let is_expected = |event: &Value| {
        let uid = &event["involvedObject"]["uid"];
        event["reason"] == "KubeletVolume" && event["message"] == message && uid == "uid-web"
    };
    eventually("it is an event", || server.objects("Event").iter().any(is_expected));
    server.put_value(json!({"apiVersion": "v1", "kind": "ConfigMap", "data": {"key": "one"},
        "metadata": {"name": "app", "namespace": "late"}}));
    eventually("its volume is mounted", || cluster.is_mounted("web"));
    assert_eq!(plugin.create(&pod, &second).len(), 1);
    let containers = || machine.node.pod("web").expect("the pod")["containers"].clone();
    let replaced = json!({"id": second.id, "name": "second", "replaced": ["/config"], "kept": []});
    let kept =
        json!({"id": first.id, "name": "first", "replaced": [], "kept": [{"path": "/config", "reason": reason}]});
    eventually("the state names both", || containers() == json!([kept, replaced]));
    let text = machine.node.expect(&["state"]);
    assert!(text.contains("late/web  second     /config   -"), "{text}");
    plugin.event(Event::RemoveContainer, &pod, Some(&first));
    eventually("the state names one", || containers() == json!([replaced]));
}
