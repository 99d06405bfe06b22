//! The DaemonSet on a node with a kubelet: the roles of `packaging/kubernetes` and of the chart, for CSI volumes and transparent
//! volumes. `tests/cli/node/csi/deployment.rs` shows that the chart renders the objects of `packaging/kubernetes`.

use std::fs;
use std::process::Command;

use podfs::node::nri::messages::nri::PodSandbox;
use serde_json::{Value, json};

use super::volumes::{put_payloads, put_pod};
use super::{Account, Permissions, create, objects_of, used_by};
use crate::api_server::{ApiServer, InitialEvents, Style, User};
use crate::common::chart::rendered;
use crate::common::kubelet::Volume;
use crate::common::{Running, eventually};
use crate::csi::with_token;
use crate::kubelet::Kubelet;
use crate::rig::NODE;
use crate::runtime::{Plugin, Runtime, container, mount};
use crate::signer::Signer;

/// The sources of a projected volume of CSI.
const SOURCES: &str = "[{serviceAccountToken: {path: token}}, {clusterTrustBundle: {path: ca, name: roots}}, \
    {podCertificate: {signerName: example.com/server, keyType: ED25519, credentialBundlePath: both.pem}}]";
/// The volumes of a pod without CSI, as most pods of a cluster have them.
const TRANSPARENT: &str = "[{name: late, configMap: {name: late}}, {name: keys, secret: {secretName: tls}}, \
    {name: access, projected: {sources: [{serviceAccountToken: {path: token}}, {configMap: {name: app}}, \
        {downwardAPI: {items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]}}]}}]";

/// A cluster in which the objects of a deployment were created, and a node of it with a kubelet and a runtime.
struct Cluster {
    server: ApiServer,
    kubelet: Kubelet,
    podfs: Account,
    /// The account of the pods, and its token.
    web: User,
    token: String,
    arguments: Vec<String>,
    signer: Signer,
}

impl Cluster {
    fn new(objects: Vec<Value>) -> Cluster {
        let server = ApiServer::start();
        create(&server, objects);
        let sets = server.objects("DaemonSet");
        let [set] = &sets[..] else { panic!("one DaemonSet") };
        let template = &set["spec"]["template"];
        assert_eq!(set["spec"]["selector"]["matchLabels"], template["metadata"]["labels"], "a server refuses others");
        let namespace = set["metadata"]["namespace"].as_str().expect("a namespace");
        let podfs = Account::bind(&server, namespace, template["spec"]["serviceAccountName"].as_str().expect("a name"));
        let arguments = template["spec"]["containers"][0]["args"].as_array().expect("arguments").iter();
        let arguments = arguments.map(|argument| argument.as_str().expect("text").to_owned()).collect();
        let web = User::new("system:serviceaccount:default:default", "system:serviceaccounts");
        for resource in ["configmaps", "secrets"] {
            server.permit(&web, &["list", "watch"], resource);
        }
        put_payloads(&server);
        let (kubelet, signer, token) = (Kubelet::new(), Signer::new(), server.new_token(&web));
        Cluster { server, kubelet, podfs, web, token, arguments, signer }
    }

    fn has(&self, option: &str) -> bool {
        self.arguments.iter().any(|argument| argument.starts_with(option))
    }

    fn runtime_socket(&self) -> std::path::PathBuf {
        self.kubelet.node.fixture.path("nri.sock")
    }

    /// Starts the daemon with the options of the DaemonSet, on this node.
    fn start(&self) -> Running {
        assert!(self.has("--in-cluster"), "{:?}", self.arguments);
        let mut command: Command = self.kubelet.node.bare_command();
        command.arg("--kubeconfig").arg(self.server.kubeconfig_of(&self.podfs.user, Style::Token));
        command.args(["--node-name", NODE]).arg("--kubelet-root").arg(self.kubelet.root());
        command.arg("--csi").arg(self.kubelet.socket());
        command.args(self.arguments.iter().filter(|argument| argument.starts_with("--csi-read-as")));
        if self.has("--nri") {
            command.arg("--nri").arg(self.runtime_socket());
        }
        self.kubelet.node.start_command(command)
    }

    /// Publishes a volume of each kind as a kubelet, with the token of the pod, and checks their content.
    fn publish(&self) -> Vec<Volume> {
        let volume = |name: &str, attributes: &[(&str, &str)]| {
            with_token(&self.kubelet.volume("plain", name, attributes), &self.token)
        };
        let volumes = vec![
            volume("config", &[("kind", "configMap"), ("name", "app")]),
            volume("keys", &[("kind", "secret"), ("name", "tls")]),
            volume("info", &[("kind", "downwardAPI"), ("items", "labels=metadata.labels,cpu=c/limits.cpu")]),
            volume("all", &[("kind", "projected"), ("sources", SOURCES)]),
        ];
        let (all, others) = volumes.split_last().expect("volumes");
        others.iter().for_each(|volume| self.kubelet.published(volume));
        std::thread::scope(|scope| {
            scope.spawn(|| self.signer.issue(&self.server, self.signer.next(&self.server), 3600, 7200));
            self.kubelet.published(all);
        });
        for (number, file, content) in [(0, "key", "1"), (1, "key", "pem"), (2, "cpu", "2")] {
            let path = volumes[number].target.join(file);
            assert_eq!(fs::read_to_string(&path).expect("a file"), content, "{}", path.display());
        }
        assert!(fs::read_to_string(volumes[3].target.join("token")).expect("a token").contains('.'));
        volumes
    }

    /// Runs the daemon twice: a server that sends the existing objects at the start of a watch gets no list requests, others get
    /// them. Returns the permissions that podfs and the pods used.
    fn run(&self) -> (Permissions, Permissions) {
        put_plain_pod(&self.server);
        let runtime = self.has("--nri").then(|| Runtime::at(&self.runtime_socket()));
        if runtime.is_some() {
            put_pod(&self.server, TRANSPARENT, &json!({"podfs.io/volumes": "true"}));
        }
        for (initial, of_event) in [(InitialEvents::Sent, "create"), (InitialEvents::Refused, "patch")] {
            self.server.initial_events(initial);
            let daemon = self.start();
            let volumes = self.publish();
            self.kubelet.end_pod("plain", &volumes);
            if let Some(runtime) = &runtime {
                self.create_containers(runtime, of_event);
            }
            drop(daemon);
        }
        assert!(!self.kubelet.node.log().contains("orbidden"), "{}", self.kubelet.node.log());
        self.server.assert_conventions();
        (self.podfs.used(&self.server), used_by(&self.server, &self.web))
    }

    /// Creates containers of the transparent pod: one has the kubelet's volume, which is an event; the other has podfs's volumes.
    fn create_containers(&self, runtime: &Runtime, of_event: &str) {
        let node = &self.kubelet.node;
        let pod = PodSandbox {
            id: "sandbox-web".to_owned(),
            name: "web".to_owned(),
            uid: "uid-web".to_owned(),
            namespace: "default".to_owned(),
            ..PodSandbox::default()
        };
        let mut plugin: Plugin = runtime.begin(vec![pod.clone()], Vec::new());
        eventually("podfs knows the pod", || node.pod("web").is_some());
        let of = |volume: &str, path: &str| {
            mount(&self.kubelet.root().join(format!("pods/uid-web/volumes/kubernetes.io~{volume}")), path)
        };
        let first = container(&pod, "first", vec![of("configmap/late", "/late")]);
        assert_eq!(plugin.create(&pod, &first), [], "the ConfigMap is missing");
        eventually("it is an event", || self.server.count(of_event, "events") > 0);
        let second = container(&pod, "second", vec![of("secret/keys", "/keys"), of("projected/access", "/access")]);
        eventually("both volumes are podfs's", || plugin.create(&pod, &second).len() == 2);
    }
}

/// The pod of the CSI volumes, as the API server has it.
fn put_plain_pod(server: &ApiServer) {
    server.put_value(json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "plain", "namespace": "default", "uid": "uid-plain", "labels": {"app": "plain"}},
        "spec": {"nodeName": NODE, "serviceAccountName": "default", "containers": [{"name": "c", "image": "none"}]},
    }));
}

/// The objects that the chart renders with these values, and the namespace that they need.
fn chart(values: &Value) -> Vec<Value> {
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "podfs"}});
    [namespace].into_iter().chain(rendered(values)).collect()
}

/// A RoleBinding in the namespace of the pods, as an administrator makes it for the plain manifests.
fn binding(role: &str) -> Value {
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
        "metadata": {"name": role, "namespace": "default"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [{"kind": "ServiceAccount", "name": "podfs", "namespace": "podfs"}],
    })
}

#[test]
fn the_roles_of_the_manifests_allow_exactly_the_requests_of_the_daemon() {
    let mut objects = objects_of("kubernetes/podfs.yaml");
    objects.extend(["podfs-secrets", "podfs-tokens"].map(binding));
    let cluster = Cluster::new(objects);
    let (used, used_by_pods) = cluster.run();
    cluster.podfs.assert_exact(&used);
    assert_eq!(used_by_pods, Permissions::new(), "podfs reads with its own credentials");
}

#[test]
fn the_roles_of_the_chart_allow_exactly_the_requests_for_csi_and_transparent_volumes() {
    let namespaces = json!({"secrets": ["default"], "tokens": ["default"]});
    let cluster = Cluster::new(chart(&json!({"nri": {"enabled": true}, "namespaces": namespaces})));
    let (used, used_by_pods) = cluster.run();
    cluster.podfs.assert_exact(&used);
    assert_eq!(used_by_pods, Permissions::new(), "podfs reads with its own credentials");
}

#[test]
fn where_pods_read_the_objects_of_csi_volumes_podfs_may_read_neither_config_maps_nor_secrets() {
    let values = json!({"csiDriver": {"readAs": "pod"}, "namespaces": {"tokens": ["default"]}});
    let cluster = Cluster::new(chart(&values));
    let (used, used_by_pods) = cluster.run();
    cluster.podfs.assert_exact(&used);
    assert!(used.iter().all(|permission| !permission.ends_with("configmaps") && !permission.ends_with("secrets")));
    let of_pods = ["configmaps", "secrets"].map(|resource| ["list", "watch"].map(|verb| format!("{verb} {resource}")));
    assert_eq!(used_by_pods, of_pods.into_iter().flatten().collect(), "the requests with the pod's token");
}

#[test]
fn transparent_volumes_are_read_with_podfs_credentials_also_where_pods_read_their_csi_volumes() {
    let namespaces = json!({"secrets": ["default"], "tokens": ["default"]});
    let values = json!({"nri": {"enabled": true}, "csiDriver": {"readAs": "pod"}, "namespaces": namespaces});
    let cluster = Cluster::new(chart(&values));
    let (used, _) = cluster.run();
    cluster.podfs.assert_exact(&used);
}
