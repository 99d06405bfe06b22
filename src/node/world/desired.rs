//! The desired state of the world: the pods of the node and the volumes that their containers use.
//!
//! Invariants:
//! 1. A pod is here while its containers run or may run: from the moment its source describes it until it is released.
//! 2. A volume is here only if a container of its pod uses it (VM-03) and a plugin serves it.
//! 3. A pod is processed when all its volumes are here or are used by no container; otherwise its errors say why not.

use std::collections::BTreeMap;

use super::VolumeId;
use super::errors::DistinctErrors;
use crate::manifest::pod::{Pod, PodUid};
use crate::node::plugin::PluginRegistry;
use crate::node::pod::NodePod;
use crate::volume::{ClaimUsage, Volume, VolumeSource};

/// The pods that want volumes.
#[derive(Debug, Default)]
pub struct DesiredWorld {
    pods: BTreeMap<PodUid, DesiredPod>,
}

/// A pod that wants volumes.
#[derive(Clone, Debug)]
pub struct DesiredPod {
    /// The pod, as its source described it last.
    pub pod: NodePod,
    /// The volumes that its containers use, by their names.
    pub volumes: BTreeMap<String, DesiredVolume>,
    /// Why volumes that containers use are not among them.
    pub errors: DistinctErrors,
}

/// A volume that a pod wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DesiredVolume {
    /// Its name on the node.
    pub unique_name: String,
    /// The plugin that serves it.
    pub plugin: &'static str,
    /// Its definition.
    pub volume: Volume,
}

impl DesiredPod {
    /// The volumes that this pod wants. A volume that podfs cannot serve does not affect the others (VM-10). A volume
    /// whose definition differs from `before` stays as it was: containers of the pod use it. Only an emptyDir gets a
    /// new size limit.
    fn of(pod: NodePod, plugins: &PluginRegistry, before: Option<DesiredPod>) -> DesiredPod {
        let before = before.map(|before| before.volumes).unwrap_or_default();
        let (mut volumes, mut errors) = (BTreeMap::new(), DistinctErrors::default());
        let uid = &pod.pod.identity.uid;
        for volume in pod.pod.volumes.iter().filter(|volume| is_used(&pod.pod, volume)) {
            if let Some(kept) =
                before.get(volume.name.as_str()).filter(|before| !before.volume.source.can_become(&volume.source))
            {
                errors.add(format!(
                    "volume {:?} is described otherwise than when it was mounted, and stays as it is; give the pod another \
                     uid, or delete it and make it anew",
                    volume.name.as_str()
                ));
                volumes.insert(volume.name.to_string(), kept.clone());
                continue;
            }
            match plugins.find(volume) {
                Ok(plugin) => {
                    let wanted = DesiredVolume {
                        unique_name: plugin.unique_volume_name(uid, volume.name.as_str()),
                        plugin: plugin.name(),
                        volume: volume.clone(),
                    };
                    volumes.insert(volume.name.to_string(), wanted);
                }
                Err(error) => errors.add(error.to_string()),
            }
        }
        DesiredPod { pod, volumes, errors }
    }

    /// Whether every volume that a container uses is wanted.
    pub fn is_processed(&self) -> bool {
        self.errors.is_empty()
    }
}

/// Whether a container uses the volume, as a directory or as a device.
pub fn is_used(pod: &Pod, volume: &Volume) -> bool {
    let name = volume.name.as_str();
    let is_mounted = pod.mounts.iter().any(|container| container.mounts.iter().any(|mount| mount.volume == name));
    let is_device = matches!(&volume.source, VolumeSource::Claim(claim) if claim.usage != ClaimUsage::default());
    is_mounted || is_device
}

impl DesiredWorld {
    /// Adds a new or changed pod. Removes volumes that no container uses any more, and adds new ones.
    pub fn put(&mut self, pod: NodePod, plugins: &PluginRegistry) {
        let uid = pod.pod.identity.uid.clone();
        let before = self.pods.remove(&uid);
        self.pods.insert(uid, DesiredPod::of(pod, plugins, before));
    }

    /// Removes the pod: its containers have stopped.
    pub fn remove(&mut self, pod: &PodUid) {
        self.pods.remove(pod);
    }

    /// The pod, if it is wanted.
    pub fn pod(&self, pod: &PodUid) -> Option<&DesiredPod> {
        self.pods.get(pod)
    }

    /// All pods.
    pub fn pods(&self) -> impl Iterator<Item = (&PodUid, &DesiredPod)> {
        self.pods.iter()
    }

    /// The volume, if its pod wants it.
    pub fn volume(&self, id: &VolumeId) -> Option<&DesiredVolume> {
        self.pods.get(&id.pod)?.volumes.get(&id.volume)
    }

    /// All volumes that pods want.
    pub fn volumes(&self) -> impl Iterator<Item = (VolumeId, &DesiredVolume)> {
        self.pods.iter().flat_map(|(uid, pod)| {
            let id = |name: &String| VolumeId { pod: uid.clone(), volume: name.clone() };
            pod.volumes.iter().map(move |(name, volume)| (id(name), volume))
        })
    }
}

#[cfg(test)]
mod tests;
