//! The objects of `packaging/kubernetes`, created in an API server: their roles allow exactly the requests that the daemon of
//! the DaemonSet makes. `tests/cli/node/csi/deployment.rs` shows that the chart renders the same objects.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use serde_json::{Value, json};

use crate::api_server::{ApiServer, InitialEvents, Style, User};
use crate::common::chart::{rendered, yaml};
use crate::common::kubelet::Volume;
use crate::common::packages::top;
use crate::csi::with_token;
use crate::kubelet::Kubelet;
use crate::rig::NODE;

/// The permissions of a user: verbs on resources.
type Permissions = BTreeSet<(String, String)>;

/// A cluster with the objects of the manifests, which were created in their order.
fn cluster() -> ApiServer {
    cluster_with(yaml(&fs::read_to_string(top().join("packaging/kubernetes/podfs.yaml")).expect("manifests")))
}

fn cluster_with(objects: Vec<Value>) -> ApiServer {
    let server = ApiServer::start();
    for object in objects {
        let namespace = &object["metadata"]["namespace"];
        let is_there = |name: &str| server.object("Namespace", "", name).is_some();
        assert!(namespace.as_str().is_none_or(is_there), "the namespace comes before {object}");
        server.put_value(object);
    }
    server
}

fn only(objects: Vec<Value>) -> Value {
    let [only] = <[Value; 1]>::try_from(objects).expect("one object");
    only
}

/// The permissions of a ClusterRole.
fn allowed_by(server: &ApiServer, role: &str) -> Permissions {
    let role = server.object("ClusterRole", "", role).unwrap_or_else(|| panic!("there is no ClusterRole {role}"));
    let words = |list: &Value| -> Vec<String> {
        list.as_array().expect("a list").iter().map(|word| word.as_str().expect("a word").to_owned()).collect()
    };
    let rules = role["rules"].as_array().expect("rules").iter();
    rules
        .flat_map(|rule| {
            assert_eq!(rule["apiGroups"], json!([""]), "podfs reads objects of the core");
            let verbs = words(&rule["verbs"]);
            words(&rule["resources"])
                .into_iter()
                .flat_map(move |resource| verbs.clone().into_iter().map(move |verb| (verb, resource.clone())))
        })
        .collect()
}

/// The service account of the DaemonSet's pods.
fn account(server: &ApiServer) -> User {
    let set = only(server.objects("DaemonSet"));
    let template = &set["spec"]["template"];
    assert_eq!(set["spec"]["selector"]["matchLabels"], template["metadata"]["labels"], "a server refuses others");
    let namespace = set["metadata"]["namespace"].as_str().expect("a namespace");
    let name = template["spec"]["serviceAccountName"].as_str().expect("an account");
    assert!(server.object("ServiceAccount", namespace, name).is_some(), "{namespace}/{name}");
    User::new(&format!("system:serviceaccount:{namespace}:{name}"), "system:serviceaccounts")
}

/// Gives the account the permissions of the cluster's binding. Returns them.
fn bind(server: &ApiServer, account: &User) -> Permissions {
    let binding = only(server.objects("ClusterRoleBinding"));
    let subject = &binding["subjects"][0];
    let bound = format!(
        "system:serviceaccount:{}:{}",
        subject["namespace"].as_str().expect("a namespace"),
        subject["name"].as_str().expect("a name")
    );
    assert_eq!(bound, account.name, "the binding is for the account of the DaemonSet");
    let allowed = allowed_by(server, binding["roleRef"]["name"].as_str().expect("a role"));
    permit(server, account, &allowed);
    allowed
}

fn permit(server: &ApiServer, account: &User, allowed: &Permissions) {
    allowed.iter().for_each(|(verb, resource)| server.permit(account, &[verb], resource));
}

/// A pod, and the objects of its volumes.
fn put_pod(server: &ApiServer) {
    for (kind, data) in [("ConfigMap", json!({"key": "one"})), ("Secret", json!({"key": "b25l"}))] {
        server.put_value(json!({"apiVersion": "v1", "kind": kind, "metadata": {"name": "app"}, "data": data}));
    }
    server.put_value(json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web", "uid": "uid-web", "labels": {"app": "web"}},
        "spec": {"nodeName": NODE, "containers": [{"name": "c", "image": "none"}]},
    }));
}

/// The command with which the DaemonSet starts podfs, with the account's token.
fn daemon_command(kubelet: &Kubelet, server: &ApiServer, account: &User) -> Command {
    let mut command = kubelet.node.bare_command();
    command.arg("--kubeconfig").arg(server.kubeconfig_of(account, Style::Token)).args(["--node-name", NODE]);
    command.arg("--csi").arg(kubelet.socket()).arg("--kubelet-root").arg(kubelet.root());
    command
}

/// The volumes of the pod.
fn volumes(kubelet: &Kubelet) -> [Volume; 3] {
    [
        kubelet.volume("web", "config", &[("kind", "configMap"), ("name", "app")]),
        kubelet.volume("web", "login", &[("kind", "secret"), ("name", "app")]),
        kubelet.volume("web", "info", &[("kind", "downwardAPI"), ("items", "labels=metadata.labels")]),
    ]
}

/// Publishes the volumes as a kubelet, checks their content, and ends the pod.
fn publish_and_end(kubelet: &Kubelet, volumes: [Volume; 3]) {
    volumes.iter().for_each(|volume| kubelet.published(volume));
    for (volume, file) in volumes.iter().zip(["key", "key", "labels"]) {
        let text = fs::read_to_string(volume.target.join(file)).expect("a file");
        assert!(["one", "app=\"web\""].contains(&text.as_str()), "{text}");
    }
    kubelet.end_pod("web", &volumes);
}

#[test]
fn the_roles_of_the_manifests_allow_exactly_the_requests_of_the_daemon() {
    let server = cluster();
    let account = account(&server);
    let mut allowed = bind(&server, &account);
    assert!(allowed.iter().all(|(_, resource)| resource != "secrets"), "no Secret, unless a namespace allows it");
    // A namespace gives podfs its Secrets by a RoleBinding to this role.
    let of_secrets = allowed_by(&server, "podfs-secrets");
    server.put_value(json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
        "metadata": {"name": "podfs-secrets", "namespace": "default"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "podfs-secrets"},
        "subjects": [{"kind": "ServiceAccount", "name": "podfs", "namespace": "podfs"}],
    }));
    permit(&server, &account, &of_secrets);
    allowed.extend(of_secrets);
    put_pod(&server);
    let mut used = Permissions::new();
    // A server that sends the existing objects at the start of a watch gets no list requests. Other servers get them.
    for initial in [InitialEvents::Sent, InitialEvents::Refused] {
        server.initial_events(initial);
        server.forget_requests();
        let kubelet = Kubelet::new();
        let daemon = kubelet.node.start_command(daemon_command(&kubelet, &server, &account));
        publish_and_end(&kubelet, volumes(&kubelet));
        drop(daemon);
        used.extend(server.requests().into_iter().filter(|request| request.resource.is_some()).map(|request| {
            assert_eq!(request.user, account.name);
            (request.verb, request.plural)
        }));
    }
    assert_eq!(used, allowed, "the permissions that the requests need, and those that the roles give");
}

#[test]
fn where_pods_read_their_objects_the_role_of_the_chart_allows_only_pods_and_podfs_asks_for_nothing_else() {
    let values = json!({"csiDriver": {"readAs": "pod"}});
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "podfs"}});
    let server = cluster_with([namespace].into_iter().chain(rendered(&values)).collect());
    let podfs = account(&server);
    let allowed = bind(&server, &podfs);
    let web = User::new("system:serviceaccount:default:web", "system:serviceaccounts");
    let of_pod: Permissions = ["list", "watch"]
        .into_iter()
        .flat_map(|verb| ["configmaps", "secrets"].map(|resource| (verb.to_owned(), resource.to_owned())))
        .collect();
    permit(&server, &web, &of_pod);
    put_pod(&server);
    let set = only(server.objects("DaemonSet"));
    let arguments = set["spec"]["template"]["spec"]["containers"][0]["args"].as_array().expect("arguments");
    let read_as = arguments.iter().filter_map(Value::as_str).find(|argument| argument.starts_with("--csi-read-as"));
    let (mut used, mut used_by_pod) = (Permissions::new(), Permissions::new());
    for initial in [InitialEvents::Sent, InitialEvents::Refused] {
        server.initial_events(initial);
        server.forget_requests();
        let kubelet = Kubelet::new();
        let mut command = daemon_command(&kubelet, &server, &podfs);
        command.arg(read_as.expect("the DaemonSet has --csi-read-as"));
        let daemon = kubelet.node.start_command(command);
        let token = server.new_token(&web);
        publish_and_end(&kubelet, volumes(&kubelet).map(|volume| with_token(&volume, &token)));
        drop(daemon);
        for request in server.requests().into_iter().filter(|request| request.resource.is_some()) {
            let permissions = if request.user == podfs.name { &mut used } else { &mut used_by_pod };
            permissions.insert((request.verb, request.plural));
        }
    }
    assert_eq!(used, allowed, "the permissions that podfs's requests need, and those that the role gives");
    assert_eq!(used_by_pod, of_pod, "the permissions that the requests with the pod's token need");
}
