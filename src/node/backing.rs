//! What is behind the volumes of a pod in the cluster: the PersistentVolume of a claim, with its name on the node and
//! its size. A pure function of the pod and its objects.
//!
//! Names are the kubelet's (`GetUniqueVolumeName`): a volume that is attached to the node, or of which the node has one device for all
//! pods, has one name for all of them.

use std::collections::{BTreeMap, BTreeSet};

use crate::binding::{self, BoundSource};
use crate::manifest::objects::{ObjectKind, Objects};
use crate::manifest::pod::Pod;
use crate::volume::migration::complete;
use crate::volume::{Csi, Volume, VolumeSource};

/// The PersistentVolume, or the volume of a CSI driver, behind a volume of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backing {
    /// The plugin that serves it: `kubernetes.io/csi`.
    pub plugin: String,
    /// Its name on the node: `kubernetes.io/csi/DRIVER^HANDLE`.
    pub unique_name: String,
    /// Whether a controller of the cluster attaches it to the node before it is mounted, and detaches it when it is not in use.
    pub attachable: bool,
    /// The capacity of the PersistentVolume in bytes, if it has one.
    pub size: Option<u64>,
}

/// A claim whose PersistentVolume is larger than the claim's status says: this node is about to grow the volume, unless
/// the pod has it read-only.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PendingExpansion {
    /// The name of the claim.
    pub claim: String,
    /// The volume of the pod.
    pub volume: String,
    /// The bytes that its PersistentVolume has.
    pub bytes: u64,
    /// Whether a controller of the cluster tells the node when to grow it.
    pub by_controller: bool,
    /// Whether no container of the pod may write to the volume. Then it does not grow for this pod.
    pub is_read_only: bool,
}

/// The claims of the pod that are smaller than their PersistentVolumes, of the kinds that grow on the node, according
/// to these objects.
pub fn growing(pod: &Pod, objects: &Objects) -> BTreeSet<PendingExpansion> {
    let growing = |volume: &Volume| {
        let VolumeSource::Claim(claim) = &volume.source else { return None };
        let bound = binding::resolve(volume.name.as_str(), claim, &pod.identity, &pod.facts, objects).ok()?;
        let by_controller = match &bound.source {
            BoundSource::Local(_) => false,
            BoundSource::Csi(_) => true,
            _ => return None,
        };
        let bytes = bound.capacity.filter(|bytes| bound.claimed.is_some_and(|claimed| claimed < *bytes))?;
        let claim = volume.claim_name(&pod.identity.name)?;
        let volume = volume.name.to_string();
        Some(PendingExpansion { claim, volume, bytes, by_controller, is_read_only: bound.read_only })
    };
    pod.volumes.iter().filter_map(growing).collect()
}

/// The backings of the pod's volumes by name, according to these objects. Leaves out claims without a PersistentVolume, and
/// volumes of a CSI driver if podfs does not know whether they have to be attached.
pub fn backings(pod: &Pod, objects: &Objects) -> BTreeMap<String, Backing> {
    let backing = |volume: &Volume| {
        let name = volume.name.as_str();
        let backing = match &volume.source {
            VolumeSource::Claim(claim) => {
                let bound = binding::resolve(name, claim, &pod.identity, &pod.facts, objects).ok()?;
                let size = objects.persistent_volume(&bound.name).and_then(|volume| volume.capacity);
                let plugin = bound.source.directory().replace('~', "/");
                let unique_name = match &bound.source {
                    BoundSource::Csi(csi) => {
                        return Some((name.to_owned(), Backing { size, ..of_csi(csi, pod, objects)? }));
                    }
                    BoundSource::Local(_) => format!("{plugin}/{}", bound.name),
                    _ => format!("{plugin}/{}-{name}", pod.identity.uid),
                };
                Backing { plugin, unique_name, attachable: false, size }
            }
            VolumeSource::Csi(csi) if !csi.is_ephemeral() => of_csi(csi, pod, objects)?,
            _ => return None,
        };
        Some((name.to_owned(), backing))
    };
    pod.volumes.iter().filter_map(backing).collect()
}

fn of_csi(csi: &Csi, pod: &Pod, objects: &Objects) -> Option<Backing> {
    let mut csi = csi.clone();
    complete(&mut csi, &pod.identity.namespace);
    let driver = objects.csi_driver(&csi.driver);
    if driver.is_none() && objects.why_absent(ObjectKind::CsiDriver, "", &csi.driver).is_some() {
        return None;
    }
    let plugin = Csi::DIRECTORY.replace('~', "/");
    let unique_name = format!("{plugin}/{}^{}", csi.driver, csi.handle.as_deref().unwrap_or_default());
    // The kubelet, too, assumes that volumes of a driver without a CSIDriver object are attached.
    let attachable = driver.is_none_or(|driver| driver.attach_required);
    Some(Backing { plugin, unique_name, attachable, size: None })
}

#[cfg(test)]
mod tests;
