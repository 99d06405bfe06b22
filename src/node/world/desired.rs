//! The desired state of the world: the pods of the node and the volumes that their containers use.
//!
//! Invariants:
//! 1. A pod is in this world while its containers run or may run: from the moment its source describes it until it is
//!    released.
//! 2. A volume is in this world only if a container of its pod uses it (VM-03) and a plugin serves it.
//! 3. A pod is processed when each of its volumes is in this world or is used by no container; otherwise its errors say
//!    why not.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::VolumeId;
use super::errors::DistinctErrors;
use crate::manifest::pod::{Pod, PodUid};
use crate::node::plugin::PluginRegistry;
use crate::node::pod::NodePod;
use crate::volume::{ClaimUsage, Volume, VolumeSource, keep_volume};

/// The pods that want volumes.
#[derive(Debug, Default)]
pub struct DesiredWorld {
    pods: BTreeMap<PodUid, DesiredPod>,
}

/// A pod that wants volumes.
#[derive(Clone, Debug)]
pub struct DesiredPod {
    /// The pod, as its source described it last, but with the earlier definitions of the volumes that stay as they were.
    pub pod: NodePod,
    /// The volumes that its containers use, by their names.
    pub volumes: BTreeMap<String, DesiredVolume>,
    /// Why podfs does not serve volumes that containers use, or not as the pod describes them now.
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
    /// The volumes that this pod wants. A volume that podfs cannot serve does not affect the other volumes (VM-10). A
    /// volume whose definition differs from `before` stays as it was: containers of the pod use it. Only an emptyDir
    /// gets a new size limit.
    fn of(mut pod: NodePod, plugins: &PluginRegistry, before: Option<DesiredPod>) -> DesiredPod {
        let (mut volumes, mut errors) = (BTreeMap::new(), DistinctErrors::default());
        let described = Arc::clone(&pod.pod);
        let uid = &described.identity.uid;
        for volume in described.volumes.iter().filter(|volume| is_used(&described, volume)) {
            let known = before.as_ref().and_then(|before| Some((before, before.volumes.get(volume.name.as_str())?)));
            if let Some((before, kept)) = known.filter(|(_, known)| !known.volume.source.can_become(&volume.source)) {
                errors.add(format!(
                    "volume {:?} is described otherwise than when it was mounted, and stays as it is; give the pod another \
                     uid, or delete it and make it anew",
                    volume.name.as_str()
                ));
                volumes.insert(volume.name.to_string(), kept.clone());
                // The pod's supervisor refuses a manifest with another definition of a mounted volume.
                let definitions = Arc::make_mut(&mut pod.pod).volumes.iter_mut();
                definitions
                    .filter(|other| other.name == volume.name)
                    .for_each(|definition| definition.clone_from(&kept.volume));
                keep_volume(Arc::make_mut(&mut pod.manifest), &before.pod.manifest, volume.name.as_str());
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
