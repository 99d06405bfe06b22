//! Makes snapshots of the pod and of the objects that its volumes refer to. Each change leads to another snapshot at once.
//!
//! Files win: podfs does not request objects of manifest files from the server. An object that is not known yet, or that
//! podfs may not read, is absent with a reason; an object that does not exist is absent without a reason.

use std::collections::{BTreeMap, BTreeSet};
use std::future::pending;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use tokio::sync::mpsc::{Receiver, Sender, UnboundedReceiver, channel};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout_at};
use tracing::{debug, info};

use super::TokenPolicy;
use super::bundles::{Bundles, Signers, title_of_signer};
use super::contacts::Contacts;
use super::object_request::ObjectRequest;
use super::problem_log::ProblemLog;
use super::single::{AbortOnDrop, ObjectUpdate, follow_object, follow_pod};
use super::tokens::IssuedCredentials;
use crate::binding::{ExtraReferences, further_references};
use crate::kube::client::ApiClient;
use crate::manifest::objects::{Missing, NamedObject, ObjectKey, ObjectKind, Objects};
use crate::manifest::pod::{Pod, PodFacts, PodIdentity};
use crate::manifest::tokens::Token;
use crate::manifest::{KnownObjects, References, references};
use crate::source::Snapshot;
use crate::source::files::FileSource;
use crate::volume::{BundleKey, CredentialKey, Volume};

/// How long the first snapshot waits for objects, so that podfs need not mount volumes one by one. A server usually answers
/// in much less.
const FIRST_SNAPSHOT_DELAY: Duration = Duration::from_millis(300);
const QUEUE_LENGTH: usize = 64;

/// The followed pod and objects.
pub(super) struct Follow {
    client: ApiClient,
    files: Option<(FileSource, Snapshot)>,
    pod: Option<Arc<Pod>>,
    /// The pod that podfs serves, if manifest files describe it: a file that changes later changes neither its name nor its volumes.
    identity: Option<PodIdentity>,
    /// The volumes that podfs serves, if they are not those of the pod on the server.
    volumes: Option<Vec<Volume>>,
    /// Other volumes that podfs serves from now on.
    served: UnboundedReceiver<VolumesToFollow>,
    objects: BTreeMap<ObjectKey, Followed>,
    signers: Signers,
    tokens: IssuedCredentials,
    /// Tokens that stay empty, because podfs does not request them.
    unissued: BTreeSet<CredentialKey>,
    token_policy: TokenPolicy,
    contacts: Contacts,
    /// The channel from the tasks that follow objects.
    sender: Sender<(ObjectKey, ObjectUpdate<NamedObject>)>,
    updates: Receiver<(ObjectKey, ObjectUpdate<NamedObject>)>,
    pods: Option<(Receiver<ObjectUpdate<Pod>>, AbortOnDrop)>,
    /// Objects of which podfs has logged that they come from files.
    of_files: BTreeSet<ObjectKey>,
    problem_log: ProblemLog,
}

struct Followed {
    known: KnownObject,
    request: ObjectRequest,
    _task: AbortOnDrop,
}

enum KnownObject {
    NotYet,
    Absent,
    Is(Arc<NamedObject>),
}

/// The volumes that podfs serves, and the channel for the snapshot that takes their objects into account.
pub(super) struct VolumesToFollow {
    pub(super) volumes: Vec<Volume>,
    pub(super) answer: mpsc::Sender<Snapshot>,
}

/// An input of the thread.
enum FollowInput {
    Served(VolumesToFollow),
    Files(Snapshot),
    Pod(ObjectUpdate<Pod>),
    Object(ObjectKey, ObjectUpdate<NamedObject>),
    Signer(String, ObjectUpdate<Bundles>),
    Token(CredentialKey, ObjectUpdate<Token>),
    /// From now on, missing answers of the server are problems.
    Settled,
    /// A line of the problem log is due.
    LogDue,
}

impl FollowInput {
    /// When the input arrived; for files, when the thread that watches them received the event of the change.
    fn noticed_at(&self) -> Option<std::time::Instant> {
        match self {
            FollowInput::Files(snapshot) => snapshot.noticed_at,
            _ => Some(Instant::now().into_std()),
        }
    }
}

impl Follow {
    pub(super) fn new(
        client: ApiClient,
        files: Option<(FileSource, Snapshot)>,
        volumes: Option<Vec<Volume>>,
        served: UnboundedReceiver<VolumesToFollow>,
        token_policy: TokenPolicy,
        contacts: Contacts,
    ) -> Follow {
        let pod = files.as_ref().and_then(|(_, snapshot)| snapshot.pod.clone());
        let identity = pod.as_ref().map(|pod| pod.identity.clone());
        let volumes = volumes.or_else(|| pod.as_ref().map(|pod| pod.volumes.clone()));
        let (sender, updates) = channel(QUEUE_LENGTH);
        Follow {
            signers: Signers::new(client.clone(), contacts.clone()),
            tokens: IssuedCredentials::new(client.clone(), contacts.clone()),
            unissued: BTreeSet::new(),
            token_policy,
            client,
            files,
            pod,
            identity,
            volumes,
            served,
            objects: BTreeMap::new(),
            contacts,
            sender,
            updates,
            pods: None,
            of_files: BTreeSet::new(),
            problem_log: ProblemLog::default(),
        }
    }

    /// Follows this pod of the server.
    pub(super) fn with_pod(mut self, pod: Pod, follower: crate::kube::follower::Follower) -> Follow {
        let (sender, updates) = channel(QUEUE_LENGTH);
        let uid = pod.identity.uid.as_str().to_owned();
        let title = format!("Pod {}", pod.identity);
        let task = AbortOnDrop::spawn(follow_pod(follower, uid, title, self.contacts.clone(), sender));
        self.pod = Some(Arc::new(pod));
        self.pods = Some((updates, task));
        self
    }

    /// The first snapshot, after a short wait for answers.
    pub(super) async fn first_snapshot(&mut self) -> Snapshot {
        self.follow_missing_objects();
        let deadline = Instant::now() + FIRST_SNAPSHOT_DELAY;
        while !self.is_answered() {
            let Ok(input) = timeout_at(deadline, self.next()).await else { break };
            self.take(input);
        }
        self.snapshot()
    }

    fn is_answered(&self) -> bool {
        let is_answered =
            |object: &Followed| !matches!(object.known, KnownObject::NotYet) || object.request.trouble.is_some();
        self.objects.values().all(is_answered) && self.signers.are_answered() && self.tokens.are_answered()
    }

    /// Publishes a snapshot after each change, until the receiver is gone.
    pub(super) async fn publish(mut self, snapshots: watch::Sender<Snapshot>) {
        loop {
            let input = tokio::select! {
                input = self.next() => input,
                () = snapshots.closed() => return,
            };
            let noticed_at = input.noticed_at();
            let answer = match &input {
                FollowInput::Served(VolumesToFollow { answer, .. }) => Some(answer.clone()),
                _ => None,
            };
            let mut differs = self.take(input);
            // Objects in the queue go into the same snapshot.
            while let Ok((key, update)) = self.updates.try_recv() {
                differs |= self.take(FollowInput::Object(key, update));
            }
            if differs {
                snapshots.send_replace(Snapshot { noticed_at, ..self.snapshot() });
            }
            if let Some(answer) = answer {
                // Fails only if the receiver no longer waits.
                let _ = answer.send(self.snapshot());
            }
        }
    }

    /// Until when missing answers to recent requests are no problem.
    fn settles(&self) -> Option<Instant> {
        let unknown = self.objects.values().filter(|object| matches!(object.known, KnownObject::NotYet));
        let unknown = unknown.map(|object| &object.request);
        let unknown = unknown.chain(self.signers.unanswered()).chain(self.tokens.unanswered());
        let now = Instant::now();
        unknown.filter_map(ObjectRequest::settles).filter(|settles| *settles > now).max()
    }

    /// Cancel-safe.
    async fn next(&mut self) -> FollowInput {
        let (settled, log_due) = (until(self.settles()), until(self.problem_log.due()));
        let files = async {
            match &mut self.files {
                Some((files, _)) => files.changed().await,
                None => pending().await,
            }
        };
        let pod = async {
            match &mut self.pods {
                Some((updates, _)) => updates.recv().await,
                None => pending().await,
            }
        };
        tokio::select! {
            Some(served) = self.served.recv() => FollowInput::Served(served),
            snapshot = files => FollowInput::Files(snapshot),
            Some(update) = pod => FollowInput::Pod(update),
            Some((key, update)) = self.updates.recv() => FollowInput::Object(key, update),
            (signer, update) = self.signers.next() => FollowInput::Signer(signer, update),
            (key, update) = self.tokens.next() => FollowInput::Token(key, update),
            () = settled => FollowInput::Settled,
            () = log_due => FollowInput::LogDue,
        }
    }

    /// Takes an input. Returns whether the snapshot has changed.
    fn take(&mut self, input: FollowInput) -> bool {
        let differs = match input {
            FollowInput::Served(served) => {
                self.volumes = Some(served.volumes);
                true
            }
            FollowInput::Files(snapshot) => self.take_files(snapshot),
            FollowInput::Pod(update) => self.take_pod(update),
            FollowInput::Object(key, update) => self.take_object(&key, update),
            FollowInput::Signer(signer, update) => {
                if self.signers.is_wanted(&signer) {
                    self.problem_log.note(&title_of_signer(&signer), &update);
                }
                self.signers.take(&signer, update)
            }
            FollowInput::Token(key, update) => {
                if self.tokens.is_wanted(&key) {
                    self.problem_log.note_token(&self.tokens.title(&key), &update);
                }
                self.tokens.take(&key, update)
            }
            FollowInput::Settled => true,
            FollowInput::LogDue => {
                self.problem_log.log(Instant::now());
                false
            }
        };
        if differs {
            self.follow_missing_objects();
        }
        differs
    }

    fn take_files(&mut self, snapshot: Snapshot) -> bool {
        if self.pods.is_none() {
            self.pod = snapshot.pod.clone().or(self.pod.take());
        }
        if let Some((_, known)) = &mut self.files {
            *known = snapshot;
        }
        true
    }

    fn take_pod(&mut self, update: ObjectUpdate<Pod>) -> bool {
        let title = self.pod.as_ref().map_or_else(String::new, |pod| format!("Pod {}", pod.identity));
        self.problem_log.note(&title, &update);
        match update {
            ObjectUpdate::Is(pod) => {
                self.contacts.pod_is_there(true);
                let differs = self.pod.as_ref() != Some(&pod);
                self.pod = Some(pod);
                differs
            }
            ObjectUpdate::Absent => {
                self.contacts.pod_is_there(false);
                info!("the pod is gone from the API server; its volumes stay as they are until podfs is stopped");
                false
            }
            ObjectUpdate::Alive | ObjectUpdate::Failure(_) => false,
        }
    }

    fn take_object(&mut self, key: &ObjectKey, update: ObjectUpdate<NamedObject>) -> bool {
        // A task that was aborted may have sent an update before.
        if !self.objects.contains_key(key) {
            return false;
        }
        self.problem_log.note(&key.to_string(), &update);
        let Some(followed) = self.objects.get_mut(key) else { return false };
        let had_trouble = followed.request.trouble.take().is_some();
        let unknown = matches!(followed.known, KnownObject::NotYet);
        match update {
            ObjectUpdate::Is(object) => {
                let same = matches!(&followed.known, KnownObject::Is(known) if *known == object);
                followed.known = KnownObject::Is(object);
                !same
            }
            ObjectUpdate::Absent => {
                let same = matches!(followed.known, KnownObject::Absent);
                if matches!(followed.known, KnownObject::Is(_)) {
                    info!("{key} was deleted");
                }
                followed.known = KnownObject::Absent;
                !same
            }
            ObjectUpdate::Alive => unknown && had_trouble,
            ObjectUpdate::Failure(error) => {
                followed.request.trouble = Some(error);
                unknown
            }
        }
    }

    /// Follows exactly the referenced objects that files do not have.
    fn follow_missing_objects(&mut self) {
        let wanted = self.wanted();
        let (contacts, problem_log) = (&self.contacts, &mut self.problem_log);
        self.objects.retain(|key, _| {
            let keep = wanted.contains(key);
            if !keep {
                contacts.forget(&key.to_string());
                problem_log.forget(&key.to_string());
            }
            keep
        });
        for key in wanted {
            if self.objects.contains_key(&key) {
                continue;
            }
            debug!("podfs requests {key}");
            let follow = follow_object(self.client.clone(), key.clone(), self.contacts.clone(), self.sender.clone());
            let followed = Followed {
                known: KnownObject::NotYet,
                request: ObjectRequest::new(),
                _task: AbortOnDrop::spawn(follow),
            };
            self.objects.insert(key, followed);
        }
    }

    /// The referenced objects that files do not have. Begins to request the referenced tokens and bundles of signers.
    fn wanted(&mut self) -> BTreeSet<ObjectKey> {
        let (identity, facts) = match &self.pod {
            Some(pod) => (self.identity.as_ref().unwrap_or(&pod.identity).clone(), pod.facts.clone()),
            None => (PodIdentity::placeholder(), PodFacts::placeholder()),
        };
        let of_pod = || self.pod.as_ref().map_or(&[][..], |pod| &pod.volumes);
        let volumes = self.volumes.as_deref().unwrap_or_else(of_pod);
        let references = references(volumes, &identity, &facts);
        let mut forgotten = self.signers.want(&signers(&references));
        let ExtraReferences { objects, tokens } = further_references(volumes, &identity, &facts, &self.known_objects());
        let tokens: BTreeSet<CredentialKey> = references.tokens.iter().cloned().chain(tokens).collect();
        match self.token_policy {
            TokenPolicy::Issued => forgotten.extend(self.tokens.want(&tokens, &identity, &facts)),
            TokenPolicy::Empty => self.unissued = tokens,
        }
        forgotten.iter().for_each(|title| self.problem_log.forget(title));
        let mut wanted = keys(&references, &identity.namespace);
        wanted.extend(objects);
        if references.node {
            wanted.extend(facts.node_name.as_deref().map(|node| key(ObjectKind::Node, "", node)));
        }
        wanted.retain(|key| {
            let in_files = self.files.as_ref().is_some_and(|(_, files)| files.known.objects.contains(key));
            if in_files && self.of_files.insert(key.clone()) {
                info!("podfs takes {key} from the manifest files, and not from the API server");
            }
            !in_files
        });
        wanted
    }

    fn known_objects(&self) -> Objects {
        let of_files = self.files.as_ref().map(|(_, files)| files.known.objects.clone()).unwrap_or_default();
        let of_server = self.objects.values().filter_map(|object| match &object.known {
            KnownObject::Is(object) => Some(object),
            KnownObject::NotYet | KnownObject::Absent => None,
        });
        of_files.with(of_server.chain(self.signers.bundles()).cloned())
    }

    fn snapshot(&self) -> Snapshot {
        let absences = self.objects.iter().filter_map(|(key, object)| match object.known {
            KnownObject::NotYet => Some((Missing::Object(key.clone()), object.request.why(&key.to_string()))),
            KnownObject::Absent | KnownObject::Is(_) => None,
        });
        let absences = absences.chain(self.signers.absences());
        let known = KnownObjects {
            objects: self.known_objects().with_absences(absences),
            tokens: match self.token_policy {
                TokenPolicy::Issued => self.tokens.tokens(),
                TokenPolicy::Empty => self.unissued.iter().map(|key| (key.clone(), Ok(Vec::new()))).collect(),
            },
            is_settling: self.settles().is_some(),
        };
        Snapshot { pod: self.pod.clone(), known, noticed_at: None }
    }
}

async fn until(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => pending().await,
    }
}

/// The objects of the pod's namespace that volumes refer to by name.
fn keys(references: &References, namespace: &str) -> BTreeSet<ObjectKey> {
    let of = |kind: ObjectKind, names: &BTreeSet<String>| {
        names.iter().map(|name| key(kind, namespace, name)).collect::<Vec<_>>()
    };
    let mut keys = BTreeSet::new();
    keys.extend(of(ObjectKind::ConfigMap, &references.config_maps));
    keys.extend(of(ObjectKind::Secret, &references.secrets));
    keys.extend(of(ObjectKind::PersistentVolumeClaim, &references.claims));
    keys.extend(references.bundles.iter().filter_map(|bundle| match bundle {
        BundleKey::Named(name) => Some(key(ObjectKind::ClusterTrustBundle, "", name)),
        BundleKey::OfSigner { .. } => None,
    }));
    keys
}

/// The signers of referenced bundles. A source that selects nothing of a signer needs no bundles.
fn signers(references: &References) -> BTreeSet<&str> {
    let named = references.bundles.iter().filter_map(|bundle| match bundle {
        BundleKey::OfSigner { signer, selector: Some(_) } => Some(signer.as_str()),
        BundleKey::OfSigner { .. } | BundleKey::Named(_) => None,
    });
    named.collect()
}

fn key(kind: ObjectKind, namespace: &str, name: &str) -> ObjectKey {
    ObjectKey { kind, namespace: namespace.to_owned(), name: name.to_owned() }
}
