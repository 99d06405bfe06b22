//! Objects and their history. One version counts every change of any object, as etcd's revision does.
//!
//! The callers register watches and record changes under one lock, so that a watch gets every change after its first version
//! once, in order.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::resources::Resource;
use super::selector::Selection;
use super::status::Failure;
use super::tokens::rfc3339;

/// The key of an object. Cluster-scoped objects have an empty namespace.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    pub plural: &'static str,
    pub namespace: String,
    pub name: String,
}

impl Key {
    pub fn new(plural: &'static str, namespace: &str, name: &str) -> Self {
        Self { plural, namespace: namespace.to_owned(), name: name.to_owned() }
    }
}

/// A change of an object.
#[derive(Debug)]
pub struct Change {
    pub version: u64,
    pub key: Key,
    /// The object before the change, if it existed.
    pub before: Option<Arc<Value>>,
    /// The object after the change; for a deletion, the deleted object with the version of the deletion.
    pub object: Arc<Value>,
    pub deleted: bool,
}

/// A message of the store to a watch.
#[derive(Clone, Debug)]
pub enum WatchMessage {
    Change(Arc<Change>),
    /// The watch has got all changes up to this version.
    Bookmark(u64),
}

/// The changes for a watch that begins.
pub struct Registered {
    /// The changes between the version of the request and the begin of the watch.
    pub missed: Vec<Arc<Change>>,
    /// The changes after the begin of the watch.
    pub messages: UnboundedReceiver<WatchMessage>,
}

struct Watcher {
    selection: Selection,
    messages: UnboundedSender<WatchMessage>,
}

#[derive(Default)]
pub struct Store {
    version: u64,
    /// The oldest version that a watch can begin at.
    oldest: u64,
    objects: BTreeMap<Key, Arc<Value>>,
    history: Vec<Arc<Change>>,
    watchers: Vec<Watcher>,
    uids: u64,
}

impl Store {
    pub fn version(&self) -> u64 {
        self.version
    }

    pub fn get(&self, key: &Key) -> Option<&Arc<Value>> {
        self.objects.get(key)
    }

    pub fn of(&self, plural: &str) -> impl Iterator<Item = (&Key, &Arc<Value>)> {
        self.objects.iter().filter(move |(key, _)| key.plural == plural)
    }

    /// Creates an object, or replaces it. Returns its version.
    pub fn put(&mut self, mut object: Value) -> u64 {
        let resource = Resource::of(&object).unwrap_or_else(|| panic!("no resource that is served: {object}"));
        resource.check(&object);
        let name = object["metadata"]["name"].as_str().expect("an object has a name").to_owned();
        if resource.namespaced && object["metadata"]["namespace"].is_null() {
            object["metadata"]["namespace"] = "default".into();
        }
        let namespace = object["metadata"]["namespace"].as_str().unwrap_or_default();
        let key = Key::new(resource.plural, namespace, &name);
        let before = self.objects.get(&key).cloned();
        if let Some(before) = &before {
            assert!(
                before["immutable"] != true || ["data", "binaryData"].iter().all(|part| before[part] == object[part]),
                "{key:?} is immutable: a real server refuses this change"
            );
        }
        self.version += 1;
        self.set_defaults(resource, &mut object, before.as_deref());
        let object = Arc::new(object);
        self.objects.insert(key.clone(), Arc::clone(&object));
        self.record(Change { version: self.version, key, before, object, deleted: false });
        self.version
    }

    /// Deletes an object. Returns the version of the deletion.
    pub fn delete(&mut self, key: &Key) -> u64 {
        let before = self.objects.remove(key).unwrap_or_else(|| panic!("there is no {key:?}"));
        self.version += 1;
        let mut last = Value::clone(&before);
        last["metadata"]["resourceVersion"] = self.version.to_string().into();
        let (before, object) = (Some(before), Arc::new(last));
        self.record(Change { version: self.version, key: key.clone(), before, object, deleted: true });
        self.version
    }

    /// Forgets the history of the objects.
    pub fn compact(&mut self) {
        // A new version makes every version that a client knows too old to begin a watch.
        self.version += 1;
        self.oldest = self.version;
        self.history.clear();
    }

    /// The objects at a version, in the order of lists.
    pub fn select(&self, selection: &Selection, version: u64) -> Result<Vec<(Key, Arc<Value>)>, Failure> {
        if version < self.oldest {
            return Err(Failure::page_expired());
        }
        // Most requests are for one object at the present version.
        if let (true, Some(key)) = (version == self.version, selection.key()) {
            let object = self.objects.get(&key).filter(|object| selection.selects(&key, object)).cloned();
            return Ok(object.map(|object| (key, object)).into_iter().collect());
        }
        let mut objects: BTreeMap<&Key, &Arc<Value>> =
            self.objects.iter().filter(|(key, _)| selection.is_of(key.plural)).collect();
        for change in self.history.iter().rev().take_while(|change| change.version > version) {
            match &change.before {
                Some(before) => objects.insert(&change.key, before),
                None => objects.remove(&change.key),
            };
        }
        let selected = objects.into_iter().filter(|(key, object)| selection.selects(key, object));
        Ok(selected.map(|(key, object)| (key.clone(), Arc::clone(object))).collect())
    }

    /// Begins a watch after a version.
    pub fn watch(&mut self, selection: Selection, version: u64) -> Result<Registered, Failure> {
        if version < self.oldest {
            return Err(Failure::too_old(version, self.oldest));
        }
        if version > self.version {
            return Err(Failure::too_new(version, self.version));
        }
        let first = self.history.partition_point(|change| change.version <= version);
        let (sender, messages) = unbounded_channel();
        self.watchers.push(Watcher { selection, messages: sender });
        Ok(Registered { missed: self.history[first..].to_vec(), messages })
    }

    /// Sends the present version to every watch.
    pub fn bookmark(&mut self) {
        let version = self.version;
        self.watchers.retain(|watcher| watcher.messages.send(WatchMessage::Bookmark(version)).is_ok());
    }

    /// The number of watches that cover an object.
    pub fn watches(&self, plural: &str, name: &str) -> usize {
        let watches = |watcher: &&Watcher| {
            !watcher.messages.is_closed()
                && watcher.selection.is_of(plural)
                && watcher.selection.name().is_none_or(|selected| selected == name)
        };
        self.watchers.iter().filter(watches).count()
    }

    /// Adds a change to the history, and sends it to the watches that select the object before or after the change.
    fn record(&mut self, change: Change) {
        let change = Arc::new(change);
        let concerns = |watcher: &Watcher| {
            let before = change.before.as_deref();
            before.is_some_and(|before| watcher.selection.selects(&change.key, before))
                || watcher.selection.selects(&change.key, &change.object)
        };
        self.watchers.retain(|watcher| match concerns(watcher) {
            true => watcher.messages.send(WatchMessage::Change(Arc::clone(&change))).is_ok(),
            false => !watcher.messages.is_closed(),
        });
        self.history.push(change);
    }

    /// Sets the fields that a real server sets.
    fn set_defaults(&mut self, resource: &Resource, object: &mut Value, before: Option<&Value>) {
        if let Some(Value::Object(strings)) = object.get_mut("stringData").map(Value::take) {
            for (key, text) in strings {
                let bytes = text.as_str().expect("stringData is text").as_bytes().to_vec();
                object["data"][key] = json!(k8s_openapi::ByteString(bytes));
            }
            object.as_object_mut().expect("an object").remove("stringData");
        }
        if resource.kind == "Pod" && object["spec"]["serviceAccountName"].is_null() {
            object["spec"]["serviceAccountName"] = "default".into();
        }
        let metadata = &mut object["metadata"];
        metadata["resourceVersion"] = self.version.to_string().into();
        let mut keep = |field: &str, new: Value| {
            if metadata[field].is_null() {
                metadata[field] = before.map_or(new, |before| before["metadata"][field].clone());
            }
        };
        self.uids += 1;
        keep("uid", format!("00000000-0000-4000-8000-{:012x}", self.uids).into());
        keep("creationTimestamp", rfc3339(SystemTime::now()));
    }
}
