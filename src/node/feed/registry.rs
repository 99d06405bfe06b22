//! Which pods refer to which objects, and what is known of each object, for all pods of the node.
//!
//! An object comes from the manifest files, or else from the API server. Files win: podfs does not ask the server for an object
//! that they describe. An entry exists as long as a pod refers to its object; the watch ends with it (MG-01).
//!
//! Locks, and why no change is missed:
//!
//! 1. `files` is held for the copy of a pointer. An entry of `entries` may be locked while `files` is locked for that, never
//!    the other way round. Neither is held over an `await`.
//! 2. Files are replaced first, and then the entries of what differs are visited. A pod that begins to refer to an object reads
//!    the files with the entry locked: it sees the new files, or its entry is visited.
//! 3. A question is asked, given up and answered with its entry locked. It has a number, by which the registry ignores the answer
//!    of a task that was given up.
//! 4. A follower is notified after the entry has changed, and reads entries after it was notified. A notification that comes
//!    while it reads makes it read again.

use std::collections::BTreeSet;
use std::sync::{Arc, RwLock, Weak};

use dashmap::DashMap;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::directory::FileObjects;
use super::object::WholeObject;
use super::readers::PodReaders;
use super::server::{Asked, ObjectServer, Said};
use crate::manifest::objects::{Missing, ObjectKey, ObjectKind};
use crate::manifest::pod::PodUid;
use crate::manifest::tokens::Token;
use crate::source::{IssuedCredentials, ObjectUpdate, SETTLE};

/// What a pod refers to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Want {
    /// An object.
    Object(ObjectKey),
    /// An object, as the service account of the pod may read it.
    AsPod(PodUid, ObjectKey),
    /// All ClusterTrustBundles of a signer.
    BundlesOf(String),
    /// The only Node there is: that of a pod which is on no node by name.
    OnlyNode,
}

/// What is known of it.
pub(super) struct PodAnswer {
    pub(super) objects: Vec<Arc<WholeObject>>,
    /// Why it is not known, if it is not.
    pub(super) absence: Option<Absence>,
    /// Whether it is worth while to wait for a better answer.
    pub(super) is_answered: bool,
}

/// Why nothing is known of an object.
pub(super) struct Absence {
    pub(super) reason: String,
    /// Until when that is no problem.
    pub(super) settles: Option<Instant>,
}

/// The state of an object, and the followers that are notified of changes.
pub(super) struct Registry {
    me: Weak<Registry>,
    server: Option<ObjectServer>,
    entries: DashMap<Want, RegisteredPod>,
    files: RwLock<FilesKnown>,
}

/// The objects of the manifest files.
#[derive(Clone)]
enum FilesKnown {
    /// They have not been read.
    NotYet {
        since: Instant,
    },
    Are(Arc<FileObjects>),
}

#[derive(Default)]
struct RegisteredPod {
    followers: Vec<Arc<Notify>>,
    /// What the API server was asked, if it is.
    asked: Option<Asked>,
}

impl Registry {
    /// Nothing refers to anything. `has_files` says whether there are manifest files to be read.
    pub(super) fn new(has_files: bool, server: Option<ObjectServer>) -> Arc<Registry> {
        let files = match has_files {
            true => FilesKnown::NotYet { since: Instant::now() },
            false => FilesKnown::Are(Arc::default()),
        };
        Arc::new_cyclic(|me| Registry {
            me: Weak::clone(me),
            server,
            entries: DashMap::new(),
            files: RwLock::new(files),
        })
    }

    /// These are the objects of the manifest files now.
    pub(super) fn take_files(&self, objects: Arc<FileObjects>) {
        let before = {
            let mut files = self.files.write().expect("no code panics while it is locked");
            std::mem::replace(&mut *files, FilesKnown::Are(Arc::clone(&objects)))
        };
        let FilesKnown::Are(before) = before else {
            return self.entries.iter_mut().for_each(|mut entry| {
                let (want, entry) = entry.pair_mut();
                self.ask(want, entry);
                entry.notify();
            });
        };
        let differs = |(key, object): &(&ObjectKey, &Arc<WholeObject>)| {
            before.get(*key).is_none_or(|known| !Arc::ptr_eq(known, object))
        };
        let gone = before.iter().filter(|(key, _)| !objects.contains_key(key));
        let changed: BTreeSet<Want> =
            objects.iter().filter(differs).chain(gone).flat_map(|(_, object)| wants_of(object)).collect();
        for mut entry in self.entries.iter_mut().filter(|entry| entry.key().is_one_of(&changed)) {
            let (want, entry) = entry.pair_mut();
            self.ask(want, entry);
            entry.notify();
        }
    }

    /// A task says this about the question of that number.
    pub(super) fn take(&self, want: &Want, question: u64, said: Said) {
        if let (Some(server), Said::Told(told)) = (&self.server, &said) {
            server.note(&want.title(), told);
        }
        if let Some(mut entry) = self.entries.get_mut(want)
            && let Some(asked) = entry.asked.as_mut().filter(|asked| asked.is(question))
            && asked.take(said)
        {
            entry.notify();
        }
    }

    /// This follower's pod refers to it from now on. An object that could not change any more is asked for again: it may have
    /// been made anew since.
    pub(super) fn subscribe(&self, want: &Want, follower: &Arc<Notify>) {
        let mut entry = self.entries.entry(want.clone()).or_default();
        entry.followers.push(Arc::clone(follower));
        self.ask(want, &mut entry);
    }

    /// This follower's pod no longer refers to it.
    pub(super) fn unsubscribe(&self, want: &Want, follower: &Arc<Notify>) {
        let gone = self.entries.remove_if_mut(want, |_, entry| {
            entry.followers.retain(|other| !Arc::ptr_eq(other, follower));
            entry.followers.is_empty()
        });
        if let (Some(_), Some(server)) = (gone, &self.server) {
            server.forget(want);
        }
    }

    /// What is known of something that was subscribed to.
    pub(super) fn answer(&self, want: &Want) -> PodAnswer {
        let mut objects = match self.files() {
            FilesKnown::Are(files) => of_files(&files, want),
            FilesKnown::NotYet { since } => {
                let reason = format!("{}: the manifest directory was not read yet", want.title());
                let absence = Absence { reason, settles: Some(since + SETTLE) };
                return PodAnswer { objects: Vec::new(), absence: Some(absence), is_answered: false };
            }
        };
        let entry = self.entries.get(want);
        let Some(asked) = entry.as_ref().and_then(|entry| entry.asked.as_ref()) else {
            return PodAnswer { objects, absence: None, is_answered: true };
        };
        // Those of files win, and come last here.
        objects.splice(0..0, asked.objects().iter().cloned());
        PodAnswer { objects, absence: asked.absence(want), is_answered: asked.is_answered() }
    }

    /// What reads objects as pods, if pods are to read their own.
    pub(super) fn readers(&self) -> Option<&PodReaders> {
        self.server.as_ref()?.readers()
    }

    /// Tokens of a pod, if a server issues them.
    pub(super) fn tokens(&self) -> Option<IssuedCredentials> {
        self.server.as_ref().map(ObjectServer::tokens)
    }

    /// Logs a problem of a token, or its end.
    pub(super) fn note_token(&self, title: &str, told: &ObjectUpdate<Token>) {
        if let Some(server) = &self.server {
            server.note_token(title, told);
        }
    }

    /// No pod has this token any more.
    pub(super) fn forget_token(&self, title: &str) {
        if let Some(server) = &self.server {
            server.forget_token(title);
        }
    }

    /// Asks the server about what is not in files, or gives up to ask. What files say is known before anything is asked.
    fn ask(&self, want: &Want, entry: &mut RegisteredPod) {
        let (Some(server), FilesKnown::Are(files)) = (&self.server, self.files()) else { return };
        if matches!(want, Want::Object(key) | Want::AsPod(_, key) if files.contains_key(key)) {
            entry.asked = None;
        } else if entry.asked.as_ref().is_none_or(Asked::is_settled) {
            entry.asked = server.ask(want, &self.me, entry.asked.take());
        }
    }

    /// How many objects are followed, and for how many pods.
    #[cfg(test)]
    pub(super) fn subscriptions(&self) -> (usize, usize) {
        (self.entries.len(), self.entries.iter().map(|entry| entry.followers.len()).sum())
    }

    fn files(&self) -> FilesKnown {
        self.files.read().expect("no code panics while it is locked").clone()
    }
}

impl RegisteredPod {
    fn notify(&self) {
        self.followers.iter().for_each(|follower| follower.notify_one());
    }
}

impl Want {
    /// What it is where nothing is known of it; the only Node has no name that it could be missed by.
    pub(super) fn missing(&self) -> Option<Missing> {
        match self {
            Want::Object(key) | Want::AsPod(_, key) => Some(Missing::Object(key.clone())),
            Want::BundlesOf(signer) => Some(Missing::BundlesOf(signer.clone())),
            Want::OnlyNode => None,
        }
    }

    /// Whether it is among these, which no pod reads by itself.
    fn is_one_of(&self, wants: &BTreeSet<Want>) -> bool {
        match self {
            Want::AsPod(_, key) => wants.contains(&Want::Object(key.clone())),
            other => wants.contains(other),
        }
    }
}

/// What is referred to by those that refer to this object.
fn wants_of(object: &Arc<WholeObject>) -> impl Iterator<Item = Want> {
    let signer = object.parsed.trust_bundle().and_then(|bundle| bundle.signer.clone());
    let only_node = (object.key().kind == ObjectKind::Node).then_some(Want::OnlyNode);
    [Want::Object(object.key().clone())].into_iter().chain(signer.map(Want::BundlesOf)).chain(only_node)
}

fn of_files(files: &FileObjects, want: &Want) -> Vec<Arc<WholeObject>> {
    let of_kind = |kind: ObjectKind| {
        let first = ObjectKey { kind, namespace: String::new(), name: String::new() };
        files.range(first..).take_while(move |(key, _)| key.kind == kind).map(|(_, object)| object)
    };
    match want {
        Want::Object(key) | Want::AsPod(_, key) => files.get(key).cloned().into_iter().collect(),
        Want::BundlesOf(signer) => {
            let is_of_signer = |object: &&Arc<WholeObject>| {
                object.parsed.trust_bundle().is_some_and(|bundle| bundle.signer.as_deref() == Some(signer))
            };
            of_kind(ObjectKind::ClusterTrustBundle).filter(is_of_signer).cloned().collect()
        }
        Want::OnlyNode => match of_kind(ObjectKind::Node).collect::<Vec<_>>().as_slice() {
            [only] => vec![Arc::clone(only)],
            _ => Vec::new(),
        },
    }
}
