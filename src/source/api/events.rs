//! Events of the pod about its volumes, in the kubelet's form (ME-02), so that `kubectl describe pod` shows them.
//!
//! An event is a series: a repetition increments the `count` of the same object. The object's name follows from the
//! pod, the volume's message and the reason, so a restarted podfs continues the series of the process before it. The
//! server deletes events after a configured time, an hour usually; then podfs begins a new series.
//!
//! No volume depends on events. If the server is unreachable or busy, podfs posts an event later; if the server
//! refuses it, podfs tries again with the next repetition.

use std::collections::{BTreeMap, HashMap};
use std::future::pending;
use std::sync::{Arc, Mutex};

use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};
use tracing::debug;
use uuid::Uuid;

use super::notices::{Condition, Notices};
use crate::kube::address::Resource;
use crate::kube::client::ApiClient;
use crate::kube::error::{ApiError, ErrorClass};
use crate::kube::retry::{Pause, Retry};
use crate::manifest::pod::PodIdentity;

/// The longest message that the API accepts.
const MAX_MESSAGE: usize = 1024;
/// Most series whose count podfs remembers. It reads the counts of others from the server.
const MAX_COUNTS: usize = 256;

/// The conditions of volumes, from which events are made. Cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct Conditions(Arc<ReportedConditions>);

#[derive(Default)]
struct ReportedConditions {
    /// The last condition of each volume that the poster has not taken yet.
    last: Mutex<BTreeMap<String, Condition>>,
    changed: Notify,
}

impl Conditions {
    /// Sets the present condition of a volume. Never waits.
    pub(crate) fn set(&self, volume: &str, condition: Condition) {
        let mut last = self.0.last.lock().expect("no code panics while it is locked");
        last.insert(volume.to_owned(), condition);
        self.0.changed.notify_one();
    }

    fn take(&self) -> BTreeMap<String, Condition> {
        std::mem::take(&mut *self.0.last.lock().expect("no code panics while it is locked"))
    }
}

/// The conditions of a pod's volumes, which the caller sets, and a future that posts events about them.
pub(crate) fn post(
    client: ApiClient,
    pod: PodIdentity,
    node: Option<String>,
) -> (Conditions, impl Future<Output = ()> + Send + 'static) {
    let conditions = Conditions::default();
    let poster = EventPoster {
        retry: Retry::new(client.clone()),
        client,
        pod,
        node: node.unwrap_or_default(),
        counts: HashMap::new(),
        notices: Notices::new(Instant::now()),
    };
    (conditions.clone(), poster.run(conditions))
}

struct EventPoster {
    client: ApiClient,
    pod: PodIdentity,
    node: String,
    /// How often each series was posted, by the name of its object.
    counts: HashMap<String, u64>,
    notices: Notices,
    retry: Retry,
}

impl EventPoster {
    /// Runs until the thread of the API source ends.
    async fn run(mut self, conditions: Conditions) {
        let mut pause: Option<Pause> = None;
        loop {
            for (volume, condition) in conditions.take() {
                self.notices.set(volume, condition, Instant::now());
            }
            while pause.is_none()
                && let Some((volume, condition)) = self.notices.due(Instant::now())
            {
                pause = self.post(&volume, &condition).await;
            }
            let due = self.notices.next_due(Instant::now());
            let next_attempt = async {
                match (&pause, due) {
                    (Some(pause), _) => self.retry.wait(pause).await,
                    (None, Some(due)) => sleep_until(due).await,
                    (None, None) => pending().await,
                }
            };
            tokio::select! {
                () = conditions.0.changed.notified() => {}
                () = next_attempt => pause = None,
            }
        }
    }

    /// Posts the due event of a volume. If podfs has to try again, returns the pause before that.
    async fn post(&mut self, volume: &str, condition: &Condition) -> Option<Pause> {
        let event = KubeletEvent::of(volume, condition);
        let was_posted = match self.count(&event).await {
            Ok(()) => true,
            Err(error) if error.class.passes() => return Some(self.retry.failed(&error)),
            Err(error) => {
                debug!("an event is not posted: {error}");
                false
            }
        };
        self.retry.reset();
        self.notices.note_posted(volume, was_posted, Instant::now());
        None
    }

    /// Begins the series of an event, or increments its count.
    async fn count(&mut self, event: &KubeletEvent) -> Result<(), ApiError> {
        if self.counts.len() > MAX_COUNTS {
            self.counts.clear();
        }
        let mut name = event.name(&self.pod);
        if let Some(count) = self.counts.get(&name) {
            match self.patch(&name, json!({"count": count + 1, "lastTimestamp": now()})).await {
                // The server has deleted the event: another series begins.
                Err(error) if error.class == ErrorClass::NotFound => drop(self.counts.remove(&name)),
                // Without the right to patch, podfs creates a separate object for each event.
                Err(error) if error.class == ErrorClass::Forbidden => {
                    name = nth_name(&self.pod.name, fastrand::u64(..))
                }
                outcome => return outcome.map(drop),
            }
        }
        match self.create(event, &name).await {
            // An earlier podfs has begun the series.
            Err(error) if error.class == ErrorClass::Conflict => {
                let known = match self.patch(&name, json!({"lastTimestamp": now()})).await {
                    Err(error) if error.class == ErrorClass::Forbidden => {
                        return self.create(event, &nth_name(&self.pod.name, fastrand::u64(..))).await;
                    }
                    patched => patched?,
                };
                let count = known["count"].as_u64().unwrap_or(1) + 1;
                self.patch(&name, json!({"count": count})).await.map(drop)
            }
            created => created,
        }
    }

    /// Begins a series.
    async fn create(&mut self, event: &KubeletEvent, name: &str) -> Result<(), ApiError> {
        let object = event.object(&self.pod, &self.node, name);
        self.client.create(Resource::EVENT, Some(&self.pod.namespace), &[], &object).await?;
        self.counts.insert(name.to_owned(), 1);
        Ok(())
    }

    async fn patch(&mut self, name: &str, change: Value) -> Result<Value, ApiError> {
        let patched = self.client.patch(Resource::EVENT, Some(&self.pod.namespace), &[name], &change).await?;
        self.counts.insert(name.to_owned(), patched["count"].as_u64().unwrap_or(1));
        Ok(patched)
    }
}

/// An event in the kubelet's words.
struct KubeletEvent {
    kind: &'static str,
    reason: &'static str,
    message: String,
}

impl KubeletEvent {
    fn of(volume: &str, condition: &Condition) -> KubeletEvent {
        let (kind, reason, mut message) = match condition {
            Condition::Failing(reason) => {
                ("Warning", "FailedMount", format!("MountVolume.SetUp failed for volume {volume:?} : {reason}"))
            }
            Condition::Mounted => {
                ("Normal", "SuccessfulMountVolume", format!("MountVolume.SetUp succeeded for volume {volume:?}"))
            }
            Condition::Kept(sentence) => ("Warning", "KubeletVolume", sentence.clone()),
            Condition::Resized(sentence) => ("Normal", "FileSystemResizeSuccessful", sentence.clone()),
            Condition::NotResized(sentence) => ("Warning", "VolumeResizeFailed", sentence.clone()),
            Condition::Shared(sentence) => ("Warning", "AlreadyMountedVolume", sentence.clone()),
            Condition::ChangesGroup(sentence) => ("Warning", "VolumePermissionChangeInProgress", sentence.clone()),
        };
        while message.len() > MAX_MESSAGE {
            message.pop();
        }
        KubeletEvent { kind, reason, message }
    }

    /// The name of its series: always the same for one event of one pod.
    fn name(&self, pod: &PodIdentity) -> String {
        let text = format!("{}\0{}\0{}", pod.uid.as_str(), self.reason, self.message);
        let (number, _) = Uuid::new_v5(&Uuid::NAMESPACE_OID, text.as_bytes()).as_u64_pair();
        nth_name(&pod.name, number)
    }

    fn object(&self, pod: &PodIdentity, node: &str, name: &str) -> Value {
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "namespace": pod.namespace, "name": pod.name, "uid": pod.uid.as_str(),
        });
        self.about(&pod, node, name)
    }

    /// The event about a claim.
    fn about_claim(&self, claim: &Value, node: &str, number: u64) -> Value {
        let field = |name: &str| claim["metadata"][name].as_str().unwrap_or_default();
        let name = field("name");
        let involved = json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "namespace": field("namespace"), "name": name, "uid": field("uid"),
        });
        self.about(&involved, node, &nth_name(name, number))
    }

    /// The event about this object.
    fn about(&self, involved: &Value, node: &str, name: &str) -> Value {
        let now = now();
        json!({
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": { "name": name, "namespace": involved["namespace"] },
            "involvedObject": involved,
            "type": self.kind,
            "reason": self.reason,
            "message": self.message,
            "source": { "component": "podfs", "host": node },
            "reportingComponent": "podfs",
            "reportingInstance": node,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        })
    }
}

/// Posts once that the volume of a claim has grown. `volume` is the name of the volume in a pod.
///
/// # Errors
/// When the server refuses the event.
pub(crate) async fn post_growth(client: &ApiClient, claim: &Value, volume: &str, node: &str) -> Result<(), ApiError> {
    let event = KubeletEvent::of(volume, &Condition::Resized(grown(volume)));
    let object = event.about_claim(claim, node, fastrand::u64(..));
    let namespace = object["metadata"]["namespace"].as_str();
    client.create(Resource::EVENT, namespace, &[], &object).await.map(drop)
}

/// Posts once, for a pod and for its claim, that the pod's volume does not grow to this many bytes, because the pod has
/// it read-only.
///
/// # Errors
/// When the server refuses an event.
pub(crate) async fn post_read_only(
    client: &ApiClient,
    pod: &PodIdentity,
    claim: &Value,
    (volume, bytes): (&str, u64),
    node: &str,
) -> Result<(), ApiError> {
    let message = format!("MountVolume.NodeExpandVolume failed for volume {volume:?} requested read-only file system");
    let event = KubeletEvent { kind: "Warning", reason: "FileSystemResizeFailed", message };
    // The name is the same after a restart.
    let text = format!("{}\0{}\0{bytes}", pod.uid.as_str(), event.message);
    let (number, _) = Uuid::new_v5(&Uuid::NAMESPACE_OID, text.as_bytes()).as_u64_pair();
    let of_pod = event.object(pod, node, &nth_name(&pod.name, number));
    // The pod may have the name of the claim.
    let of_claim = event.about_claim(claim, node, number.wrapping_add(1));
    for object in [of_pod, of_claim] {
        match client.create(Resource::EVENT, Some(&pod.namespace), &[], &object).await {
            Err(error) if error.class == ErrorClass::Conflict => debug!("an event was posted before: {error}"),
            outcome => drop(outcome?),
        }
    }
    Ok(())
}

/// The message about a volume that has grown, in the kubelet's words.
pub(crate) fn grown(volume: &str) -> String {
    format!("MountVolume.NodeExpandVolume succeeded for volume {volume:?}")
}

/// The name of an event: the name of its object, cut if necessary, and a number.
fn nth_name(object: &str, number: u64) -> String {
    // With the number, 253 bytes.
    const LONGEST: usize = 236;
    let end = (0..=object.len().min(LONGEST)).rev().find(|end| object.is_char_boundary(*end));
    let start = object[..end.unwrap_or(0)].trim_end_matches(['.', '-']);
    format!("{start}.{number:016x}")
}

fn now() -> String {
    Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failing(reason: &str) -> KubeletEvent {
        KubeletEvent::of("config", &Condition::Failing(reason.to_owned()))
    }

    #[test]
    fn me_02_an_event_is_in_the_kubelets_words() {
        let pod = PodIdentity::placeholder();
        let event = failing("configmap \"app\" not found");
        let object = event.object(&pod, "n1", &event.name(&pod));
        let expected = "MountVolume.SetUp failed for volume \"config\" : configmap \"app\" not found";
        assert_eq!((object["message"].as_str(), object["reason"].as_str()), (Some(expected), Some("FailedMount")));
        assert_eq!(object["involvedObject"]["uid"].as_str(), Some(pod.uid.as_str()));
        let mounted = KubeletEvent::of("config", &Condition::Mounted);
        assert_eq!((mounted.kind, mounted.reason), ("Normal", "SuccessfulMountVolume"));
        assert_eq!(mounted.message, "MountVolume.SetUp succeeded for volume \"config\"");
    }

    #[test]
    fn lp_03_fg_05_events_about_the_group_have_the_reasons_of_the_kubelet() {
        let reason = |condition| {
            let event = KubeletEvent::of("data", &condition);
            assert_eq!((event.kind, event.message.as_str()), ("Warning", "a sentence"));
            event.reason
        };
        assert_eq!(reason(Condition::Shared("a sentence".to_owned())), "AlreadyMountedVolume");
        assert_eq!(reason(Condition::ChangesGroup("a sentence".to_owned())), "VolumePermissionChangeInProgress");
    }

    #[test]
    fn the_same_event_of_the_same_pod_has_the_same_name() {
        let pod = PodIdentity::placeholder();
        let name = failing("a").name(&pod);
        assert!(name.starts_with("podfs.") && name.len() == 22, "{name}");
        assert_eq!(failing("a").name(&pod), name);
        assert_ne!(failing("b").name(&pod), name);
    }

    #[test]
    fn an_event_about_a_claim_with_a_long_name_has_a_name_that_the_server_accepts() {
        let claim = json!({"metadata": {"name": format!("{}-.{}", "a".repeat(234), "b".repeat(10)), "namespace": "n"}});
        let object = failing("a").about_claim(&claim, "n1", 1);
        let expected = format!("{}.0000000000000001", "a".repeat(234));
        assert_eq!(object["metadata"]["name"].as_str(), Some(expected.as_str()));
    }

    #[test]
    fn a_long_name_of_an_event_is_cut_at_a_character() {
        assert_eq!(nth_name(&format!("a{}", "ä".repeat(200)), 1), format!("a{}.0000000000000001", "ä".repeat(117)));
    }

    #[test]
    fn a_long_message_is_cut_at_a_character() {
        let message = failing(&"ä".repeat(1000)).message;
        assert!(message.len() <= MAX_MESSAGE && message.ends_with('ä'));
    }
}
