//! References: all objects that the volumes of a pod refer to, so that a source reads only these.

use std::collections::BTreeSet;

use crate::manifest::pod::{PodFacts, PodIdentity};
use crate::volume::{
    BundleKey, ContainerResource, CredentialKey, DownwardValue, Projection, ProjectionSource, ResourceBound, Volume,
    VolumeSource,
};

/// The objects that volumes refer to. Names without a namespace are in the pod's namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct References {
    /// ConfigMaps, optional ones included.
    pub config_maps: BTreeSet<String>,
    /// Secrets, optional ones included.
    pub secrets: BTreeSet<String>,
    /// PersistentVolumeClaims. podfs learns the PersistentVolume of a claim when the claim is bound.
    pub claims: BTreeSet<String>,
    /// Tokens of the pod's service account.
    pub tokens: BTreeSet<CredentialKey>,
    /// ClusterTrustBundles.
    pub bundles: BTreeSet<BundleKey>,
    /// Whether the volumes need the Node object: for the limit of a container that has none, and for a
    /// PersistentVolume that can be used on some nodes only.
    pub node: bool,
}

/// The objects that these volumes of the pod refer to. The result changes when a limit of a container is set or
/// removed.
pub fn references(volumes: &[Volume], identity: &PodIdentity, facts: &PodFacts) -> References {
    let mut references = References::default();
    for volume in volumes {
        match &volume.source {
            VolumeSource::Projection(projection) => references.add_projection(projection, facts),
            VolumeSource::Claim(claim) => {
                references.claims.insert(claim.reference.name(&identity.name, volume.name.as_str()));
                references.node = true;
            }
            VolumeSource::Flex(flex) => {
                let secret = flex.secret.iter().filter(|secret| secret.namespace.is_none());
                references.secrets.extend(secret.map(|secret| secret.name.clone()));
            }
            VolumeSource::Csi(csi) => {
                let of_pod = csi.secrets().filter(|secret| secret.namespace.is_none());
                references.secrets.extend(of_pod.map(|secret| secret.name.clone()));
            }
            VolumeSource::HostPath(_)
            | VolumeSource::EmptyDir(_)
            | VolumeSource::Nfs(..)
            | VolumeSource::Unsupported(_) => {}
        }
    }
    references
}

impl References {
    fn add_projection(&mut self, projection: &Projection, facts: &PodFacts) {
        for source in &projection.sources {
            match source {
                ProjectionSource::ConfigMap(object) => drop(self.config_maps.insert(object.name.clone())),
                ProjectionSource::Secret(object) => drop(self.secrets.insert(object.name.clone())),
                ProjectionSource::ServiceAccountToken(file) => {
                    self.tokens.insert(CredentialKey::Token(file.token.clone()));
                }
                ProjectionSource::ClusterTrustBundle(file) => drop(self.bundles.insert(file.bundles.clone())),
                ProjectionSource::DownwardApi(files) => {
                    self.node |= files.iter().any(|file| match &file.value {
                        DownwardValue::Resource(field) => field.falls_back_to_node(facts),
                        DownwardValue::Field(_) => false,
                    });
                }
                ProjectionSource::PodCertificate(files) => {
                    self.tokens.insert(CredentialKey::Certificate(files.certificate.clone()));
                }
            }
        }
    }
}

impl ContainerResource {
    /// Whether the file shows the node's allocatable resources, because the container has no limit (DA-09).
    pub fn falls_back_to_node(&self, facts: &PodFacts) -> bool {
        let has_limit = || {
            let container = facts.container(&self.container);
            container.is_none_or(|container| container.limits.get(&self.resource).is_some_and(|limit| !limit.is_zero()))
        };
        self.bound == ResourceBound::Limit && !self.resource.starts_with("hugepages-") && !has_limit()
    }
}

#[cfg(test)]
mod tests;
