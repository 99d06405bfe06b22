//! PersistentVolumes and the claims they are bound to.
//!
//! This module accepts what the API accepts: a PersistentVolume that podfs cannot serve is no error of its manifest; podfs
//! reports it for the volume that uses it.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1 as core;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::ObjectContent;
use super::metadata::{LongMetadata, Parsed};
use crate::manifest::{ManifestError, Origin};
use crate::types::{InvalidField, Quantity, mount_options};
use crate::volume::migration::{Context, access_modes, translate, typed};
use crate::volume::{Csi, Flex, HostPath, Nfs};

/// The annotation with mount options. It is older than the field `mountOptions`, and takes precedence over it.
const MOUNT_OPTIONS: &str = "volume.beta.kubernetes.io/mount-options";
/// The annotation with a group that containers need to use the volume.
const GID: &str = "pv.beta.kubernetes.io/gid";

/// Storage of the cluster.
#[derive(Clone, Debug, PartialEq)]
pub struct PersistentVolume {
    /// The volume source.
    pub source: PersistentSource,
    /// The claim it is bound to.
    pub claim: Option<ClaimKey>,
    /// Its volume mode.
    pub mode: VolumeMode,
    /// The access modes, such as `ReadWriteOncePod`: how many pods or nodes may use it at once.
    pub access_modes: Vec<String>,
    /// The nodes that can use it; `None` means all.
    pub nodes: Option<core::NodeSelector>,
    /// Options of its mount.
    pub mount_options: Vec<String>,
    /// A group that containers need to use it.
    pub gid: Option<u32>,
    /// Its capacity in bytes.
    pub capacity: Option<u64>,
}

/// The volume source of a PersistentVolume.
#[derive(Clone, Debug, PartialEq)]
pub enum PersistentSource {
    /// At a path of any node; podfs reports what is wrong with the path when the volume is used.
    HostPath(Result<HostPath, InvalidField>),
    /// At a path of the nodes it can be used on.
    Local {
        /// A directory or block device. It may be empty.
        path: String,
        /// The file system of a block device, if the manifest says it.
        fs_type: Option<String>,
    },
    /// At an NFS server; podfs reports what is wrong with the address when the volume is used.
    Nfs(Result<Nfs, InvalidField>),
    /// At a CSI driver of the node; podfs reports what is wrong with the description when the volume is used.
    Csi(Result<Box<Csi>, InvalidField>),
    /// At a FlexVolume driver of the node; podfs reports what is wrong with the description when the volume is used.
    Flex(Result<Box<Flex>, InvalidField>),
    /// A kind of storage that podfs cannot reach, by the name of its field in the manifest.
    Other(String),
}

/// The form in which containers get a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum VolumeMode {
    /// Directories and files.
    #[default]
    Filesystem,
    /// A block device.
    Block,
}

/// A claim, as a PersistentVolume names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimKey {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its uid, which a manifest file need not have.
    pub uid: Option<String>,
}

/// A user's claim, and the name of its PersistentVolume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PersistentVolumeClaim {
    /// Its uid, which a manifest file need not have.
    pub uid: Option<String>,
    /// Its phase, if it has a status.
    pub phase: Option<String>,
    /// The name of the PersistentVolume.
    pub volume: Option<String>,
    /// Its capacity in bytes, from its status.
    pub capacity: Option<u64>,
    /// It has a `deletionTimestamp`.
    pub deleting: bool,
    /// It has the finalizer that keeps it until no pod uses it.
    pub protected: bool,
    /// The object that manages it.
    pub controller: Option<Controller>,
}

/// The object that manages another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Controller {
    /// Its kind.
    pub kind: String,
    /// Its name.
    pub name: String,
    /// Its uid, which a manifest file need not have.
    pub uid: Option<String>,
}

#[derive(Deserialize)]
pub(super) struct PersistentVolumeObject {
    #[serde(default)]
    metadata: LongMetadata,
    #[serde(default)]
    spec: PersistentVolumeSpec,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PersistentVolumeSpec {
    host_path: Option<core::HostPathVolumeSource>,
    local: Option<core::LocalVolumeSource>,
    nfs: Option<core::NFSVolumeSource>,
    claim_ref: Option<core::ObjectReference>,
    volume_mode: Option<String>,
    access_modes: Option<Vec<String>>,
    capacity: Option<BTreeMap<String, Value>>,
    node_affinity: Option<core::VolumeNodeAffinity>,
    mount_options: Option<Vec<String>>,
    /// The other fields. Those that are objects are volume sources.
    #[serde(flatten)]
    others: Map<String, Value>,
}

pub(super) fn persistent_volume(object: PersistentVolumeObject, origin: &Origin) -> Result<Parsed, ManifestError> {
    let PersistentVolumeObject { metadata, spec } = object;
    let claim = spec.claim_ref.map(claim_key);
    let mut others = spec.others.iter().filter(|(_, value)| value.is_object());
    let other = others.next();
    let source = match (spec.host_path, spec.local, spec.nfs, other) {
        (Some(source), None, None, None) => PersistentSource::HostPath(HostPath::parse(&source)),
        (None, Some(source), None, None) => PersistentSource::Local { path: source.path, fs_type: source.fs_type },
        (None, None, Some(source), None) => PersistentSource::Nfs(Nfs::parse(&source)),
        (None, None, None, Some((word, fields))) if others.next().is_none() => {
            let context = Context {
                name: metadata.name.as_deref().unwrap_or_default(),
                labels: metadata.labels.as_ref(),
                annotations: metadata.annotations.as_ref(),
                claim_namespace: claim.as_ref().map(|claim| claim.namespace.as_str()),
            };
            match word.as_str() {
                "csi" => {
                    let csi = typed(fields).and_then(|source| Csi::parse_persistent(&source));
                    PersistentSource::Csi(csi.map(Box::new).map_err(|error| error.under(word)))
                }
                "flexVolume" => {
                    let flex = typed(fields).and_then(|source| Flex::parse_persistent(&source));
                    PersistentSource::Flex(flex.map(Box::new).map_err(|error| error.under(word)))
                }
                _ => match translate(word, fields, context) {
                    Some(csi) => PersistentSource::Csi(csi.map(Box::new).map_err(|error| error.under(word))),
                    None => PersistentSource::Other(word.clone()),
                },
            }
        }
        (None, None, None, None) => {
            let sentence = "must specify a volume type, such as hostPath, local or nfs";
            return Err(ManifestError::invalid(origin, "spec", sentence));
        }
        _ => return Err(ManifestError::invalid(origin, "spec", "may not specify more than 1 volume type")),
    };
    let annotation = |key: &str| metadata.annotations.as_ref().and_then(|annotations| annotations.get(key));
    let volume = PersistentVolume {
        source,
        claim,
        mode: volume_mode(spec.volume_mode.as_deref(), origin)?,
        access_modes: access_modes(other.map_or("", |(word, _)| word), spec.access_modes.unwrap_or_default()),
        nodes: spec.node_affinity.and_then(|affinity| affinity.required),
        mount_options: match annotation(MOUNT_OPTIONS) {
            Some(list) => mount_options(list).map(str::to_owned).collect(),
            None => spec.mount_options.unwrap_or_default(),
        },
        // podfs ignores an annotation that is no number, as the kubelet does.
        gid: annotation(GID).and_then(|gid| gid.parse().ok()),
        capacity: spec.capacity.as_ref().and_then(|capacity| bytes(capacity.get("storage")?)),
    };
    Ok(Parsed { metadata: metadata.short(), immutable: false, content: ObjectContent::PersistentVolume(volume) })
}

/// A quantity of bytes; `None` if it is invalid: only the growth of file systems depends on it.
fn bytes(quantity: &Value) -> Option<u64> {
    match quantity {
        Value::Number(number) => number.as_u64(),
        Value::String(text) => Quantity::parse(text).ok().and_then(|quantity| u64::try_from(quantity.units()).ok()),
        _ => None,
    }
}

fn claim_key(reference: core::ObjectReference) -> ClaimKey {
    ClaimKey {
        namespace: reference.namespace.filter(|text| !text.is_empty()).unwrap_or_else(|| "default".to_owned()),
        name: reference.name.unwrap_or_default(),
        uid: reference.uid.filter(|text| !text.is_empty()),
    }
}

fn volume_mode(word: Option<&str>, origin: &Origin) -> Result<VolumeMode, ManifestError> {
    match word {
        None | Some("" | "Filesystem") => Ok(VolumeMode::Filesystem),
        Some("Block") => Ok(VolumeMode::Block),
        Some(_) => Err(ManifestError::invalid(origin, "spec.volumeMode", "must be Filesystem or Block")),
    }
}

#[derive(Deserialize)]
pub(super) struct PersistentVolumeClaimObject {
    #[serde(default)]
    metadata: LongMetadata,
    #[serde(default)]
    spec: PersistentVolumeClaimSpec,
    status: Option<PersistentVolumeClaimStatus>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PersistentVolumeClaimSpec {
    volume_name: Option<String>,
}

#[derive(Deserialize)]
struct PersistentVolumeClaimStatus {
    phase: Option<String>,
    capacity: Option<BTreeMap<String, Value>>,
}

/// The finalizer that keeps a claim until no pod uses it.
const PROTECTION: &str = "kubernetes.io/pvc-protection";

pub(super) fn persistent_volume_claim(object: PersistentVolumeClaimObject) -> Parsed {
    let PersistentVolumeClaimObject { metadata, spec, status } = object;
    let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    let controller = metadata.owner_references.iter().flatten().find(|owner| owner.controller == Some(true));
    let claim = PersistentVolumeClaim {
        uid: given(&metadata.uid),
        phase: status.as_ref().and_then(|status| given(&status.phase)),
        capacity: status.and_then(|status| bytes(status.capacity?.get("storage")?)),
        volume: given(&spec.volume_name),
        deleting: metadata.deletion_timestamp.is_some(),
        protected: metadata.finalizers.iter().flatten().any(|finalizer| finalizer == PROTECTION),
        controller: controller.map(|owner| Controller {
            kind: owner.kind.clone().unwrap_or_default(),
            name: owner.name.clone().unwrap_or_default(),
            uid: given(&owner.uid),
        }),
    };
    Parsed { metadata: metadata.short(), immutable: false, content: ObjectContent::PersistentVolumeClaim(claim) }
}
