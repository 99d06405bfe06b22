//! The desired state of the world: the pods of the node and the volumes that their containers use.
//!
//! Invariants:
//! 1. A pod is in this world while its containers run or may run: from the moment its source describes it until it is
//!    released.
//! 2. A volume is in this world only if a plugin serves it, and a container of its pod uses it (VM-03) or may still use
//!    it: the manifest of a pod with an agent does not say when its containers stop.
//! 3. A pod is processed when each of its volumes is in this world or is used by no container; otherwise its errors say
//!    why not.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::VolumeId;
use super::actual::ActualWorld;
use super::sentences::DistinctSentences;
use crate::manifest::pod::{Pod, PodIdentity, PodUid};
use crate::node::plugin::PluginRegistry;
use crate::node::pod::{NodePod, PodOrigin};
use crate::supervisor::run::sharing::{Sharing, can_share, is_shared};
use crate::volume::{ClaimUsage, Volume, VolumeSource, keep_volume};

/// How podfs takes a description that it refuses of a pod that it serves.
const MAKE_ANEW: &str =
    "give the pod another uid, or remove it, release it with podfs node release, and then add it again";

/// The pods that want volumes.
#[derive(Debug, Default)]
pub struct DesiredWorld {
    pods: BTreeMap<PodUid, DesiredPod>,
}

/// A pod that wants volumes.
#[derive(Clone, Debug)]
pub struct DesiredPod {
    /// The pod, as its source described it last, but with its earlier name and namespace, and with the earlier definitions of
    /// the volumes that stay as they were.
    pub pod: NodePod,
    /// The volumes that its containers use, by their names.
    pub volumes: BTreeMap<String, DesiredVolume>,
    /// Why podfs does not serve volumes that containers use, or not as the pod describes them now.
    pub errors: DistinctSentences,
    /// What stays as it was: the name of the pod, volumes that are described otherwise now, and volumes that no container of the
    /// manifest uses any more. No volume is missing.
    pub notes: DistinctSentences,
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
    /// volume whose definition differs from `before`, or that was mounted and is in no use any more, stays as it was:
    /// containers of the pod use it. Only an emptyDir gets a new size limit.
    fn of(mut pod: NodePod, plugins: &PluginRegistry, before: Option<DesiredPod>, actual: &ActualWorld) -> DesiredPod {
        let (mut volumes, mut errors, mut notes) =
            (BTreeMap::new(), DistinctSentences::default(), DistinctSentences::default());
        let described = Arc::clone(&pod.pod);
        let uid = &described.identity.uid;
        if let Some(before) = &before
            && before.pod.pod.identity != described.identity
        {
            let (name, kept) = (&described.identity, &before.pod.pod.identity);
            notes.add(format!("the pod is described as {name} now, and stays {kept}; {MAKE_ANEW}"));
            keep_name(&mut pod, kept);
        }
        let known = |name: &str| before.as_ref().and_then(|before| Some((before, before.volumes.get(name)?)));
        for volume in &described.volumes {
            let (name, known) = (volume.name.as_str(), known(volume.name.as_str()));
            if is_used(&described, volume) {
                if let Some((before, kept)) = known.filter(|(_, known)| !known.volume.source.can_become(&volume.source))
                {
                    // Containers of the pod have the volume; nothing is missing.
                    let sentences = if was_mounted(actual, uid, name) { &mut notes } else { &mut errors };
                    sentences.add(format!(
                        "volume {name:?} is described otherwise than when it was mounted, and stays as it is; {MAKE_ANEW}"
                    ));
                    volumes.insert(name.to_owned(), kept.clone());
                    keep(&mut pod, before, kept);
                    continue;
                }
            } else if may_be_used(&pod, before.as_ref(), actual, name) {
                notes.add(format!(
                    "volume {name:?} is used by no container of the manifest any more, and stays until the pod is released"
                ));
                if let Some((before, kept)) = known {
                    volumes.insert(name.to_owned(), kept.clone());
                    keep(&mut pod, before, kept);
                    continue;
                }
            } else {
                continue;
            }
            if known.is_none()
                && let Some(other) = unshareable(volume, &described, before.as_ref(), actual)
            {
                errors.add(format!(
                    "volume {name:?} names the claim of volume {other:?}, whose mount does not suit it (read-only, block device and \
                     podfs.io/host-path have to be the same); {MAKE_ANEW}"
                ));
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
        let is_described = |name: &str| described.volumes.iter().any(|volume| volume.name.as_str() == name);
        for (before, (name, kept)) in
            before.iter().flat_map(|before| before.volumes.iter().map(move |one| (before, one)))
        {
            if !is_described(name) && may_be_used(&pod, Some(before), actual, name) {
                notes.add(format!("volume {name:?} is no longer in the manifest, and stays until the pod is released"));
                volumes.insert(name.clone(), kept.clone());
                keep(&mut pod, before, kept);
            }
        }
        DesiredPod { pod, volumes, errors, notes }
    }

    /// Whether every volume that a container uses is wanted.
    pub fn is_processed(&self) -> bool {
        self.errors.is_empty()
    }
}

fn was_mounted(actual: &ActualWorld, pod: &PodUid, volume: &str) -> bool {
    let id = VolumeId { pod: pod.clone(), volume: volume.to_owned() };
    actual.volume(&id).is_some_and(|volume| volume.was_mounted)
}

/// Gives the pod its earlier name and namespace. The pod's supervisor refuses a manifest or objects for another name.
fn keep_name(pod: &mut NodePod, kept: &PodIdentity) {
    let metadata = &mut Arc::make_mut(&mut pod.manifest)["metadata"];
    (metadata["name"], metadata["namespace"]) = (kept.name.as_str().into(), kept.namespace.as_str().into());
    Arc::make_mut(&mut pod.pod).identity = kept.clone();
}

/// The volume of the same claim whose mount does not suit a new volume of the pod. The pod's supervisor would refuse all new volumes
/// because of this one.
fn unshareable(new: &Volume, pod: &Pod, before: Option<&DesiredPod>, actual: &ActualWorld) -> Option<String> {
    let id = |name: &str| VolumeId { pod: pod.identity.uid.clone(), volume: name.to_owned() };
    let is_found = |volume: &Volume| actual.volume(&id(volume.name.as_str())).is_some_and(|found| found.reconstructed);
    let served: Vec<Volume> = match before {
        Some(before) => before.volumes.values().map(|known| known.volume.clone()).collect(),
        None if is_found(new) => return None,
        None => pod.volumes.iter().filter(|volume| is_found(volume) && is_used(pod, volume)).cloned().collect(),
    };
    let (_, leaders) = Sharing::of(&served, &pod.identity);
    let (_, leader) = leaders.into_iter().find(|(_, leader)| is_shared(new, leader, &pod.identity))?;
    (!can_share(&leader, new)).then(|| leader.name.to_string())
}

/// Gives the pod the earlier definition of a volume. The pod's supervisor refuses a manifest with another one of a
/// mounted volume.
fn keep(pod: &mut NodePod, before: &DesiredPod, kept: &DesiredVolume) {
    let definitions = &mut Arc::make_mut(&mut pod.pod).volumes;
    match definitions.iter_mut().find(|other| other.name == kept.volume.name) {
        Some(definition) => definition.clone_from(&kept.volume),
        None => definitions.push(kept.volume.clone()),
    }
    keep_volume(Arc::make_mut(&mut pod.manifest), &before.pod.manifest, kept.volume.name.as_str());
}

/// Whether containers that still run may use the volume although the manifest no longer says so. Before the first
/// description, that may be a volume of an earlier daemon. A kubelet and a container runtime report themselves that
/// containers no longer use a volume.
fn may_be_used(pod: &NodePod, before: Option<&DesiredPod>, actual: &ActualWorld, name: &str) -> bool {
    let id = VolumeId { pod: pod.pod.identity.uid.clone(), volume: name.to_owned() };
    let has_agent = matches!(pod.origin, PodOrigin::File(_) | PodOrigin::Api);
    has_agent
        && actual.volume(&id).is_some_and(|volume| match before {
            Some(before) => volume.was_mounted && before.volumes.contains_key(name),
            None => volume.reconstructed,
        })
}

/// Whether a container uses the volume, as a directory or as a device.
pub fn is_used(pod: &Pod, volume: &Volume) -> bool {
    let name = volume.name.as_str();
    let is_mounted = pod.mounts.iter().any(|container| container.mounts.iter().any(|mount| mount.volume == name));
    let is_device = matches!(&volume.source, VolumeSource::Claim(claim) if claim.usage != ClaimUsage::default());
    is_mounted || is_device
}

impl DesiredWorld {
    /// Adds a new or changed pod with the volumes that it describes. Keeps volumes that were mounted until the pod is
    /// removed.
    pub fn put(&mut self, pod: NodePod, plugins: &PluginRegistry, actual: &ActualWorld) {
        let uid = pod.pod.identity.uid.clone();
        let before = self.pods.remove(&uid);
        self.pods.insert(uid, DesiredPod::of(pod, plugins, before, actual));
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
