//! The pods that the API server has put on the node: one watch for all of them.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;
use tokio::sync::mpsc::UnboundedSender;
use tokio::time::Instant;

use super::FeedInput;
use super::object::strip;
use crate::kube::address::Collection;
use crate::kube::client::ApiClient;
use crate::kube::error::{ApiError, ErrorClass};
use crate::kube::follower::{Follower, FollowerEvent};
use crate::manifest::pod::{Pod, PodUid};
use crate::manifest::{Document, ManifestError};
use crate::node::pod::{NodePod, PodOrigin, PodStage};
use crate::source::{Contacts, SETTLE_DELAY, origin};

/// A change of the pods that the API server has put on the node.
pub(super) enum PodChange {
    /// These are now all pods.
    All(Vec<NodePod>),
    /// A pod is new, or different.
    Put(NodePod),
    /// A pod was deleted.
    Gone(PodUid),
}

/// Sends all changes of the node's pods, until the feed is dropped.
pub(super) async fn follow(client: ApiClient, node: String, contacts: Contacts, input: UnboundedSender<FeedInput>) {
    let collection = Collection::of_node(&node);
    let title = collection.title();
    let mut follower = Follower::new(client, collection);
    let mut pods = ServerPods::new(node);
    loop {
        let event = follower.next().await;
        match &event {
            FollowerEvent::Failure(error) => contacts.trouble(&title, follower.state_name(), error),
            _ => contacts.answered(&title, follower.state_name(), follower.version()),
        }
        let change = pods.take(event, Instant::now());
        let trouble = pods.take_trouble();
        if (change.is_some() || trouble.is_some()) && input.send(FeedInput::Api { change, trouble }).is_err() {
            return;
        }
    }
}

/// The node's pods, as the server has sent them.
struct ServerPods {
    node: String,
    pods: BTreeMap<PodUid, NodePod>,
    /// The problems of pods that podfs cannot serve, by their names.
    bad: BTreeMap<String, String>,
    /// The problem of the watch, and since when there is one.
    trouble: Option<(Instant, String)>,
    /// The problems that were reported last.
    reported: Vec<String>,
}

impl ServerPods {
    fn new(node: String) -> ServerPods {
        ServerPods { node, pods: BTreeMap::new(), bad: BTreeMap::new(), trouble: None, reported: Vec::new() }
    }

    /// Takes an event of the watch. Returns the change for the manager, if there is one.
    fn take(&mut self, event: FollowerEvent, now: Instant) -> Option<PodChange> {
        if let FollowerEvent::Failure(error) = &event {
            self.note_failure(error, now);
            return None;
        }
        self.trouble = None;
        match event {
            FollowerEvent::Listed(pods) => {
                let before = std::mem::take(&mut self.pods);
                self.bad.clear();
                for pod in pods {
                    let known = uid_of(&pod).and_then(|uid| before.get(&uid)).cloned();
                    self.store(pod, known);
                }
                Some(PodChange::All(self.pods.values().cloned().collect()))
            }
            FollowerEvent::Put(pod) => {
                let known = uid_of(&pod).and_then(|uid| self.pods.get(&uid)).cloned();
                self.store(pod, known).map(PodChange::Put)
            }
            FollowerEvent::Deleted(pod) => {
                self.bad.remove(&name_of(&pod));
                let uid = uid_of(&pod)?;
                self.pods.remove(&uid).map(|_| PodChange::Gone(uid))
            }
            FollowerEvent::Alive | FollowerEvent::Failure(_) => None,
        }
    }

    /// All problems, if they differ from those that were reported last.
    fn take_trouble(&mut self) -> Option<Vec<String>> {
        let sentences = self.trouble.iter().map(|(_, sentence)| sentence).filter(|sentence| !sentence.is_empty());
        let sentences: Vec<_> = sentences.chain(self.bad.values()).cloned().collect();
        (sentences != self.reported).then(|| {
            self.reported.clone_from(&sentences);
            sentences
        })
    }

    /// Stores the pod. If podfs cannot parse it, keeps the version before with the new stage. Returns the pod if it has changed.
    fn store(&mut self, object: Value, known: Option<NodePod>) -> Option<NodePod> {
        let (name, stage) = (name_of(&object), stage_of(&object));
        let manifest = manifest_of(object);
        let is_same = known.as_ref().is_some_and(|known| *known.manifest == manifest && known.stage == stage);
        let parsed = match &known {
            Some(known) if is_same => Ok(known.clone()),
            _ => parse(&name, manifest, stage),
        };
        match parsed {
            Ok(pod) => {
                self.bad.remove(&name);
                self.pods.insert(pod.pod.identity.uid.clone(), pod.clone());
                (!is_same).then_some(pod)
            }
            Err(error) => {
                self.bad.insert(name, format!("{error}; podfs cannot serve the pod as it is now"));
                let known = known?;
                let has_changed = known.stage != stage;
                let pod = NodePod { stage, ..known };
                self.pods.insert(pod.pod.identity.uid.clone(), pod.clone());
                has_changed.then_some(pod)
            }
        }
    }

    fn note_failure(&mut self, error: &ApiError, now: Instant) {
        let since = self.trouble.as_ref().map_or(now, |(since, _)| *since);
        let may_pass = error.class.passes() && !error.is_outage();
        let sentence = match error.class {
            _ if may_pass && now.saturating_duration_since(since) < SETTLE_DELAY => String::new(),
            ErrorClass::Forbidden | ErrorClass::Unauthorized => format!(
                "{}; podfs asks again, and the pods stay as they are; its credentials must be those of the node {}, or may \
                 list and watch pods",
                error.sentence, self.node
            ),
            _ => format!("{}; podfs asks again, and the pods stay as they are", error.sentence),
        };
        self.trouble = Some((since, sentence));
    }
}

fn parse(name: &str, manifest: Value, stage: PodStage) -> Result<NodePod, ManifestError> {
    let document = Document::of_server(origin(&format!("Pod {name}")), manifest.clone())?;
    let pod = Arc::new(Pod::parse(document)?);
    Ok(NodePod { pod, manifest: Arc::new(manifest), origin: PodOrigin::Api, stage })
}

/// The part of a pod that decides about its volumes. Without its status and its version: both change all the time.
fn manifest_of(mut pod: Value) -> Value {
    strip(&mut pod);
    if let Some(fields) = pod.as_object_mut() {
        fields.remove("status");
    }
    if let Some(metadata) = pod.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.remove("resourceVersion");
    }
    pod
}

fn stage_of(pod: &Value) -> PodStage {
    match pod.pointer("/status/phase").and_then(Value::as_str) {
        Some("Succeeded" | "Failed") => PodStage::Terminal,
        _ if pod.pointer("/metadata/deletionTimestamp").is_some_and(Value::is_string) => PodStage::Terminating,
        _ => PodStage::Desired,
    }
}

fn uid_of(pod: &Value) -> Option<PodUid> {
    PodUid::parse(pod.pointer("/metadata/uid")?.as_str()?).ok()
}

fn name_of(pod: &Value) -> String {
    let field = |pointer: &str| pod.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
    format!("{}/{}", field("/metadata/namespace"), field("/metadata/name"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(name: &str, uid: &str, labels: Value, status: Value) -> Value {
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"namespace": "default", "name": name, "uid": uid, "labels": labels, "resourceVersion": "1"},
            "spec": {"containers": []}, "status": status,
        })
    }

    fn plain(name: &str, uid: &str) -> Value {
        pod(name, uid, json!({}), json!({"phase": "Running"}))
    }

    fn shown(change: Option<PodChange>) -> String {
        let show = |pod: &NodePod| format!("{} {:?}", pod.pod.identity.uid, pod.stage);
        match change {
            Some(PodChange::All(pods)) => pods.iter().map(show).collect::<Vec<_>>().join(", "),
            Some(PodChange::Put(pod)) => format!("put {}", show(&pod)),
            Some(PodChange::Gone(uid)) => format!("gone {uid}"),
            None => "nothing".to_owned(),
        }
    }

    fn server() -> (ServerPods, Instant) {
        (ServerPods::new("n1".to_owned()), Instant::now())
    }

    #[test]
    fn a_pod_is_reported_when_fields_that_matter_have_changed() {
        let (mut pods, now) = server();
        let mut take = |event| shown(pods.take(event, now));
        assert_eq!(take(FollowerEvent::Listed(vec![plain("a", "u1")])), "u1 Desired");
        let mut beat = plain("a", "u1");
        beat["metadata"]["resourceVersion"] = "2".into();
        beat["status"]["conditions"] = json!([{"type": "Ready"}]);
        assert_eq!(take(FollowerEvent::Put(beat)), "nothing");
        assert_eq!(take(FollowerEvent::Put(pod("a", "u1", json!({"a": "b"}), json!({})))), "put u1 Desired");
        let mut deleted = pod("a", "u1", json!({"a": "b"}), json!({}));
        deleted["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z".into();
        assert_eq!(take(FollowerEvent::Put(deleted.clone())), "put u1 Terminating");
        deleted["status"]["phase"] = "Failed".into();
        assert_eq!(take(FollowerEvent::Put(deleted.clone())), "put u1 Terminal");
        assert_eq!(take(FollowerEvent::Deleted(deleted.clone())), "gone u1");
        assert_eq!(take(FollowerEvent::Deleted(deleted)), "nothing");
        assert_eq!(
            take(FollowerEvent::Put(pod("b", "u2", json!({}), json!({"phase": "Succeeded"})))),
            "put u2 Terminal"
        );
        assert_eq!(take(FollowerEvent::Listed(vec![plain("c", "u3")])), "u3 Desired");
    }

    #[test]
    fn a_pod_that_cannot_be_parsed_stays_and_is_reported() {
        let (mut pods, now) = server();
        pods.take(FollowerEvent::Listed(vec![plain("a", "u1")]), now);
        let mut bad = plain("a", "u1");
        bad["spec"]["volumes"] = json!([{"name": "v", "configMap": {"name": "app", "defaultMode": 9999}}]);
        assert_eq!(shown(pods.take(FollowerEvent::Put(bad.clone()), now)), "nothing");
        let trouble = pods.take_trouble().expect("trouble");
        assert!(trouble[0].starts_with("Pod default/a: spec.volumes[0]"), "{trouble:?}");
        assert_eq!(pods.take_trouble(), None, "it was reported");
        assert_eq!(shown(pods.take(FollowerEvent::Listed(vec![bad]), now)), "u1 Desired");
        assert_eq!(
            shown(pods.take(FollowerEvent::Put(pod("a", "u1", json!({"a": "b"}), json!({}))), now)),
            "put u1 Desired"
        );
        assert_eq!(pods.take_trouble(), Some(Vec::new()));
    }

    #[test]
    fn a_pod_that_cannot_be_parsed_ends_all_the_same() {
        let (mut pods, now) = server();
        pods.take(FollowerEvent::Listed(vec![plain("a", "u1")]), now);
        let mut bad = plain("a", "u1");
        bad["metadata"]["annotations"] = json!({"podfs.io/cache.none": "auto"});
        assert_eq!(shown(pods.take(FollowerEvent::Put(bad.clone()), now)), "nothing");
        bad["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z".into();
        assert_eq!(shown(pods.take(FollowerEvent::Put(bad.clone()), now)), "put u1 Terminating");
        assert_eq!(shown(pods.take(FollowerEvent::Put(bad.clone()), now)), "nothing");
        bad["status"]["phase"] = "Succeeded".into();
        assert_eq!(shown(pods.take(FollowerEvent::Listed(vec![bad.clone()]), now)), "u1 Terminal");
        assert_eq!(shown(pods.take(FollowerEvent::Deleted(bad), now)), "gone u1");
    }

    #[test]
    fn a_refusal_is_reported_at_once_and_a_busy_server_when_it_lasts() {
        let (mut pods, now) = server();
        let error = |class, sentence: &str| FollowerEvent::Failure(ApiError::new(class, sentence));
        pods.take(error(ErrorClass::Busy, "busy"), now);
        assert_eq!(pods.take_trouble(), None);
        pods.take(error(ErrorClass::Busy, "busy"), now + SETTLE_DELAY);
        assert_eq!(pods.take_trouble(), Some(vec!["busy; podfs asks again, and the pods stay as they are".to_owned()]));
        pods.take(error(ErrorClass::Forbidden, "pods is forbidden"), now);
        let expected = "pods is forbidden; podfs asks again, and the pods stay as they are; its credentials must be those of \
                        the node n1, or may list and watch pods";
        assert_eq!(pods.take_trouble(), Some(vec![expected.to_owned()]));
        pods.take(FollowerEvent::Listed(Vec::new()), now);
        assert_eq!(pods.take_trouble(), Some(Vec::new()));
    }
}
