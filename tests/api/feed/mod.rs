//! The feed of a node: pods and objects of an API server, for many pods over one connection.

mod certificates;
mod daemon;
mod objects;
mod outages;
mod pods;
mod storms;
mod terminating;
mod tokens;

use std::path::Path;
use std::time::Duration;

use podfs::node::NodePod;
use podfs::node::feed::{Feed, FeedEvent, FeedSettings, ObjectFollower, PodObjects, PodSource};
use podfs::source::{Push, SettingsSource};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::time::timeout;

use crate::api_server::{ApiServer, Style};
use crate::common::{TIMEOUT, config_map};
use crate::rig::NODE;

/// A server, and the feed of a node.
struct Node {
    server: ApiServer,
    feed: Feed,
    objects: PodObjects,
    manifests: TempDir,
}

impl Node {
    /// The feed of a server with these objects.
    async fn of(objects: &[String]) -> Node {
        let server = ApiServer::start();
        put_all(&server, objects);
        Node::at(server, None, &[]).await
    }

    /// The feed of a server, with the credentials of `node`, and of a directory with these manifests if there are some.
    async fn at(server: ApiServer, node: Option<&str>, manifests: &[(&str, &str)]) -> Node {
        let directory = tempfile::tempdir().expect("a directory");
        manifests.iter().for_each(|(name, text)| write(directory.path(), name, text));
        let kubeconfig = server.kubeconfig(node.unwrap_or(NODE), Style::Embedded);
        let feed = Feed::open(FeedSettings {
            manifests: (!manifests.is_empty()).then(|| directory.path().to_owned()),
            api: Some(SettingsSource::Kubeconfig(kubeconfig)),
            node: Some(NODE.to_owned()),
            ..FeedSettings::default()
        });
        let feed = feed.await.expect("a feed");
        Node { server, objects: feed.objects(), feed, manifests: directory }
    }

    async fn event(&mut self) -> FeedEvent {
        timeout(TIMEOUT, self.feed.next()).await.expect("an event")
    }

    /// The next event, as a short text.
    async fn next(&mut self) -> String {
        let name = |pod: &NodePod| format!("{} {} {:?}", pod.pod.identity, pod.pod.identity.uid, pod.stage);
        match self.event().await {
            FeedEvent::Pods(source, pods) => {
                format!("{source:?}: {}", pods.iter().map(name).collect::<Vec<_>>().join(", "))
            }
            FeedEvent::Put(pod) => format!("put {}", name(&pod)),
            FeedEvent::Gone(source, uid) => format!("gone {uid} {source:?}"),
            FeedEvent::Containers(..) => unreachable!("no runtime is here"),
            FeedEvent::Failure(source, sentences) => format!("trouble {source:?}: {}", sentences.join("; ")),
        }
    }

    /// All pods of a source, when the source reports them.
    async fn pods_of(&mut self, wanted: PodSource) -> Vec<NodePod> {
        loop {
            if let FeedEvent::Pods(source, pods) = self.event().await
                && source == wanted
            {
                return pods;
            }
        }
    }

    /// Followers of all pods of the server.
    async fn followers(&mut self) -> Vec<ObjectFollower> {
        self.pods_of(PodSource::Api).await.iter().map(|pod| self.objects.follow(pod)).collect()
    }

    fn put_config(&self, value: &str) {
        self.server.put(&config_map("app", &[("key", value)]));
    }
}

fn put_all(server: &ApiServer, objects: &[String]) {
    for object in objects {
        server.put(object);
    }
}

fn write(directory: &Path, name: &str, text: &str) {
    std::fs::write(directory.join(".new"), text).expect("a file");
    std::fs::rename(directory.join(".new"), directory.join(name)).expect("renamed");
}

async fn push(follower: &mut ObjectFollower) -> Push {
    timeout(TIMEOUT, follower.next()).await.expect("a push")
}

/// Reads pushes until one that `is_wanted`, and returns it.
async fn until(follower: &mut ObjectFollower, what: &str, is_wanted: impl Fn(&Push) -> bool) -> Push {
    let wait = async {
        loop {
            let push = follower.next().await;
            if is_wanted(&push) {
                return push;
            }
        }
    };
    timeout(TIMEOUT, wait).await.unwrap_or_else(|_| panic!("never pushed: {what}"))
}

/// Whether there is no push within this time.
async fn is_quiet(follower: &mut ObjectFollower, time: Duration) -> bool {
    timeout(time, follower.next()).await.is_err()
}

/// The kind, the name and the value of `key` of each object of a push.
fn shown(push: &Push) -> Vec<String> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let show = |object: &Value| {
        let (kind, name) = (text(&object["kind"]), text(&object["metadata"]["name"]));
        format!("{kind} {name} {}", text(&object["data"]["key"])).trim().to_owned()
    };
    push.objects.iter().map(show).collect()
}

/// A pod of the node with these volumes.
fn pod(name: &str, uid: &str, volumes: &str) -> String {
    format!(
        "{{apiVersion: v1, kind: Pod, metadata: {{name: {name}, namespace: default, uid: {uid}}}, spec: {{nodeName: {NODE}, \
         containers: [{{name: c, image: i}}], volumes: {volumes}}}}}"
    )
}

/// So many pods that show the ConfigMap `app`.
fn pods_of_app(count: usize) -> impl Iterator<Item = String> {
    (0..count).map(|number| pod(&format!("web-{number}"), &format!("u{number}"), APP))
}

fn app(value: &str) -> String {
    config_map("app", &[("key", value)])
}

/// A volume of the ConfigMap `app`.
const APP: &str = "[{name: a, configMap: {name: app}}]";

/// Changes the pod in the server.
fn change_pod(server: &ApiServer, name: &str, change: impl FnOnce(&mut Value)) {
    let mut pod = server.object("Pod", "default", name).expect("a pod");
    change(&mut pod);
    server.put_value(pod);
}

fn label(pod: &mut Value, value: &str) {
    pod["metadata"]["labels"] = json!({"color": value});
}
