//! All pushed objects of a pod.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use tokio::sync::watch::{Receiver, Sender, channel};

use super::message::{ParsedPush, Push, PushCounts, PushError};
use crate::manifest::objects::{Missing, NamedObject, ObjectKey, ObjectKind, PersistentSource};
use crate::manifest::pod::{Pod, PodIdentity};
use crate::manifest::tokens::Token;
use crate::volume::{CredentialKey, SecretReference};

/// Most objects that podfs keeps for a pod; each has at most 1 MiB.
const MAX_OBJECTS: usize = 1000;

/// The receiver of pushes for one pod. Cheap to clone; any thread may use it.
#[derive(Clone)]
pub struct PushReceiver {
    pod: Arc<PodIdentity>,
    known: Arc<Sender<PushedObjects>>,
}

/// All objects that were pushed.
#[derive(Clone, Default)]
pub(super) struct PushedObjects {
    /// Whether there was any push.
    pub(super) began: bool,
    pub(super) pod: Option<Arc<Pod>>,
    pub(super) objects: BTreeMap<ObjectKey, Arc<NamedObject>>,
    pub(super) tokens: BTreeMap<CredentialKey, Token>,
    /// Objects whose state the agent does not know, with the reasons.
    pub(super) missing: Vec<(Missing, String)>,
    pub(super) missing_tokens: BTreeMap<CredentialKey, String>,
    /// Whether missing objects are no problem yet.
    pub(super) settling: bool,
    /// When the last push arrived.
    pub(super) noticed_at: Option<Instant>,
}

impl PushReceiver {
    /// An empty inbox for this pod, and a receiver of its changes.
    pub(super) fn new(pod: PodIdentity) -> (PushReceiver, Receiver<PushedObjects>) {
        let (known, pushed) = channel(PushedObjects::default());
        (PushReceiver { pod: Arc::new(pod), known: Arc::new(known) }, pushed)
    }

    /// Takes all of a push, or nothing.
    ///
    /// # Errors
    /// The first error in the push.
    pub fn take(&self, push: Push) -> Result<PushCounts, PushError> {
        let noticed_at = Some(Instant::now());
        let parsed = ParsedPush::parse(push, &self.pod)?;
        let mut outcome = None;
        self.known.send_if_modified(|known| {
            let after = known.after(parsed, &self.pod);
            let is_taken = after.is_ok();
            outcome = Some(after.map(|after| {
                *known = PushedObjects { noticed_at, ..after };
                PushCounts { objects: known.objects.len(), tokens: known.tokens.len() }
            }));
            is_taken
        });
        outcome.expect("`send_if_modified` has called the closure")
    }
}

impl PushedObjects {
    fn after(&self, push: ParsedPush, of: &PodIdentity) -> Result<PushedObjects, PushError> {
        let ParsedPush { pod, objects, tokens, deleted, replace, missing, missing_tokens, settling } = push;
        let mut after =
            if replace { PushedObjects { pod: self.pod.clone(), ..PushedObjects::default() } } else { self.clone() };
        after.began = true;
        after.pod = pod.or(after.pod);
        deleted.iter().for_each(|key| drop(after.objects.remove(key)));
        let pushed: Vec<_> = objects.iter().map(Arc::clone).collect();
        after.objects.extend(objects.into_iter().map(|object| (object.key.clone(), object)));
        after.drop_secrets_of_other_pods(of);
        if let Some(object) = pushed.into_iter().find(|object| !after.objects.contains_key(&object.key)) {
            let (origin, key) = (object.origin.clone(), object.key.clone());
            return Err(PushError::Namespace { origin, object: key, namespace: of.namespace.clone() });
        }
        after.tokens.extend(tokens);
        missing_tokens.iter().for_each(|(key, _)| drop(after.tokens.remove(key)));
        (after.missing, after.missing_tokens) = (missing, missing_tokens.into_iter().collect());
        after.settling = settling;
        match after.objects.len() {
            0..=MAX_OBJECTS => Ok(after),
            objects => Err(PushError::TooMany { objects, limit: MAX_OBJECTS }),
        }
    }

    /// Keeps a Secret of another namespace only for the driver of a PersistentVolume that names it (SE-03).
    fn drop_secrets_of_other_pods(&mut self, of: &PodIdentity) {
        let named: Vec<SecretReference> = self.objects.values().filter_map(|object| object.persistent_volume()).fold(
            Vec::new(),
            |mut named, volume| {
                match &volume.source {
                    PersistentSource::Csi(Ok(csi)) => named.extend(csi.secrets().cloned()),
                    PersistentSource::Flex(Ok(flex)) => named.extend(flex.secret.clone()),
                    _ => {}
                }
                named
            },
        );
        let is_named = |key: &ObjectKey| {
            named.iter().any(|secret| secret.name == key.name && secret.namespace.as_deref() == Some(&key.namespace))
        };
        self.objects.retain(|key, _| key.kind != ObjectKind::Secret || key.namespace == of.namespace || is_named(key));
    }
}
