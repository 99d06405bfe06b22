//! `podfs node --csi` with an API server: objects that podfs reads with its own credentials, and objects that it reads with the
//! tokens of the pods.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;
use std::thread;

use nix::sys::signal::Signal;
use serde_json::json;
use tonic::Code;

use crate::api_server::{ApiServer, Order, Style, User};
use crate::common::identity::identity;
use crate::common::{eventually, wait_content};
use crate::kubelet::{Kubelet, Volume};
use crate::rig::NODE;

const TOKENS: &str = "csi.storage.k8s.io/serviceAccount.tokens";

/// A server, and a node of it with a kubelet.
struct Cluster {
    server: ApiServer,
    kubelet: Kubelet,
    podfs: User,
}

impl Cluster {
    fn new() -> Cluster {
        let podfs = User::new("system:serviceaccount:podfs:podfs", "system:serviceaccounts");
        let cluster = Cluster { server: ApiServer::start(), kubelet: Kubelet::new(), podfs };
        cluster.server.permit(&cluster.podfs, &["list", "watch"], "pods");
        cluster.put("app", "first");
        cluster
    }

    fn put(&self, name: &str, value: &str) {
        self.server.put_value(json!({"apiVersion": "v1", "kind": "ConfigMap", "data": {"key": value},
            "metadata": {"name": name, "namespace": "default"}}));
    }

    fn command(&self) -> Command {
        let mut command = self.kubelet.node.bare_command();
        command.arg("--kubeconfig").arg(self.server.kubeconfig_of(&self.podfs, Style::Token));
        command.arg("--csi").arg(self.kubelet.socket()).arg("--kubelet-root").arg(self.kubelet.root());
        command.arg("--node-name").arg(NODE);
        command
    }

    fn command_as_pods(&self) -> Command {
        let mut command = self.command();
        command.arg("--csi-read-as=pod");
        command
    }

    fn volume(&self, pod: &str) -> Volume {
        let mut volume = self.kubelet.volume(pod, "config", &[("kind", "configMap"), ("name", "app")]);
        volume.request.volume_context.remove(TOKENS);
        volume
    }
}

/// The service account of a pod.
fn account(name: &str) -> User {
    User::new(&format!("system:serviceaccount:default:{name}"), "system:serviceaccounts")
}

/// Tokens as a kubelet sends them.
fn tokens(token: &str) -> String {
    json!({"": {"token": token, "expirationTimestamp": "2099-01-01T00:00:00Z"}}).to_string()
}

pub(crate) fn with_token(volume: &Volume, token: &str) -> Volume {
    let mut volume = volume.clone();
    volume.request.volume_context.insert(TOKENS.to_owned(), tokens(token));
    volume
}

#[test]
fn an_inline_volume_shows_an_object_of_the_api_server_and_its_changes() {
    let cluster = Cluster::new();
    cluster.server.permit(&cluster.podfs, &["list", "watch"], "configmaps");
    let _daemon = cluster.kubelet.node.start_command(cluster.command());
    let volume = cluster.volume("web");
    cluster.kubelet.published(&volume);
    assert_eq!(fs::read_to_string(volume.target.join("key")).expect("a file"), "first");
    cluster.put("app", "second");
    wait_content(&volume.target.join("key"), "second");
    cluster.kubelet.end_pod("web", &[volume]);
}

/// The pod `web` with a label.
fn web(tier: &str) -> serde_json::Value {
    json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "web", "namespace": "default", "uid": "uid-web", "labels": {"tier": tier}},
        "spec": {"nodeName": NODE, "containers": [{"name": "c", "image": "none"}]}})
}

#[test]
fn volumes_with_fields_of_the_pod_survive_restarts_while_the_api_server_does_not_answer() {
    let cluster = Cluster::new();
    let Cluster { server, kubelet, .. } = &cluster;
    server.permit(&cluster.podfs, &["list", "watch"], "configmaps");
    server.put_value(web("front"));
    let mut daemon = kubelet.node.start_command(cluster.command());
    let fields =
        |name: &str| kubelet.volume("web", name, &[("kind", "downwardAPI"), ("items", "labels=metadata.labels")]);
    let sources =
        "- configMap: {name: app}\n- downwardAPI: {items: [{path: labels, fieldRef: {fieldPath: metadata.labels}}]}\n";
    let all = kubelet.volume("web", "all", &[("kind", "projected"), ("sources", sources)]);
    let mut volumes = vec![fields("labels"), all];
    volumes.iter().for_each(|volume| kubelet.published(volume));
    let before: Vec<_> = volumes.iter().map(|volume| identity(&volume.target)).collect();
    for (number, order) in [Order::Hold, Order::Refuse, Order::Freeze].into_iter().enumerate() {
        server.connections(order);
        daemon.signal(if number == 0 { Signal::SIGKILL } else { Signal::SIGTERM });
        daemon.wait();
        daemon = kubelet.node.start_command(cluster.command());
        // The daemon has worked on the pod when the next volume is there.
        let more = fields(&format!("more-{number}"));
        kubelet.published(&more);
        for (volume, before) in volumes.iter().zip(&before) {
            assert_eq!(&identity(&volume.target), before, "{order:?}: it stays mounted");
            let labels = fs::read_to_string(volume.target.join("labels")).expect("the volume is served");
            assert_eq!(labels, "tier=\"front\"", "{order:?}");
        }
        assert_eq!(fs::read_to_string(more.target.join("labels")).expect("a file"), "tier=\"front\"");
        volumes.push(more);
        server.connections(Order::Serve);
    }
    server.put_value(web("back"));
    for volume in &volumes {
        wait_content(&volume.target.join("labels"), "tier=\"back\"");
    }
    cluster.put("app", "second");
    wait_content(&volumes[1].target.join("key"), "second");
    kubelet.end_pod("web", &volumes);
}

#[test]
fn a_pod_reads_its_objects_with_its_own_token_which_podfs_renews_and_never_shows() {
    let cluster = Cluster::new();
    let Cluster { server, kubelet, .. } = &cluster;
    let (web, other) = (account("web"), account("other"));
    server.permit(&web, &["list", "watch"], "configmaps");
    let mut daemon = kubelet.node.start_command(cluster.command_as_pods());
    let volume = cluster.volume("web");
    let status = kubelet.publish(&volume).expect_err("there is no token");
    assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
    assert!(status.message().contains("tokenRequests"), "{status:?}");
    let mut bad = volume.clone();
    bad.request.secrets.insert(TOKENS.to_owned(), "n0-token".to_owned());
    let status = kubelet.publish(&bad).expect_err("that is no token");
    assert!(status.message().contains("what a kubelet sends") && !status.message().contains("n0-token"), "{status:?}");

    let first = server.new_token(&web);
    kubelet.published(&with_token(&volume, &first));
    let file = volume.target.join("key");
    assert_eq!(fs::read_to_string(&file).expect("a file"), "first");
    let requests = server.requests().into_iter().filter(|request| request.plural == "configmaps");
    let users: BTreeSet<_> = requests.map(|request| request.user).collect();
    assert_eq!(users, BTreeSet::from([web.name.clone()]), "all requests have the credentials of the pod");

    // Another pod of the node names the same object, and its service account may not read it.
    let refused = with_token(&cluster.volume("other"), &server.new_token(&other));
    thread::scope(|scope| {
        let publishing = scope.spawn(|| kubelet.publish(&refused));
        eventually("the state says why", || {
            let volume = kubelet.node.volume("other", "config");
            volume
                .is_some_and(|volume| volume["reason"].as_str().is_some_and(|reason| reason.contains("other\" cannot")))
        });
        server.permit(&other, &["list", "watch"], "configmaps");
        publishing.join().expect("it ends").expect("published");
    });

    // The next daemon has no token until the kubelet calls again; the volume shows the same files as before.
    daemon.signal(Signal::SIGKILL);
    daemon.wait();
    let _daemon = kubelet.node.start_command(cluster.command_as_pods());
    let second = server.new_token(&web);
    eventually("the state says what it waits for", || {
        let volume = kubelet.node.volume("web", "config");
        volume.is_some_and(|volume| volume.to_string().contains("next NodePublishVolume"))
    });
    kubelet.published(&volume);
    assert_eq!(fs::read_to_string(&file).expect("a file"), "first");
    // From Kubernetes 1.35 on, tokens come among the secrets where the CSIDriver object says so.
    let mut renewed = volume.clone();
    renewed.request.secrets.insert(TOKENS.to_owned(), tokens(&second));
    kubelet.published(&renewed);
    cluster.put("app", "second");
    wait_content(&file, "second");

    // A token that has expired is replaced by that of the next call.
    let third = server.new_token(&web);
    server.crash();
    server.boot();
    server.become_ready();
    kubelet.published(&with_token(&volume, &third));
    cluster.put("app", "third");
    wait_content(&file, "third");
    let log = kubelet.node.log();
    assert!([first, second, third].iter().all(|token| !log.contains(token)), "no token is logged");
    kubelet.end_pod("web", &[volume]);
    kubelet.end_pod("other", &[refused]);
}
