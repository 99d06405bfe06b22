//! The definition of a volume: the parts of the manifest that decide the volume, for a later podfs to parse again. The bytes are a
//! format: other versions of podfs read them.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1 as core;
use serde::{Deserialize, Serialize};

use crate::types::InvalidField;
use crate::volume::{Preferences, Volume, VolumeFields, VolumeSource, VolumeUses};

/// The parts of a pod's manifest that decide one of its volumes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VolumeDefinition {
    /// The entry of `spec.volumes`.
    volume: core::Volume,
    /// The annotations about this volume.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    annotations: BTreeMap<String, String>,
    /// The containers that use the volume.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    containers: Vec<VolumeUse>,
}

impl Eq for VolumeDefinition {}

/// How a container uses a volume.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct VolumeUse {
    /// Its mounts of the volume, and those below them, for which the volume has directories.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    volume_mounts: Vec<core::VolumeMount>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    volume_devices: Vec<core::VolumeDevice>,
}

impl VolumeDefinition {
    /// The name of the volume.
    pub fn name(&self) -> &str {
        &self.volume.name
    }

    /// The volume.
    ///
    /// # Errors
    /// When this version of podfs does not take the definition.
    pub fn parse(&self) -> Result<Volume, InvalidField> {
        let uses = VolumeUses {
            mounts: self.containers.iter().map(|container| container.volume_mounts.as_slice()).collect(),
            devices: self.containers.iter().map(|container| container.volume_devices.as_slice()).collect(),
        };
        let mut volume = [Volume::parse(&self.volume, &VolumeFields::default(), &uses)?];
        Preferences::apply(Some(&self.annotations), &mut volume)?;
        let [volume] = volume;
        Ok(volume)
    }

    /// The definitions of a pod's volumes, except of kinds that podfs does not serve.
    pub(super) fn of_pod(
        volumes: &[Volume],
        spec: &core::PodSpec,
        annotations: Option<&BTreeMap<String, String>>,
        uses: &VolumeUses<'_>,
    ) -> Vec<VolumeDefinition> {
        let is_served = |name: &str| {
            volumes
                .iter()
                .any(|volume| volume.name.as_str() == name && !matches!(volume.source, VolumeSource::Unsupported(_)))
        };
        let served = spec.volumes.iter().flatten().filter(|volume| is_served(&volume.name));
        let definition = |volume: &core::Volume| VolumeDefinition {
            volume: volume.clone(),
            annotations: annotations_about(&volume.name, annotations),
            containers: uses_of(&volume.name, uses),
        };
        served.map(definition).collect()
    }
}

/// The annotations of podfs about a volume: `podfs.io/cache.<volume>`.
fn annotations_about(volume: &str, annotations: Option<&BTreeMap<String, String>>) -> BTreeMap<String, String> {
    let is_about = |key: &str| {
        key.strip_prefix("podfs.io/").and_then(|key| key.split_once('.')).is_some_and(|(_, name)| name == volume)
    };
    let about = annotations.into_iter().flatten().filter(|(key, _)| is_about(key));
    about.map(|(key, value)| (key.clone(), value.clone())).collect()
}

fn uses_of(volume: &str, uses: &VolumeUses<'_>) -> Vec<VolumeUse> {
    let of_container = |(mounts, devices): (&&[core::VolumeMount], &&[core::VolumeDevice])| {
        let own: Vec<_> =
            mounts.iter().filter(|mount| mount.name == volume).map(|mount| mount.mount_path.as_str()).collect();
        let is_below = |path: &str| {
            own.iter().any(|own| path.strip_prefix(own.trim_end_matches('/')).is_some_and(|rest| rest.starts_with('/')))
        };
        let is_relevant = |mount: &&core::VolumeMount| mount.name == volume || is_below(&mount.mount_path);
        VolumeUse {
            volume_mounts: mounts.iter().filter(is_relevant).cloned().collect(),
            volume_devices: devices.iter().filter(|device| device.name == volume).cloned().collect(),
        }
    };
    let all = uses.mounts.iter().zip(&uses.devices).map(of_container);
    all.filter(|used| *used != VolumeUse::default()).collect()
}
