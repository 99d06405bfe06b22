//! The pod: everything of its manifest that its volumes need, parsed once.

mod container;
mod definition;
mod facts;
mod identity;
mod mounts;
mod network;
mod resources;
mod template;

use std::collections::BTreeMap;
use std::path::Path;

use k8s_openapi::api::core::v1 as core;
use serde_json::{Map, Value};

pub use container::Container;
pub use definition::VolumeDefinition;
pub use facts::{FsGroupPolicy, PodFacts};
pub use identity::{DEFAULT_NAMESPACE, PodIdentity, PodUid};
pub use mounts::{ContainerDevice, ContainerMounts, Mount, SubPath};
pub use network::{HostAlias, PodNetwork};
pub use resources::PodResources;
pub use template::{from_template, is_pod_or_template};

use super::{Document, ManifestError, Origin};
use crate::types::InvalidField;
use crate::volume::{Preferences, Volume, VolumeFields, VolumeUses};

/// A pod and its volumes. While a pod runs, only its facts may change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Its namespace, name and uid.
    pub identity: PodIdentity,
    /// The facts that downwardAPI volumes show, and those that decide modes and owners.
    pub facts: PodFacts,
    /// Its volumes but those of kind `image`, in the manifest's order; no name is there twice.
    pub volumes: Vec<Volume>,
    /// The definitions of the volumes that podfs serves.
    pub definitions: Vec<VolumeDefinition>,
    /// The mounts of its containers, an entry for each container.
    pub mounts: Vec<ContainerMounts>,
    /// Its volumes of kind `image`, which container runtimes mount without podfs: the image of each.
    pub images: BTreeMap<String, String>,
    /// The fields that decide its `/etc/hosts`.
    pub network: PodNetwork,
}

impl Pod {
    /// Parses a core/v1 Pod.
    ///
    /// # Errors
    /// Another kind of document, a field of the wrong type, or one that the API would refuse. Parts of the pod that no
    /// volume depends on need not be valid.
    pub fn parse(document: Document) -> Result<Pod, ManifestError> {
        let origin = document.origin.clone();
        if (document.api_version.as_str(), document.kind.as_str()) != ("v1", "Pod") {
            let sentence = format!("expected a Pod of v1, found a {} of {}", document.kind, document.api_version);
            return Err(ManifestError::invalid(&origin, "", sentence));
        }
        let invalid = |error: InvalidField| ManifestError::invalid(&origin, &error.field, error.sentence);
        let fields = fields_of_volumes(document.body());
        parse(document.into_typed()?, &fields).map_err(invalid)
    }
}

/// The fields of each volume as in the manifest.
fn fields_of_volumes(pod: &Map<String, Value>) -> Vec<VolumeFields> {
    let volumes = pod.get("spec").and_then(|spec| spec.get("volumes")).and_then(Value::as_array);
    let fields = |volume: &Value| volume.as_object().map(VolumeFields::of).unwrap_or_default();
    volumes.into_iter().flatten().map(fields).collect()
}

/// Splits a file's documents into its one Pod and the others, which may be objects.
///
/// # Errors
/// Instead of the Pod: no Pod, or several; the sentence names the file and the kinds of its documents.
pub fn only_pod(file: &Path, documents: Vec<Document>) -> (Result<Document, ManifestError>, Vec<Document>) {
    let (mut pods, others): (Vec<_>, Vec<_>) = documents.into_iter().partition(|document| document.kind == "Pod");
    let pod = match (pods.pop(), pods.len()) {
        (Some(pod), 0) => Ok(pod),
        (Some(last), _) => {
            let places: Vec<String> = pods.iter().chain([&last]).map(|pod| pod.origin.to_string()).collect();
            let sentence = format!("expected one Pod, found {} ({})", places.len(), places.join("; "));
            Err(ManifestError::invalid(&Origin::file(file), "", sentence))
        }
        (None, _) => {
            let kinds: Vec<&str> = others.iter().map(|document| document.kind.as_str()).collect();
            let found = if kinds.is_empty() { "nothing".to_owned() } else { kinds.join(", ") };
            Err(ManifestError::invalid(&Origin::file(file), "", format!("expected one Pod, found {found}")))
        }
    };
    (pod, others)
}

fn parse(pod: core::Pod, fields: &[VolumeFields]) -> Result<Pod, InvalidField> {
    let spec = pod.spec.ok_or_else(|| InvalidField::new("spec", "is required"))?;
    let identity = PodIdentity::parse(&pod.metadata).map_err(|error| error.under("metadata"))?;
    let images = images(&spec);
    let mut volumes = volumes(&spec, fields).map_err(|error| error.under("spec"))?;
    volumes.retain(|volume| !images.contains_key(volume.name.as_str()));
    let annotations = pod.metadata.annotations.as_ref();
    Preferences::apply(annotations, &mut volumes)?;
    let definitions = VolumeDefinition::of_pod(&volumes, &spec, annotations, &containers(&spec));
    let mounts = mounts::of_containers(&spec);
    let network = PodNetwork::of(&spec);
    let facts = PodFacts::parse(pod.metadata, &spec).map_err(|error| error.under("spec"))?;
    Ok(Pod { identity, volumes, definitions, mounts, images, network, facts })
}

fn images(spec: &core::PodSpec) -> BTreeMap<String, String> {
    let image = |volume: &core::Volume| {
        Some((volume.name.clone(), volume.image.as_ref()?.reference.clone().unwrap_or_default()))
    };
    spec.volumes.iter().flatten().filter_map(image).collect()
}

fn volumes(spec: &core::PodSpec, fields: &[VolumeFields]) -> Result<Vec<Volume>, InvalidField> {
    let containers = containers(spec);
    let mut volumes: Vec<Volume> = Vec::new();
    for (index, volume) in spec.volumes.iter().flatten().enumerate() {
        let at = |error: InvalidField| error.under(format!("volumes[{index}]"));
        let none = VolumeFields::default();
        let volume = Volume::parse(volume, fields.get(index).unwrap_or(&none), &containers).map_err(at)?;
        if volumes.iter().any(|other| other.name == volume.name) {
            let sentence = format!("volume {:?}: another volume of the pod has this name", volume.name.as_str());
            return Err(at(InvalidField::new("name", sentence)));
        }
        volumes.push(volume);
    }
    Ok(volumes)
}

/// The `volumeMounts` and `volumeDevices` of all containers, init containers and ephemeral containers.
fn containers(spec: &core::PodSpec) -> VolumeUses<'_> {
    let init = spec.init_containers.iter().flatten().map(|one| (&one.volume_mounts, &one.volume_devices));
    let regular = spec.containers.iter().map(|one| (&one.volume_mounts, &one.volume_devices));
    let ephemeral = spec.ephemeral_containers.iter().flatten().map(|one| (&one.volume_mounts, &one.volume_devices));
    let (mounts, devices): (Vec<_>, Vec<_>) = init.chain(regular).chain(ephemeral).unzip();
    VolumeUses {
        mounts: mounts.into_iter().map(|mounts| mounts.as_deref().unwrap_or_default()).collect(),
        devices: devices.into_iter().map(|devices| devices.as_deref().unwrap_or_default()).collect(),
    }
}

#[cfg(test)]
mod tests;
