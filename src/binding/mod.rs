//! Bindings: from a claim to the PersistentVolume that it is bound to, with the checks and the messages of the kubelet.
//!
//! Manifest files often lack fields that an API server fills in, so podfs makes two checks differently without them:
//!
//! - a claim without a status counts as bound when it names a PersistentVolume;
//! - if the claim or the `claimRef` of the PersistentVolume has no uid, podfs compares namespaces and names instead.

mod affinity;
mod further;

use std::borrow::Cow;
use std::path::{Component, Path};

pub use further::{ExtraReferences, further_references};

use crate::manifest::objects::{
    ClaimKey, Controller, ObjectKind, Objects, PersistentSource, PersistentVolume, PersistentVolumeClaim, VolumeMode,
};
use crate::manifest::pod::{PodFacts, PodIdentity};
use crate::types::{InvalidField, mount_options};
use crate::volume::migration::instead_of;
use crate::volume::nfs_options::NfsOptionsError;
use crate::volume::{Claim, ClaimReference, ClaimUsage, Csi, Flex, HostPath, Nfs, NfsOptions};

/// The PersistentVolume of a claim, with the pod's rights to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BoundVolume {
    /// The PersistentVolume's name, which is safe as a path element.
    pub name: String,
    /// The volume source, such as a local path or an NFS export.
    pub source: BoundSource,
    /// Whether containers can only read the volume.
    pub read_only: bool,
    /// Whether no other pod may use the volume at the same time.
    pub exclusive: bool,
    /// The access modes of its manifest, such as `ReadWriteOncePod`: how many pods or nodes may use it at once.
    pub access_modes: Vec<String>,
    /// The mount options of its manifest.
    pub mount_options: Vec<String>,
    /// The bytes that the PersistentVolume has.
    pub capacity: Option<u64>,
    /// The bytes in the claim's status. They are fewer than `capacity` while the PersistentVolume has grown and its file system
    /// has not.
    pub claimed: Option<u64>,
    /// A group that containers need in order to use the volume (PV-04). The container runtime has to add it to them.
    pub gid: Option<u32>,
    /// Warnings for the user.
    pub warnings: Vec<String>,
}

/// The volume source of a PersistentVolume that podfs can serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BoundSource {
    /// A path of the node that the pod runs on, whichever node that is.
    HostPath(HostPath),
    /// A path of the node that the PersistentVolume belongs to.
    Local(Local),
    /// An export of an NFS server, and its mount options.
    Nfs(Nfs, Box<NfsOptions>),
    /// A volume of a FlexVolume driver on the node.
    Flex(Box<Flex>),
    /// A volume of a CSI driver on the node.
    Csi(Box<Csi>),
}

/// A directory or block device of this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Local {
    /// The path on this node; may be empty.
    pub path: String,
    /// The type of the file system on a block device. Without it, the type that the device has, or ext4 for a blank device.
    pub fs_type: Option<String>,
    /// Options of the mount of a block device. For a directory, which is not mounted, only `ro` has an effect.
    pub mount_options: Vec<String>,
}

impl Local {
    /// The directory in which the kubelet keeps such volumes.
    pub const DIRECTORY: &str = "kubernetes.io~local-volume";
}

impl BoundSource {
    /// The directory in which the kubelet keeps such volumes.
    pub fn directory(&self) -> Cow<'static, str> {
        match self {
            BoundSource::HostPath(_) => HostPath::DIRECTORY.into(),
            BoundSource::Local(_) => Local::DIRECTORY.into(),
            BoundSource::Nfs(..) => Nfs::DIRECTORY.into(),
            BoundSource::Flex(flex) => flex.directory().into(),
            BoundSource::Csi(_) => Csi::DIRECTORY.into(),
        }
    }
}

/// Why a claim gives no volume. The texts are the kubelet's if it has one (PV-01).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BindingError {
    /// The claim does not exist, or is not bound to a PersistentVolume whose `claimRef` names it.
    #[error("error processing PVC {namespace}/{name}: {problem}")]
    Claim {
        /// The claim's namespace.
        namespace: String,
        /// The claim's name.
        name: String,
        /// The obstacle.
        #[source]
        problem: ClaimProblem,
    },
    /// The claim has the name of an ephemeral volume's claim, but was not made for the pod (PV-02).
    #[error("PVC {namespace}/{claim} was not created for pod {namespace}/{pod} (pod is not owner)")]
    NotOwner {
        /// The namespace of claim and pod.
        namespace: String,
        /// The claim's name.
        claim: String,
        /// The pod's name.
        pod: String,
    },
    /// Containers use a file system as a block device, or a block device as a file system (PV-06).
    #[error("volume {volume} has volumeMode {mode}, but is specified in {place}")]
    Mode {
        /// The volume's name in the pod.
        volume: String,
        /// The volume's mode.
        mode: &'static str,
        /// The field of the container that names it: `volumeMounts` or `volumeDevices`.
        place: &'static str,
    },
    /// No container uses the block device.
    #[error(
        "volume {0} has volumeMode Block, and no container has it in volumeDevices; add it there, or remove the volume"
    )]
    Block(String),
    /// A PersistentVolume that podfs cannot serve.
    #[error("PersistentVolume {name:?} {problem}")]
    Unsupported {
        /// Its name.
        name: String,
        /// The reason.
        #[source]
        problem: VolumeProblem,
    },
    /// podfs does not know whether the PersistentVolume can be used on this node.
    #[error("error obtaining node labels: {0}")]
    NodeUnknown(String),
    /// The PersistentVolume cannot be used on this node (LP-04).
    #[error("MountVolume.NodeAffinity check failed for volume {0:?} : no matching NodeSelectorTerms")]
    NodeAffinity(String),
}

/// Why a claim is not bound to a PersistentVolume whose `claimRef` names it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClaimProblem {
    /// There is no claim, for this reason.
    #[error("failed to fetch PVC from API server: {0}")]
    Missing(String),
    /// The claim is being deleted, and no finalizer keeps it for its pods.
    #[error("PVC is being deleted")]
    Deleting,
    /// The claim is bound, but names no PersistentVolume.
    #[error("PVC has empty pvc.Spec.VolumeName")]
    NoVolumeName,
    /// No PersistentVolume was found for the claim yet.
    #[error("PVC is not bound")]
    Unbound,
    /// There is no PersistentVolume of the name, for this reason.
    #[error("failed to fetch PV {name} from API server: {reason}")]
    NoVolume {
        /// The name.
        name: String,
        /// The reason.
        reason: String,
    },
    /// The PersistentVolume has no `claimRef`.
    #[error("found PV object {0} but it has a nil pv.Spec.ClaimRef indicating it is not yet bound to the claim")]
    Free(String),
    /// The PersistentVolume is for an earlier claim of the name.
    #[error("found PV object {name} but its pv.Spec.ClaimRef.UID {theirs} does not point to claim.UID {own}")]
    OtherUid {
        /// The PersistentVolume.
        name: String,
        /// The uid in its `claimRef`.
        theirs: String,
        /// The claim's uid.
        own: String,
    },
    /// The PersistentVolume is for a claim of another name.
    #[error("found PV object {name} but its pv.Spec.ClaimRef {claim} does not point to the claim")]
    OtherClaim {
        /// The PersistentVolume.
        name: String,
        /// Namespace and name of that claim.
        claim: String,
    },
}

/// Why podfs cannot serve a PersistentVolume.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VolumeProblem {
    /// Its name cannot be the name of a directory.
    #[error("cannot name a directory; rename it")]
    Name,
    /// A field of its source is invalid.
    #[error("cannot be used: {0}")]
    Invalid(#[from] InvalidField),
    /// Its mount options are invalid.
    #[error("cannot be used: {0}")]
    MountOptions(#[from] NfsOptionsError),
    /// It has mount options, and podfs does not mount sources of its kind.
    #[error("cannot be used: mount options are not supported for this volume type")]
    NoMountOptions,
    /// podfs does not serve sources of its kind.
    #[error("is of kind {kind}; {instead}")]
    Kind {
        /// The kind.
        kind: String,
        /// The advice.
        instead: &'static str,
    },
}

/// Finds the PersistentVolume that the volume `volume` of a pod shows.
///
/// # Errors
/// The first obstacle; a change of the objects may remove it.
pub fn resolve(
    volume: &str,
    claim: &Claim,
    pod: &PodIdentity,
    facts: &PodFacts,
    objects: &Objects,
) -> Result<BoundVolume, BindingError> {
    let key = ClaimKey { namespace: pod.namespace.clone(), name: claim.reference.name(&pod.name, volume), uid: None };
    let failed = |problem: ClaimProblem| BindingError::Claim {
        namespace: key.namespace.clone(),
        name: key.name.clone(),
        problem,
    };
    let claim_object = objects.claim(&key.namespace, &key.name).ok_or_else(|| {
        let reason = match objects.why_absent(ObjectKind::PersistentVolumeClaim, &key.namespace, &key.name) {
            Some(reason) => reason.to_owned(),
            None => format!("persistentvolumeclaims {:?} not found", key.name),
        };
        failed(ClaimProblem::Missing(reason))
    })?;
    let is_owner = claim_object.controller.as_ref().is_some_and(|owner| is_pod(owner, pod));
    if claim.reference == ClaimReference::OfPod && !is_owner {
        return Err(BindingError::NotOwner { namespace: key.namespace, claim: key.name, pod: pod.name.clone() });
    }
    let name = volume_name(claim_object).map_err(failed)?;
    let persistent = objects.persistent_volume(name).ok_or_else(|| {
        let reason = match objects.why_absent(ObjectKind::PersistentVolume, "", name) {
            Some(reason) => reason.to_owned(),
            None => format!("persistentvolumes {name:?} not found"),
        };
        failed(ClaimProblem::NoVolume { name: name.to_owned(), reason })
    })?;
    check_back_reference(name, persistent.claim.as_ref(), &key, claim_object).map_err(failed)?;
    check_mode(volume, persistent.mode, claim.usage)?;
    let unsupported = |problem: VolumeProblem| BindingError::Unsupported { name: name.to_owned(), problem };
    if !is_path_element(name) {
        return Err(unsupported(VolumeProblem::Name));
    }
    let (source, read_only) = source(persistent).map_err(unsupported)?;
    let node = objects.node(facts.node_name.as_deref());
    let unknown = facts.node_name.as_deref().and_then(|node| objects.why_absent(ObjectKind::Node, "", node));
    let mut warnings = Vec::new();
    match (&persistent.nodes, node, unknown) {
        (Some(_), None, Some(reason)) => return Err(BindingError::NodeUnknown(reason.to_owned())),
        (Some(required), Some(node), _) if !affinity::matches(required, node) => {
            return Err(BindingError::NodeAffinity(name.to_owned()));
        }
        (Some(_), None, None) => warnings.push(format!(
            "whether PersistentVolume {name:?} may be used on this node is not checked: there is no Node object"
        )),
        _ => {}
    }
    Ok(BoundVolume {
        name: name.to_owned(),
        source,
        read_only: claim.read_only || read_only,
        exclusive: persistent.access_modes.iter().any(|mode| mode == "ReadWriteOncePod"),
        access_modes: persistent.access_modes.clone(),
        mount_options: persistent.mount_options.clone(),
        capacity: persistent.capacity,
        claimed: claim_object.capacity,
        gid: persistent.gid,
        warnings,
    })
}

/// The PersistentVolume that a claim names. A claim that is being deleted is refused, unless a finalizer keeps it for its pods.
fn volume_name(claim: &PersistentVolumeClaim) -> Result<&str, ClaimProblem> {
    if claim.deleting && !claim.protected {
        return Err(ClaimProblem::Deleting);
    }
    match (claim.phase.as_deref(), &claim.volume) {
        (Some("Bound") | None, Some(name)) => Ok(name),
        (Some("Bound"), None) => Err(ClaimProblem::NoVolumeName),
        _ => Err(ClaimProblem::Unbound),
    }
}

fn check_back_reference(
    name: &str,
    reference: Option<&ClaimKey>,
    key: &ClaimKey,
    claim: &PersistentVolumeClaim,
) -> Result<(), ClaimProblem> {
    let Some(reference) = reference else { return Err(ClaimProblem::Free(name.to_owned())) };
    match (&reference.uid, &claim.uid) {
        (Some(theirs), Some(own)) if theirs == own => Ok(()),
        (Some(theirs), Some(own)) => {
            let (name, theirs, own) = (name.to_owned(), theirs.clone(), own.clone());
            Err(ClaimProblem::OtherUid { name, theirs, own })
        }
        _ if (&reference.namespace, &reference.name) == (&key.namespace, &key.name) => Ok(()),
        _ => {
            let claim = format!("{}/{}", reference.namespace, reference.name);
            Err(ClaimProblem::OtherClaim { name: name.to_owned(), claim })
        }
    }
}

fn check_mode(volume: &str, mode: VolumeMode, usage: ClaimUsage) -> Result<(), BindingError> {
    let wrong = |mode, place| Err(BindingError::Mode { volume: volume.to_owned(), mode, place });
    match mode {
        VolumeMode::Block if usage.mounted => wrong("Block", "volumeMounts"),
        VolumeMode::Filesystem if usage.device => wrong("Filesystem", "volumeDevices"),
        VolumeMode::Block if !usage.device => Err(BindingError::Block(volume.to_owned())),
        VolumeMode::Block | VolumeMode::Filesystem => Ok(()),
    }
}

/// Whether the owner is the pod. In a manifest file, an owner may have no uid; then podfs compares kind and name.
fn is_pod(owner: &Controller, pod: &PodIdentity) -> bool {
    match &owner.uid {
        Some(uid) => uid == pod.uid.as_str(),
        None => owner.kind == "Pod" && owner.name == pod.name,
    }
}

/// Whether the name, as a part of a path, leads to no other directory.
fn is_path_element(name: &str) -> bool {
    let mut components = Path::new(name).components();
    matches!((components.next(), components.next()), (Some(Component::Normal(only)), None) if only == name)
}

/// The volume source of a PersistentVolume, and whether its mount options make it read-only.
fn source(persistent: &PersistentVolume) -> Result<(BoundSource, bool), VolumeProblem> {
    let options = &persistent.mount_options;
    match &persistent.source {
        PersistentSource::Local { path, fs_type } => {
            let local = Local {
                path: path.clone(),
                fs_type: fs_type.clone().filter(|kind| !kind.is_empty()),
                mount_options: options.clone(),
            };
            let read_only = options.iter().flat_map(|entry| mount_options(entry)).any(|word| word == "ro");
            Ok((BoundSource::Local(local), read_only))
        }
        PersistentSource::HostPath(source) => {
            let source = source.clone()?;
            match options.iter().all(|option| option.is_empty()) {
                true => Ok((BoundSource::HostPath(source), false)),
                false => Err(VolumeProblem::NoMountOptions),
            }
        }
        // The `readOnly` of the PersistentVolume does not count (NF-03, PV-07).
        PersistentSource::Nfs(source) => {
            let source = source.clone()?;
            let parsed = NfsOptions::parse(options.iter().map(String::as_str))?;
            let read_only = parsed.read_only;
            Ok((BoundSource::Nfs(source, Box::new(parsed)), read_only))
        }
        PersistentSource::Flex(source) => {
            let source = source.clone()?;
            match options.iter().all(|option| option.is_empty()) {
                true => Ok((BoundSource::Flex(source), false)),
                false => Err(VolumeProblem::NoMountOptions),
            }
        }
        // The driver gets the mount options.
        PersistentSource::Csi(source) => Ok((BoundSource::Csi(source.clone()?), false)),
        PersistentSource::Other(word) => {
            let instead = instead_of(word).unwrap_or("supported are hostPath, local, nfs, flexVolume and csi");
            Err(VolumeProblem::Kind { kind: word.clone(), instead })
        }
    }
}

#[cfg(test)]
mod tests;
