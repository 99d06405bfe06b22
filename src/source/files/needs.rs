//! The objects that a pod needs, so that a bad document of another object does not keep the pod from starting.

use super::bad_document::Subject;
use crate::manifest::objects::{ObjectKey, ObjectKind, Objects};
use crate::manifest::pod::Pod;
use crate::manifest::references;
use crate::volume::{BundleKey, ProjectionSource, VolumeSource};

/// Whether the pod needs the object of a bad document. `is_good` is whether podfs has a good document of an object.
///
/// A document that podfs cannot read may describe anything, so the pod needs it as long as an object is missing that the pod cannot
/// start without.
pub(super) fn needs(pod: &Pod, subject: &Subject, objects: &Objects, is_good: impl Fn(&ObjectKey) -> bool) -> bool {
    match subject {
        Subject::Object(key) => refers_to(pod, key, objects),
        Subject::Unknown => required(pod, objects).iter().any(|key| !is_good(key)),
        Subject::Pod(_) | Subject::Other => false,
    }
}

/// Whether volumes of the pod refer to the object, directly or through other objects.
fn refers_to(pod: &Pod, key: &ObjectKey, objects: &Objects) -> bool {
    let of_pod = references(&pod.volumes, &pod.identity, &pod.facts);
    let is_of_pod = key.namespace == pod.identity.namespace;
    let has_claims = !of_pod.claims.is_empty();
    match key.kind {
        ObjectKind::ConfigMap => is_of_pod && of_pod.config_maps.contains(&key.name),
        // PersistentVolumes refer to Secrets of any namespace.
        ObjectKind::Secret => is_of_pod && of_pod.secrets.contains(&key.name) || has_claims,
        ObjectKind::PersistentVolumeClaim => is_of_pod && of_pod.claims.contains(&key.name),
        ObjectKind::PersistentVolume => of_pod.claims.iter().any(|claim| {
            let claim = objects.claim(&pod.identity.namespace, claim);
            claim.is_none_or(|claim| claim.volume.as_ref().is_none_or(|volume| *volume == key.name))
        }),
        ObjectKind::ClusterTrustBundle => of_pod.bundles.iter().any(|bundle| match bundle {
            BundleKey::Named(name) => *name == key.name,
            BundleKey::OfSigner { .. } => true,
        }),
        ObjectKind::Node => of_pod.node,
        ObjectKind::CsiDriver | ObjectKind::VolumeAttachment => {
            has_claims || pod.volumes.iter().any(|volume| matches!(volume.source, VolumeSource::Csi(_)))
        }
    }
}

/// The objects without which volumes of the pod cannot be mounted.
fn required(pod: &Pod, objects: &Objects) -> Vec<ObjectKey> {
    let namespace = &pod.identity.namespace;
    let of_pod = |kind, name: &str| ObjectKey { kind, namespace: namespace.clone(), name: name.to_owned() };
    let of_cluster = |kind, name: &str| ObjectKey { kind, namespace: String::new(), name: name.to_owned() };
    let mut required = Vec::new();
    for volume in &pod.volumes {
        match &volume.source {
            VolumeSource::Projection(projection) => {
                required.extend(projection.sources.iter().filter_map(|source| match source {
                    ProjectionSource::ConfigMap(object) if !object.optional => {
                        Some(of_pod(ObjectKind::ConfigMap, &object.name))
                    }
                    ProjectionSource::Secret(object) if !object.optional => {
                        Some(of_pod(ObjectKind::Secret, &object.name))
                    }
                    ProjectionSource::ClusterTrustBundle(file) if !file.optional => match &file.bundles {
                        BundleKey::Named(name) => Some(of_cluster(ObjectKind::ClusterTrustBundle, name)),
                        BundleKey::OfSigner { .. } => None,
                    },
                    _ => None,
                }))
            }
            VolumeSource::Claim(claim) => {
                let name = claim.reference.name(&pod.identity.name, volume.name.as_str());
                let bound = objects.claim(namespace, &name).and_then(|claim| claim.volume.as_deref());
                required.extend(bound.map(|name| of_cluster(ObjectKind::PersistentVolume, name)));
                required.push(of_pod(ObjectKind::PersistentVolumeClaim, &name));
            }
            VolumeSource::Flex(flex) => {
                let secrets = flex.secret.iter().filter(|secret| secret.namespace.is_none());
                required.extend(secrets.map(|secret| of_pod(ObjectKind::Secret, &secret.name)));
            }
            VolumeSource::Csi(csi) => {
                let secrets = csi.secrets().filter(|secret| secret.namespace.is_none());
                required.extend(secrets.map(|secret| of_pod(ObjectKind::Secret, &secret.name)));
            }
            VolumeSource::HostPath(_)
            | VolumeSource::EmptyDir(_)
            | VolumeSource::Nfs(..)
            | VolumeSource::Unsupported(_) => {}
        }
    }
    required
}
