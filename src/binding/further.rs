//! Objects that volumes refer to through other objects: a claim names its PersistentVolume, the PersistentVolume names a driver,
//! and the driver needs a VolumeAttachment, Secrets and tokens. Each object that a source reads may name further ones.

use std::collections::BTreeSet;

use crate::manifest::objects::{ObjectKey, ObjectKind, Objects, PersistentSource};
use crate::manifest::pod::{PodFacts, PodIdentity};
use crate::volume::{CredentialKey, Csi, SecretReference, TokenKey, Volume, VolumeSource};

/// Objects and tokens besides those that the volumes themselves name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExtraReferences {
    /// The objects.
    pub objects: BTreeSet<ObjectKey>,
    /// Tokens of the pod's service account that drivers need.
    pub tokens: BTreeSet<CredentialKey>,
}

/// The objects that these volumes of the pod refer to through `objects`.
pub fn further_references(
    volumes: &[Volume],
    pod: &PodIdentity,
    facts: &PodFacts,
    objects: &Objects,
) -> ExtraReferences {
    let mut further = ExtraReferences::default();
    for volume in volumes {
        match &volume.source {
            VolumeSource::Claim(claim) => {
                let name = claim.reference.name(&pod.name, volume.name.as_str());
                let claim = objects.claim(&pod.namespace, &name);
                let Some(name) = claim.and_then(|claim| claim.volume.as_deref()) else { continue };
                further.add(ObjectKind::PersistentVolume, "", name);
                match objects.persistent_volume(name).map(|volume| &volume.source) {
                    Some(PersistentSource::Csi(Ok(csi))) => further.add_csi(csi, pod, facts, objects),
                    Some(PersistentSource::Flex(Ok(flex))) => further.add_secrets(&flex.secret, pod),
                    _ => {}
                }
            }
            VolumeSource::Csi(csi) => further.add_csi(csi, pod, facts, objects),
            _ => {}
        }
    }
    further
}

impl ExtraReferences {
    fn add(&mut self, kind: ObjectKind, namespace: &str, name: &str) {
        self.objects.insert(ObjectKey { kind, namespace: namespace.to_owned(), name: name.to_owned() });
    }

    fn add_secrets<'a>(&mut self, secrets: impl IntoIterator<Item = &'a SecretReference>, pod: &PodIdentity) {
        for secret in secrets {
            self.add(ObjectKind::Secret, secret.namespace.as_deref().unwrap_or(&pod.namespace), &secret.name);
        }
    }

    fn add_csi(&mut self, csi: &Csi, pod: &PodIdentity, facts: &PodFacts, objects: &Objects) {
        self.add(ObjectKind::CsiDriver, "", &csi.driver);
        self.add_secrets(csi.secrets(), pod);
        let driver = objects.csi_driver(&csi.driver);
        let tokens = driver.into_iter().flat_map(|driver| &driver.token_requests);
        self.tokens.extend(
            tokens.map(|token| {
                CredentialKey::Token(TokenKey::new(Some(token.audience.clone()), token.expiration_seconds))
            }),
        );
        let is_attached = driver.is_none_or(|driver| driver.attach_required);
        if let Some(name) = csi.attachment(facts.node_name.as_deref()).filter(|_| is_attached) {
            self.add(ObjectKind::VolumeAttachment, "", &name);
        }
    }
}
