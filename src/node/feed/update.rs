//! The objects that a supervisor has, and the push that brings it up to date. Plain data, no I/O.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use super::object::WholeObject;
use crate::manifest::objects::{Missing, ObjectKey, Objects};
use crate::manifest::tokens::Token;
use crate::source::{DeletedObject, PodCertificate, Push, UnknownObject};
use crate::volume::{CredentialKey, TokenKey};

/// How many bytes of objects a push may have before its last object. The control socket takes pushes of at most 16 MiB; escapes
/// in JSON can make several bytes of one.
const PUSH_LIMIT: Option<usize> = Some(2 << 20);
/// Why an object is not in a push that is full.
const LATER: &str = "podfs node sends it in a moment";

/// All objects and tokens to which the volumes of a pod refer, at one moment.
#[derive(Clone)]
pub(super) struct PodReferences {
    /// The pod as JSON, for its labels and annotations.
    pub(super) pod: Arc<Value>,
    pub(super) objects: BTreeMap<ObjectKey, Arc<WholeObject>>,
    pub(super) tokens: BTreeMap<CredentialKey, Arc<Token>>,
    /// The objects that podfs does not know, with the reasons.
    pub(super) missing: BTreeMap<Missing, String>,
    pub(super) missing_tokens: BTreeMap<CredentialKey, String>,
    /// Whether podfs does not report missing objects as a problem yet.
    pub(super) settling: bool,
}

impl PodReferences {
    /// Keeps an object that was sent before as long as podfs does not know whether it still exists (MG-06).
    pub(super) fn keep_missing_objects(&mut self, before: &PodReferences) {
        self.missing.retain(|missing, _| {
            let Missing::Object(key) = missing else { return true };
            let kept = before.objects.get(key);
            self.objects.extend(kept.map(|object| (key.clone(), Arc::clone(object))));
            kept.is_none()
        });
    }

    /// Omits objects that would make the push too large. Until the next push, the supervisor does not know them, or has
    /// their version before.
    pub(super) fn limit(&mut self, before: Option<&PodReferences>) {
        let mut left = PUSH_LIMIT;
        let mut later = Vec::new();
        for (key, object) in &self.objects {
            let sent = before.and_then(|before| before.objects.get(key));
            if sent.is_some_and(|sent| Arc::ptr_eq(sent, object)) {
                continue;
            }
            match left {
                Some(bytes) => left = bytes.checked_sub(weight(&object.value)),
                None => later.push((key.clone(), sent.cloned())),
            }
        }
        for (key, sent) in later {
            match sent {
                Some(sent) => drop(self.objects.insert(key, sent)),
                None => {
                    self.objects.remove(&key);
                    self.missing.insert(Missing::Object(key), LATER.to_owned());
                    self.settling = true;
                }
            }
        }
    }

    /// All objects, parsed.
    pub(super) fn parsed(&self) -> Objects {
        let objects = Objects::default().with(self.objects.values().map(|object| Arc::clone(&object.parsed)));
        objects.with_absences(self.missing.clone())
    }

    /// A push of everything.
    pub(super) fn full_push(&self) -> Push {
        let objects = self.objects.values().map(|object| object.value.clone());
        let tokens = self.tokens.iter().map(|(key, token)| credential(key, token));
        let objects = std::iter::once(Value::clone(&self.pod)).chain(objects).chain(tokens).collect();
        Push { objects, replace: true, ..self.without_objects() }
    }

    /// A push of the differences; `None` if there are none.
    pub(super) fn since(&self, before: &PodReferences) -> Option<Push> {
        let is_new_object = |(key, object): &(&ObjectKey, &Arc<WholeObject>)| {
            before.objects.get(key).is_none_or(|sent| !Arc::ptr_eq(sent, object))
        };
        let is_new_token = |(key, token): &(&CredentialKey, &Arc<Token>)| before.tokens.get(key) != Some(*token);
        let mut objects = Vec::new();
        if !Arc::ptr_eq(&self.pod, &before.pod) && self.pod != before.pod {
            objects.push(Value::clone(&self.pod));
        }
        objects.extend(self.objects.iter().filter(is_new_object).map(|(_, object)| object.value.clone()));
        objects.extend(self.tokens.iter().filter(is_new_token).map(|(key, token)| credential(key, token)));
        // A push can delete only objects of the pod's namespace. The supervisor itself drops a Secret of another namespace
        // once no PersistentVolume names it.
        let gone = before.objects.keys().filter(|key| !self.objects.contains_key(key) && self.is_of_pod(key));
        let deletion = |key: &ObjectKey| DeletedObject { kind: key.kind.to_string(), name: key.name.clone() };
        let push = Push { objects, delete: gone.map(deletion).collect(), ..self.without_objects() };
        let same_state = (&push.unknown, push.settling) == (&before.unknown(), before.is_settling());
        let is_nothing = push.objects.is_empty() && push.delete.is_empty() && same_state;
        (!is_nothing).then_some(push)
    }

    /// Whether the object is in the pod's namespace, or its kind has no namespaces: then a push names it without a namespace.
    fn is_of_pod(&self, key: &ObjectKey) -> bool {
        let namespace = self.pod.pointer("/metadata/namespace").and_then(Value::as_str).unwrap_or("default");
        key.kind.is_of_cluster() || key.namespace == namespace
    }

    fn without_objects(&self) -> Push {
        Push { unknown: self.unknown(), settling: self.is_settling(), ..Push::default() }
    }

    fn is_settling(&self) -> bool {
        self.settling && !(self.missing.is_empty() && self.missing_tokens.is_empty())
    }

    fn unknown(&self) -> Vec<UnknownObject> {
        let is_of_pod = |what: &Missing| match what {
            Missing::Object(key) => self.is_of_pod(key),
            Missing::BundlesOf(_) => true,
        };
        let missing = self.missing.iter().filter(|(what, _)| is_of_pod(what));
        let objects = missing.map(|(what, reason)| UnknownObject::missing(what, reason.clone()));
        let tokens = self.missing_tokens.iter().map(|(key, reason)| UnknownObject::credential(key, reason.clone()));
        objects.chain(tokens).collect()
    }
}

/// The approximate size of a value in bytes.
fn weight(value: &Value) -> usize {
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => 8,
        Value::String(text) => text.len(),
        Value::Array(values) => values.iter().map(weight).sum(),
        Value::Object(fields) => fields.iter().map(|(name, value)| name.len() + weight(value)).sum(),
    }
}

/// A token or a certificate, as a push has it.
fn credential(key: &CredentialKey, token: &Token) -> Value {
    match key {
        CredentialKey::Token(key) => token_request(key, token),
        CredentialKey::Certificate(key) => PodCertificate::of(key, token).to_value(),
    }
}

/// A token in the form of the API server's answer to a TokenRequest.
fn token_request(key: &TokenKey, token: &Token) -> Value {
    let audiences: Vec<_> = key.audience.iter().collect();
    json!({
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"audiences": audiences, "expirationSeconds": key.expiration_seconds},
        "status": {"token": String::from_utf8_lossy(&token.bytes), "expirationTimestamp": token.expires.and_then(time)},
    })
}

fn time(at: SystemTime) -> Option<Time> {
    Timestamp::try_from(at).ok().map(Time)
}

#[cfg(test)]
mod tests {
    use super::super::object::tests::objects;
    use super::*;

    fn view(yaml: &str) -> PodReferences {
        let objects = objects(yaml).into_iter().map(|object| (object.key().clone(), object)).collect();
        PodReferences {
            pod: Arc::new(json!({"kind": "Pod"})),
            objects,
            tokens: BTreeMap::new(),
            missing: BTreeMap::new(),
            missing_tokens: BTreeMap::new(),
            settling: false,
        }
    }

    fn config_map(name: &str) -> String {
        format!("{{apiVersion: v1, kind: ConfigMap, metadata: {{name: {name}}}}}\n---\n")
    }

    fn key(name: &str) -> ObjectKey {
        objects(&config_map(name)).remove(0).key().clone()
    }

    fn names(push: &Push) -> Vec<&str> {
        push.objects.iter().filter_map(|object| object["metadata"]["name"].as_str()).collect()
    }

    #[test]
    fn the_first_push_is_complete_and_later_ones_have_the_changes() {
        let first = view(&[config_map("a"), config_map("b")].concat());
        let whole = first.full_push();
        assert!(whole.replace && whole.objects.len() == 3 && whole.objects[0]["kind"] == "Pod");
        assert_eq!(first.since(&first.clone()), None);
        let mut next = first.clone();
        next.objects.remove(&key("a"));
        next.objects.insert(key("b"), objects(&config_map("b")).remove(0));
        let push = next.since(&first).expect("two changes");
        assert_eq!((names(&push), push.replace), (vec!["b"], false));
        assert_eq!(push.delete, [DeletedObject { kind: "ConfigMap".to_owned(), name: "a".to_owned() }]);
        next.pod = Arc::new(json!({"kind": "Pod", "metadata": {"name": "web"}}));
        assert_eq!(names(&next.since(&first).expect("the pod, too")), ["web", "b"]);
    }

    #[test]
    fn large_objects_come_in_several_pushes_and_none_is_forgotten() {
        let large = |name: &str| {
            let text = "x".repeat(900 << 10);
            format!("{{apiVersion: v1, kind: ConfigMap, metadata: {{name: {name}}}, data: {{k: {text}}}}}\n---\n")
        };
        let all = view(&["a", "b", "c", "d", "e"].map(large).concat());
        let mut first = all.clone();
        first.limit(None);
        let push = first.full_push();
        assert_eq!((names(&push), push.unknown.len(), push.settling), (vec!["a", "b", "c"], 2, true));
        let mut second = all.clone();
        second.limit(Some(&first));
        let push = second.since(&first).expect("the rest");
        assert_eq!((names(&push), push.unknown.len(), push.settling), (vec!["d", "e"], 0, false));
        // When all objects change, the supervisor keeps the old versions until it gets the new ones.
        let changed = view(&["a", "b", "c", "d", "e"].map(large).concat());
        let mut third = changed.clone();
        third.limit(Some(&second));
        let push = third.since(&second).expect("changes");
        assert_eq!((names(&push).len(), push.unknown.len(), push.delete.len()), (3, 0, 0));
        let mut last = changed.clone();
        last.limit(Some(&third));
        assert_eq!(names(&last.since(&third).expect("the rest")), ["d", "e"]);
    }

    #[test]
    fn a_token_is_pushed_as_the_answer_of_a_server() {
        let (mut now, before) = (view(""), view(""));
        let expires = Some(SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_900_000_000));
        let token = Token { bytes: b"secret".to_vec(), expires };
        let key = TokenKey::new(Some("vault".to_owned()), Some(7200));
        now.tokens.insert(CredentialKey::Token(key), Arc::new(token));
        let push = now.since(&before).expect("a token");
        assert_eq!(push.objects[0]["spec"], json!({"audiences": ["vault"], "expirationSeconds": 7200}));
        assert_eq!(push.objects[0]["status"]["expirationTimestamp"], "2030-03-17T17:46:40Z");
        assert!(!format!("{push:?}").contains("secret"));
    }

    #[test]
    fn mg_06_a_sent_object_stays_until_its_deletion_is_known() {
        let before = view(&config_map("a"));
        let mut now = view("");
        now.missing.insert(Missing::Object(key("a")), "it is away".to_owned());
        now.missing.insert(Missing::Object(key("b")), "it is away".to_owned());
        now.settling = true;
        now.keep_missing_objects(&before);
        let push = now.since(&before).expect("something is unknown");
        assert!(push.objects.is_empty() && push.delete.is_empty() && push.settling);
        assert_eq!(push.unknown, [UnknownObject::missing(&Missing::Object(key("b")), "it is away".to_owned())]);
    }
}
