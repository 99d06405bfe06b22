//! Which pods refer to which objects, and what podfs knows of each object, for all pods of the node.
//!
//! An object comes from the manifest files, or else from the API server. podfs does not request an object from the server that
//! the files describe. An entry exists as long as a pod refers to its object; the watch ends with it (MG-01).
//!
//! Until podfs has read each manifest file once, an object in none of them may be in one that it could not read, and a volume may
//! show it since an earlier daemon could read this file. So podfs does not know whether the object exists. A pod of the API server
//! gets the object of the server if there is one: a file that podfs cannot read must not stop all pods of the node.
//!
//! Locks, and why no change is missed:
//!
//! 1. A thread locks `files` only while it copies or replaces a pointer. It may do so while it has an entry of `entries` locked,
//!    but it never locks an entry while it has `files` locked. No thread holds a lock over an `await`.
//! 2. The registry replaces the files first, and then visits the entries of objects that differ. A new reference reads the files
//!    with its entry locked. So it sees the new files, or the registry visits its entry afterwards.
//! 3. The registry starts, cancels and completes a request with its entry locked. A request has a number, by which the
//!    registry recognizes the answer of a cancelled task, and ignores it.
//! 4. A follower is notified after the entry has changed, and reads entries after it was notified. A notification that comes
//!    while it reads makes it read again.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, RwLock, Weak};

use dashmap::DashMap;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::directory::FileObjects;
use super::object::WholeObject;
use super::readers::PodReaders;
use super::server::{FollowedObject, ObjectServer, TaskMessage};
use super::wanted::{Absence, WantedObject};
use crate::manifest::objects::{ObjectKey, ObjectKind};
use crate::manifest::tokens::Token;
use crate::source::{IssuedCredentials, ObjectUpdate, SETTLE_DELAY};

/// What podfs knows of a reference.
pub(super) struct WantedObjectAnswer {
    pub(super) objects: Vec<Arc<WholeObject>>,
    /// Why podfs does not know the object, if it does not.
    pub(super) absence: Option<Absence>,
    /// Whether the sources have answered, so that a follower need not wait for them.
    pub(super) is_answered: bool,
}

/// The state of an object, and the followers that are notified of changes.
pub(super) struct ObjectRegistry {
    /// The registry itself, for the tasks that send answers to it.
    me: Weak<ObjectRegistry>,
    server: Option<ObjectServer>,
    entries: DashMap<WantedObject, RegisteredObject>,
    files: RwLock<FilesKnown>,
}

/// The objects of the manifest files.
#[derive(Clone)]
enum FilesKnown {
    /// podfs has not read them.
    NotYet { since: Instant },
    /// It has read them, except `unread`. Once it has read all of them, `unread` stays `None`.
    Are { objects: Arc<FileObjects>, unread: Option<Arc<Path>> },
}

#[derive(Default)]
struct RegisteredObject {
    followers: Vec<Arc<Notify>>,
    /// The task that follows the object at the API server, if there is one, and its last answer.
    followed: Option<FollowedObject>,
}

impl ObjectRegistry {
    /// A registry without references. `has_files` is whether there are manifest files to read.
    pub(super) fn new(has_files: bool, server: Option<ObjectServer>) -> Arc<ObjectRegistry> {
        let files = match has_files {
            true => FilesKnown::NotYet { since: Instant::now() },
            false => FilesKnown::Are { objects: Arc::default(), unread: None },
        };
        Arc::new_cyclic(|me| ObjectRegistry {
            me: Weak::clone(me),
            server,
            entries: DashMap::new(),
            files: RwLock::new(files),
        })
    }

    /// Replaces the objects of the manifest files. `unread` is a file that podfs has never been able to read.
    pub(super) fn take_files(&self, objects: Arc<FileObjects>, unread: Option<&Path>) {
        let (before, unread) = {
            let mut files = self.files.write().expect("no code panics while it is locked");
            let was_read = matches!(*files, FilesKnown::Are { unread: None, .. });
            let unread: Option<Arc<Path>> = unread.filter(|_| !was_read).map(Arc::from);
            let now = FilesKnown::Are { objects: Arc::clone(&objects), unread: unread.clone() };
            (std::mem::replace(&mut *files, now), unread)
        };
        let before = match before {
            FilesKnown::Are { objects, unread: unread_before } if unread_before == unread => objects,
            _ => {
                return self.entries.iter_mut().for_each(|mut entry| {
                    let (want, entry) = entry.pair_mut();
                    self.request(want, entry);
                    entry.notify();
                });
            }
        };
        let differs = |(key, object): &(&ObjectKey, &Arc<WholeObject>)| {
            before.get(*key).is_none_or(|known| !Arc::ptr_eq(known, object))
        };
        let gone = before.iter().filter(|(key, _)| !objects.contains_key(key));
        let changed: BTreeSet<WantedObject> =
            objects.iter().filter(differs).chain(gone).flat_map(|(_, object)| wants_of(object)).collect();
        for mut entry in self.entries.iter_mut().filter(|entry| entry.key().is_one_of(&changed)) {
            let (want, entry) = entry.pair_mut();
            self.request(want, entry);
            entry.notify();
        }
    }

    /// Takes a message of the task with this number.
    pub(super) fn take(&self, want: &WantedObject, id: u64, message: TaskMessage) {
        let Some(mut entry) = self.entries.get_mut(want) else { return };
        let Some(followed) = entry.followed.as_mut().filter(|followed| followed.has_id(id)) else { return };
        if let (Some(server), TaskMessage::Update(update)) = (&self.server, &message) {
            server.note(&want.title(), update);
        }
        if followed.take(message) {
            entry.notify();
        }
    }

    /// Adds a reference of this follower's pod. If the object had its final state, such as a bound claim, requests it
    /// again: another object may have its name now.
    pub(super) fn subscribe(&self, want: &WantedObject, follower: &Arc<Notify>) {
        let mut entry = self.entries.entry(want.clone()).or_default();
        entry.followers.push(Arc::clone(follower));
        self.request(want, &mut entry);
    }

    /// Removes a reference of this follower's pod.
    pub(super) fn unsubscribe(&self, want: &WantedObject, follower: &Arc<Notify>) {
        let gone = self.entries.remove_if_mut(want, |_, entry| {
            entry.followers.retain(|other| !Arc::ptr_eq(other, follower));
            entry.followers.is_empty()
        });
        if let (Some(_), Some(server)) = (gone, &self.server) {
            server.forget(want);
        }
    }

    /// What podfs knows of a reference that was added. `is_static` is whether it is the reference of a static pod.
    pub(super) fn answer(&self, want: &WantedObject, is_static: bool) -> WantedObjectAnswer {
        let (mut objects, unread) = match self.files() {
            FilesKnown::Are { objects, unread } => (of_files(&objects, want), unread),
            FilesKnown::NotYet { since } => {
                let reason = format!("{}: the manifest directory was not read yet", want.title());
                let absence = Absence { reason, settles: Some(since + SETTLE_DELAY) };
                return WantedObjectAnswer { objects: Vec::new(), absence: Some(absence), is_answered: false };
            }
        };
        let unread = unread.filter(|_| objects.is_empty() || matches!(want, WantedObject::BundlesOf(_)));
        let may_be_unread = unread.map(|file| Absence::in_unread_file(want, &file));
        let entry = self.entries.get(want);
        let followed = entry.as_ref().and_then(|entry| entry.followed.as_ref());
        let Some(followed) = followed.filter(|_| may_be_unread.is_none() || !is_static) else {
            return WantedObjectAnswer { objects, absence: may_be_unread, is_answered: true };
        };
        let absence = followed.absence(want).or(may_be_unread.filter(|_| followed.objects().is_empty()));
        // If files and server have the same object, the follower uses the last one in this list, which is from the files.
        objects.splice(0..0, followed.objects().iter().cloned());
        WantedObjectAnswer { objects, absence, is_answered: followed.is_answered() }
    }

    /// The readers with the tokens of pods, if podfs reads objects with them.
    pub(super) fn readers(&self) -> Option<&PodReaders> {
        self.server.as_ref()?.readers()
    }

    /// The tokens of a pod, if a server issues them.
    pub(super) fn tokens(&self) -> Option<IssuedCredentials> {
        self.server.as_ref().map(ObjectServer::tokens)
    }

    /// Logs a problem of a token, or its end.
    pub(super) fn note_token(&self, title: &str, update: &ObjectUpdate<Token>) {
        if let Some(server) = &self.server {
            server.note_token(title, update);
        }
    }

    /// Forgets a token that no pod has any more.
    pub(super) fn forget_token(&self, title: &str) {
        if let Some(server) = &self.server {
            server.forget_token(title);
        }
    }

    /// Requests an object from the server, or cancels the request if the files have the object. Does nothing before podfs
    /// has read the files.
    fn request(&self, want: &WantedObject, entry: &mut RegisteredObject) {
        let (Some(server), FilesKnown::Are { objects: files, .. }) = (&self.server, self.files()) else { return };
        if matches!(want, WantedObject::Object(key) | WantedObject::AsPod(_, key) if files.contains_key(key)) {
            entry.followed = None;
        } else if entry.followed.as_ref().is_none_or(FollowedObject::is_settled) {
            let (registry, wanted) = (Weak::clone(&self.me), want.clone());
            let answer =
                move |id, message| registry.upgrade().map(|registry| registry.take(&wanted, id, message)).is_some();
            entry.followed = server.request(want, Box::new(answer), entry.followed.take());
        }
    }

    /// How many references there are, and how many followers have them.
    #[cfg(test)]
    pub(super) fn subscriptions(&self) -> (usize, usize) {
        (self.entries.len(), self.entries.iter().map(|entry| entry.followers.len()).sum())
    }

    fn files(&self) -> FilesKnown {
        self.files.read().expect("no code panics while it is locked").clone()
    }
}

impl RegisteredObject {
    fn notify(&self) {
        self.followers.iter().for_each(|follower| follower.notify_one());
    }
}

/// The references that this object matches.
fn wants_of(object: &Arc<WholeObject>) -> impl Iterator<Item = WantedObject> {
    let signer = object.parsed.trust_bundle().and_then(|bundle| bundle.signer.clone());
    let only_node = (object.key().kind == ObjectKind::Node).then_some(WantedObject::OnlyNode);
    [WantedObject::Object(object.key().clone())].into_iter().chain(signer.map(WantedObject::BundlesOf)).chain(only_node)
}

fn of_files(files: &FileObjects, want: &WantedObject) -> Vec<Arc<WholeObject>> {
    let of_kind = |kind: ObjectKind| {
        let first = ObjectKey { kind, namespace: String::new(), name: String::new() };
        files.range(first..).take_while(move |(key, _)| key.kind == kind).map(|(_, object)| object)
    };
    match want {
        WantedObject::Object(key) | WantedObject::AsPod(_, key) => files.get(key).cloned().into_iter().collect(),
        WantedObject::BundlesOf(signer) => {
            let is_of_signer = |object: &&Arc<WholeObject>| {
                object.parsed.trust_bundle().is_some_and(|bundle| bundle.signer.as_deref() == Some(signer))
            };
            of_kind(ObjectKind::ClusterTrustBundle).filter(is_of_signer).cloned().collect()
        }
        WantedObject::OnlyNode => match of_kind(ObjectKind::Node).collect::<Vec<_>>().as_slice() {
            [only] => vec![Arc::clone(only)],
            _ => Vec::new(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::super::object::tests::objects;
    use super::super::server::tests::followed;
    use super::*;

    const CONFIG_MAP: &str = "{apiVersion: v1, kind: ConfigMap, metadata: {name: app}}";

    /// How many objects a pod of the API server and a static pod get, and whether podfs knows them all.
    fn answers(registry: &ObjectRegistry, want: &WantedObject) -> [(usize, bool); 2] {
        [false, true].map(|is_static| {
            let answer = registry.answer(want, is_static);
            (answer.objects.len(), answer.absence.is_none())
        })
    }

    #[tokio::test]
    async fn a_static_pod_waits_for_a_file_that_podfs_cannot_read_and_another_pod_takes_the_object_of_the_server() {
        let registry = ObjectRegistry::new(true, None);
        registry.take_files(Arc::default(), Some(Path::new("bad.yaml")));
        let want = WantedObject::Object(objects(CONFIG_MAP)[0].key().clone());
        registry.entries.insert(want.clone(), RegisteredObject { followed: Some(followed()), ..Default::default() });
        let update = |update| {
            let mut entry = registry.entries.get_mut(&want).expect("it was inserted");
            entry.followed.as_mut().expect("it is followed").take(TaskMessage::Update(update));
        };
        update(ObjectUpdate::Absent);
        assert_eq!(answers(&registry, &want), [(0, false), (0, false)]);
        update(ObjectUpdate::Is(Arc::new(objects(CONFIG_MAP))));
        assert_eq!(answers(&registry, &want), [(1, true), (0, false)]);
        registry.take_files(Arc::default(), None);
        assert_eq!(answers(&registry, &want), [(1, true), (1, true)]);
    }

    #[test]
    fn not_all_bundles_of_a_signer_are_known_while_podfs_cannot_read_a_file() {
        let bundle = "{apiVersion: certificates.k8s.io/v1beta1, kind: ClusterTrustBundle, metadata: {name: 'x.io:y:one'}, \
                      spec: {signerName: x.io/y, \
                      trustBundle: \"-----BEGIN CERTIFICATE-----\\nAAAA\\n-----END CERTIFICATE-----\"}}";
        let files: FileObjects = objects(bundle).into_iter().map(|object| (object.key().clone(), object)).collect();
        let (registry, files) = (ObjectRegistry::new(true, None), Arc::new(files));
        let want = WantedObject::BundlesOf("x.io/y".to_owned());
        registry.take_files(Arc::clone(&files), Some(Path::new("bad.yaml")));
        assert_eq!(answers(&registry, &want), [(1, false), (1, false)]);
        registry.take_files(files, None);
        assert_eq!(answers(&registry, &want), [(1, true), (1, true)]);
    }
}
