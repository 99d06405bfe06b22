//! Follows all objects that the volumes of one pod refer to, and makes the pushes for its supervisor.
//!
//! A follower sleeps until an object of its pod changes. It never polls, and a change of an object
//! costs nothing for pods that do not refer to it.

use std::collections::{BTreeMap, BTreeSet};
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use super::registry::ObjectRegistry;
use super::update::PodReferences;
use super::wanted::WantedObject;
use crate::binding::{ExtraReferences, further_references};
use crate::manifest::objects::{ObjectKey, ObjectKind, Objects};
use crate::manifest::pod::Pod;
use crate::manifest::tokens::Token;
use crate::manifest::{References, references};
use crate::node::backing::{Backing, PendingExpansion, backings, growing};
use crate::node::pod::{NodePod, PodOrigin};
use crate::source::{IssuedCredentials, ObjectRequest, ObjectUpdate, Push};
use crate::volume::{BundleKey, CredentialKey, Volume, VolumeSource};

/// How long the first push waits for objects, so that volumes need not come up one by one (the kubelet: 1 s, MG-07).
const FIRST_PUSH_DELAY: Duration = Duration::from_secs(1);
/// Why tokens are missing without an API server.
const NO_ISSUER: &str =
    "podfs node has no API server that issues tokens; give it one with --kubeconfig or --in-cluster";

/// The pushes for the supervisor of one pod. Dropping it ends the watches that no other pod needs.
pub struct ObjectFollower {
    registry: Arc<ObjectRegistry>,
    changed: Arc<Notify>,
    pod: NodePod,
    references: References,
    wants: BTreeSet<WantedObject>,
    /// The tokens that its volumes and their drivers need.
    wanted_tokens: BTreeSet<CredentialKey>,
    /// Its tokens, if there is a server that issues them.
    tokens: Option<IssuedCredentials>,
    /// When the follower was made.
    began: Instant,
    /// The references in the last push.
    sent: Option<PodReferences>,
}

impl ObjectFollower {
    pub(super) fn new(registry: Arc<ObjectRegistry>, pod: &NodePod) -> ObjectFollower {
        let mut follower = ObjectFollower {
            tokens: registry.tokens(),
            registry,
            changed: Arc::default(),
            pod: pod.clone(),
            references: references_of(pod),
            wanted_tokens: BTreeSet::new(),
            wants: BTreeSet::new(),
            began: Instant::now(),
            sent: None,
        };
        follower.subscribe();
        follower
    }

    /// Takes a changed pod of the source. The next push has the change.
    pub fn update(&mut self, pod: &NodePod) {
        self.pod = pod.clone();
        self.references = references_of(pod);
        self.subscribe();
        self.changed.notify_one();
    }

    /// Makes the next push complete: another supervisor serves the pod now, or the supervisor has missed a push.
    pub fn restart(&mut self) {
        self.sent = None;
        self.changed.notify_one();
    }

    /// The backings of the pod's volumes by name, and the claims whose volumes are about to grow, according to the
    /// objects of the last push.
    pub(in crate::node) fn backings_and_growing(&self) -> (BTreeMap<String, Backing>, BTreeSet<PendingExpansion>) {
        let leads_further = |volume: &Volume| matches!(volume.source, VolumeSource::Claim(_) | VolumeSource::Csi(_));
        let pod = &self.pod.pod;
        match &self.sent {
            Some(sent) if pod.volumes.iter().any(leads_further) => {
                let objects = sent.parsed();
                (backings(pod, &objects), growing(pod, &objects))
            }
            _ => Default::default(),
        }
    }

    /// Waits for the next push: at first of all objects, then of the changes. Cancel-safe.
    pub async fn next(&mut self) -> Push {
        loop {
            let (mut now, mut deadlines) = self.current_references();
            if let Some(before) = &self.sent {
                now.keep_missing_objects(before);
                now.limit(Some(before));
                if let Some(push) = now.since(before) {
                    self.sent = Some(now);
                    return push;
                }
            } else if deadlines.first.is_none_or(|until| until <= Instant::now()) {
                now.limit(None);
                let push = now.full_push();
                self.sent = Some(now);
                return push;
            } else {
                deadlines.settles = deadlines.first;
            }
            let token = async {
                match &mut self.tokens {
                    Some(tokens) => tokens.next().await,
                    None => pending().await,
                }
            };
            tokio::select! {
                () = self.changed.notified() => {}
                (key, update) = token => self.take_token(&key, update),
                () = until(deadlines.settles) => {}
            }
        }
    }

    /// The references and their objects at this moment.
    fn current_references(&mut self) -> (PodReferences, FollowerDeadlines) {
        self.subscribe();
        let (mut deadlines, mut is_answered) = (FollowerDeadlines { first: None, settles: None }, true);
        let mut view = PodReferences {
            pod: Arc::clone(&self.pod.manifest),
            objects: BTreeMap::new(),
            tokens: BTreeMap::new(),
            missing: BTreeMap::new(),
            missing_tokens: BTreeMap::new(),
            settling: false,
        };
        for want in &self.wants {
            let answer = self.registry.answer(want, is_static(&self.pod));
            view.objects.extend(answer.objects.into_iter().map(|object| (object.key().clone(), object)));
            is_answered &= answer.is_answered;
            let Some(absence) = answer.absence else { continue };
            deadlines.settles = deadlines.settles.max(absence.settles);
            view.missing.extend(want.missing().map(|missing| (missing, absence.reason)));
        }
        match &self.tokens {
            Some(tokens) => {
                is_answered &= tokens.are_answered();
                deadlines.settles = deadlines.settles.max(tokens.unanswered().filter_map(ObjectRequest::settles).max());
                for (key, token) in tokens.each() {
                    match token {
                        Ok(token) => drop(view.tokens.insert(key.clone(), Arc::clone(token))),
                        Err(reason) => drop(view.missing_tokens.insert(key.clone(), reason)),
                    }
                }
            }
            None => {
                let reason = |key: &CredentialKey| (key.clone(), NO_ISSUER.to_owned());
                view.missing_tokens.extend(self.wanted_tokens.iter().map(reason));
            }
        }
        deadlines.settles = deadlines.settles.filter(|settles| *settles > Instant::now());
        deadlines.first = (!is_answered).then_some(self.began + FIRST_PUSH_DELAY);
        view.settling = deadlines.settles.is_some();
        (view, deadlines)
    }

    fn want_tokens(&mut self, further: BTreeSet<CredentialKey>) {
        self.wanted_tokens = self.references.tokens.iter().cloned().chain(further).collect();
        if let Some(tokens) = &mut self.tokens {
            let forgotten = tokens.want(&self.wanted_tokens, &self.pod.pod.identity, &self.pod.pod.facts);
            forgotten.iter().for_each(|token| self.registry.forget_token(&of_pod(token, &self.pod)));
        }
    }

    fn take_token(&mut self, key: &CredentialKey, update: ObjectUpdate<Token>) {
        if let Some(tokens) = &mut self.tokens {
            if tokens.is_wanted(key) {
                self.registry.note_token(&of_pod(&tokens.title(key), &self.pod), &update);
            }
            tokens.take(key, update);
        }
    }

    /// Subscribes to the objects to which the pod refers, and to no others. A claim leads to its PersistentVolume.
    fn subscribe(&mut self) {
        let named = wants(&self.pod, &self.references, self.registry.readers().is_some());
        // An object that podfs knows already may refer to more objects.
        loop {
            let ExtraReferences { objects, tokens } = self.further_references(&named);
            self.want_tokens(tokens);
            let wants: BTreeSet<WantedObject> =
                named.iter().cloned().chain(objects.into_iter().map(WantedObject::Object)).collect();
            if wants == self.wants {
                return;
            }
            for want in wants.difference(&self.wants) {
                self.registry.subscribe(want, &self.changed);
            }
            for want in self.wants.difference(&wants) {
                self.registry.unsubscribe(want, &self.changed);
            }
            self.wants = wants;
        }
    }

    /// The references that known objects add to those of the volumes.
    fn further_references(&self, named: &BTreeSet<WantedObject>) -> ExtraReferences {
        let answers = named.union(&self.wants).map(|want| self.registry.answer(want, is_static(&self.pod)));
        let parsed = answers.flat_map(|answer| answer.objects).map(|object| Arc::clone(&object.parsed));
        let known = Objects::default().with(parsed);
        let Pod { volumes, identity, facts, .. } = &*self.pod.pod;
        further_references(volumes, identity, facts, &known)
    }
}

impl Drop for ObjectFollower {
    fn drop(&mut self) {
        if let Some(tokens) = &self.tokens {
            tokens.each().for_each(|(key, _)| self.registry.forget_token(&of_pod(&tokens.title(key), &self.pod)));
        }
        self.wants.iter().for_each(|want| self.registry.unsubscribe(want, &self.changed));
    }
}

/// How long to wait without a change.
struct FollowerDeadlines {
    /// When the first push no longer waits for sources that have not answered.
    first: Option<Instant>,
    /// When podfs reports unknown objects as a problem.
    settles: Option<Instant>,
}

/// The title of a token of the pod in the log.
fn of_pod(token: &str, pod: &NodePod) -> String {
    format!("{token} of pod {}", pod.pod.identity)
}

fn is_static(pod: &NodePod) -> bool {
    matches!(pod.origin, PodOrigin::File(_))
}

fn references_of(pod: &NodePod) -> References {
    references(&pod.pod.volumes, &pod.pod.identity, &pod.pod.facts)
}

/// The references of the pod by name. Objects of another namespace are never among them (SE-03). If podfs serves only
/// volumes that the kubelet has published, and `reads_as_pods`, it reads ConfigMaps and Secrets with the pod's token.
fn wants(pod: &NodePod, references: &References, reads_as_pods: bool) -> BTreeSet<WantedObject> {
    let identity = &pod.pod.identity;
    let is_read_as_pod = reads_as_pods && pod.origin == PodOrigin::Kubelet;
    let want = |key: ObjectKey| match key.kind {
        ObjectKind::ConfigMap | ObjectKind::Secret if is_read_as_pod => WantedObject::AsPod(identity.uid.clone(), key),
        _ => WantedObject::Object(key),
    };
    let of = |kind: ObjectKind, names: &BTreeSet<String>| {
        names.iter().map(|name| want(key(kind, &identity.namespace, name))).collect::<Vec<_>>()
    };
    let mut wants = BTreeSet::new();
    wants.extend(of(ObjectKind::ConfigMap, &references.config_maps));
    wants.extend(of(ObjectKind::Secret, &references.secrets));
    wants.extend(of(ObjectKind::PersistentVolumeClaim, &references.claims));
    wants.extend(references.bundles.iter().filter_map(|bundle| match bundle {
        BundleKey::Named(name) => Some(WantedObject::Object(key(ObjectKind::ClusterTrustBundle, "", name))),
        // A source that selects nothing of a signer needs no bundles.
        BundleKey::OfSigner { selector: None, .. } => None,
        BundleKey::OfSigner { signer, .. } => Some(WantedObject::BundlesOf(signer.clone())),
    }));
    if references.node {
        let node = pod.pod.facts.node_name.as_deref();
        wants.insert(node.map_or(WantedObject::OnlyNode, |node| WantedObject::Object(key(ObjectKind::Node, "", node))));
    }
    wants
}

fn key(kind: ObjectKind, namespace: &str, name: &str) -> ObjectKey {
    ObjectKey { kind, namespace: namespace.to_owned(), name: name.to_owned() }
}

async fn until(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => pending().await,
    }
}
