//! Objects that an agent of the node pushes: it reads them from the API server for all pods, so that no pod needs a
//! connection of its own.
//!
//! [`FileSource`] reads the pod manifest and objects in files, which take precedence over pushed objects. All other objects come
//! through the [`PushReceiver`], to which the control socket passes each push.
//!
//! 1. podfs takes a push as a whole or not at all: the receiver parses and checks all of it, and then publishes it in one step.
//! 2. Before the first push it is unknown which objects exist: volumes wait, also for optional objects. After it, objects that
//!    were not pushed do not exist. For the first two seconds, podfs does not report a missing push as a problem.
//! 3. Pushed objects are only in the memory of this supervisor. When another supervisor adopts the pod, volumes keep the content
//!    that they show, and wait for the next push.
//! 4. The agent knows the API server's state: an immutable object that it pushes with other content was deleted and created
//!    again meanwhile.

mod certificate;
mod inbox;
mod message;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch::Receiver;
use tokio::time::{Instant, sleep_until};

use super::{FileSource, Snapshot};
use crate::binding::further_references;
use crate::manifest::Tokens;
use crate::manifest::objects::{Missing, ObjectKey, ObjectKind};
use crate::manifest::pod::{Pod, PodIdentity};
use crate::manifest::{KnownObjects, References, references};
use crate::volume::{BundleKey, Volume};
use inbox::PushedObjects;

pub use certificate::Certificate;
pub(crate) use certificate::PodCertificate;
pub use inbox::PushReceiver;
pub use message::{DeletedObject, Push, PushCounts, PushError, UnknownObject};

/// Why a token is missing.
const NO_TOKEN: &str = "it was not pushed; podfs push takes a TokenRequest with the answer of the API server";

/// How long the first push may take before podfs reports a problem. An agent that starts podfs pushes at once.
const FIRST_PUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// A pod and objects in files, and the objects that an agent pushes.
pub struct PushSource {
    files: FileSource,
    /// The last snapshot of the files.
    of_files: Snapshot,
    pod: Arc<Pod>,
    volumes: Vec<Volume>,
    /// A manifest that is newer than the files.
    published: Option<Arc<Pod>>,
    pushed: Receiver<PushedObjects>,
    inbox: PushReceiver,
    /// Until when a missing first push is no problem; `None` after that.
    settles: Option<Instant>,
}

impl PushSource {
    /// Starts with the files' snapshot of this pod. Nothing is pushed yet.
    pub fn new(files: FileSource, of_files: Snapshot, pod: Arc<Pod>) -> (PushSource, Snapshot) {
        let (inbox, pushed) = PushReceiver::new(pod.identity.clone());
        let volumes = pod.volumes.clone();
        let settles = Some(Instant::now() + FIRST_PUSH_TIMEOUT);
        let source = PushSource { files, of_files, pod, volumes, published: None, pushed, inbox, settles };
        let snapshot = source.snapshot();
        (source, snapshot)
    }

    /// The inbox for pushes.
    pub fn inbox(&self) -> PushReceiver {
        self.inbox.clone()
    }

    /// Why a podfs that started now would refuse the files.
    pub(super) fn start_problem(&self) -> Option<String> {
        self.files.start_problem().sentence()
    }

    /// The pod that a podfs that started now would read from the files.
    pub(super) fn manifest(&self) -> Option<Arc<Pod>> {
        self.files.manifest().pod()
    }

    /// Sets the manifest of the pod, until the files change.
    pub fn publish(&mut self, pod: &Arc<Pod>) {
        self.published = Some(Arc::clone(pod));
    }

    /// Sets the pod's volumes.
    pub fn want(&mut self, volumes: Vec<Volume>) -> Snapshot {
        self.volumes = volumes;
        Snapshot { noticed_at: None, ..self.snapshot() }
    }

    /// Waits for the next snapshot, after files have changed or something was pushed. Cancel-safe.
    pub async fn changed(&mut self) -> Snapshot {
        tokio::select! {
            of_files = self.files.changed() => {
                self.of_files = of_files;
                self.published = None;
                Snapshot { noticed_at: self.of_files.noticed_at, ..self.snapshot() }
            }
            pushed = self.pushed.changed() => {
                pushed.expect("`self.inbox` keeps the channel open");
                self.settles = None;
                Snapshot { noticed_at: self.pushed.borrow().noticed_at, ..self.snapshot() }
            }
            () = sleep_until(self.settles.unwrap_or_else(Instant::now)), if self.settles.is_some() => {
                self.settles = None;
                self.snapshot()
            }
        }
    }

    fn snapshot(&self) -> Snapshot {
        let known = self.pushed.borrow();
        let manifest = self.published.as_ref().or(self.of_files.pod.as_ref());
        let mut pod = Arc::clone(manifest.unwrap_or(&self.pod));
        if let Some(pushed) = &known.pod {
            Arc::make_mut(&mut pod).facts = pushed.facts.clone();
        }
        let references = references(&self.volumes, &self.pod.identity, &pod.facts);
        let objects = self.of_files.known.objects.clone().with(known.objects.values().cloned());
        let objects = match known.began {
            true => objects.with_absences(known.missing.iter().cloned()),
            false => objects.with_absences(unknown(&references, &pod.identity, pod.facts.node_name.as_deref())),
        };
        let why = |key| known.missing_tokens.get(key).cloned().unwrap_or_else(|| NO_TOKEN.to_owned());
        let token = |key| known.tokens.get(key).cloned().ok_or_else(|| why(key));
        let further = further_references(&self.volumes, &self.pod.identity, &pod.facts, &objects).tokens;
        let tokens: Tokens = references.tokens.iter().chain(&further).map(|key| (key.clone(), token(key))).collect();
        Snapshot {
            pod: Some(pod),
            known: KnownObjects {
                objects,
                tokens,
                is_settling: known.settling || (!known.began && self.settles.is_some()),
            },
            noticed_at: None,
        }
    }
}

/// All references of volumes, with the reason why it is unknown whether the objects exist.
fn unknown(references: &References, pod: &PodIdentity, node: Option<&str>) -> Vec<(Missing, String)> {
    let object = |kind: ObjectKind, namespace: &str, name: &str| {
        let reason = format!("{} {name:?} is not known yet: nothing was pushed", kind.to_string().to_lowercase());
        let key = ObjectKey { kind, namespace: namespace.to_owned(), name: name.to_owned() };
        (Missing::Object(key), reason)
    };
    let of_pod = |kind, names: &BTreeSet<String>| -> Vec<_> {
        names.iter().map(|name| object(kind, &pod.namespace, name)).collect()
    };
    let bundle = |key: &BundleKey| match key {
        BundleKey::Named(name) => object(ObjectKind::ClusterTrustBundle, "", name),
        BundleKey::OfSigner { signer, .. } => {
            let reason = format!("clustertrustbundles of {signer:?} are not known yet: nothing was pushed");
            (Missing::BundlesOf(signer.clone()), reason)
        }
    };
    let mut all = of_pod(ObjectKind::ConfigMap, &references.config_maps);
    all.extend(of_pod(ObjectKind::Secret, &references.secrets));
    all.extend(of_pod(ObjectKind::PersistentVolumeClaim, &references.claims));
    all.extend(references.bundles.iter().map(bundle));
    all.extend(node.filter(|_| references.node).map(|node| object(ObjectKind::Node, "", node)));
    all
}

#[cfg(test)]
mod tests;
