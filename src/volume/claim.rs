//! persistentVolumeClaim and ephemeral volumes: the PersistentVolume that a claim is bound to.

use k8s_openapi::api::core::v1 as core;

use super::{VolumeSource, VolumeType, VolumeUses};
use crate::types::{InvalidField, required};

pub(super) const KIND: VolumeType = VolumeType {
    field: "persistentVolumeClaim",
    directory: None,
    parse: |volume, containers| {
        let source = volume.persistent_volume_claim.as_ref()?;
        let name = required("claimName", Some(&source.claim_name));
        let claim = name.map(|name| Claim {
            reference: ClaimReference::Named(name.to_owned()),
            read_only: source.read_only.unwrap_or(false),
            usage: ClaimUsage::of(&volume.name, containers),
        });
        Some(claim.map(VolumeSource::Claim))
    },
};

pub(super) const EPHEMERAL: VolumeType = VolumeType {
    field: "ephemeral",
    directory: None,
    parse: |volume, containers| {
        let source = volume.ephemeral.as_ref()?;
        let claim = Claim {
            reference: ClaimReference::OfPod,
            read_only: false,
            usage: ClaimUsage::of(&volume.name, containers),
        };
        let template = source.volume_claim_template.as_ref();
        let template = template.ok_or_else(|| InvalidField::new("volumeClaimTemplate", "is required"));
        Some(template.map(|_| VolumeSource::Claim(claim)))
    },
};

/// A PersistentVolumeClaim of the pod's namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The claim's name, or the volume that it was made for.
    pub reference: ClaimReference,
    /// Whether containers can only read the volume.
    pub read_only: bool,
    /// Whether containers mount the volume or use it as a block device.
    pub usage: ClaimUsage,
}

/// The way in which a volume of a pod names its claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClaimReference {
    /// By the claim's name.
    Named(String),
    /// The claim was made for this volume of the pod: a generic ephemeral volume.
    OfPod,
}

impl ClaimReference {
    /// The claim's name. That of an ephemeral volume consists of the names of the pod and of the volume.
    pub fn name(&self, pod: &str, volume: &str) -> String {
        match self {
            ClaimReference::Named(name) => name.clone(),
            ClaimReference::OfPod => format!("{pod}-{volume}"),
        }
    }
}

/// Whether containers use a volume as a file system, as a block device, or both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClaimUsage {
    /// It is in the `volumeMounts` of a container.
    pub mounted: bool,
    /// It is in the `volumeDevices` of a container.
    pub device: bool,
}

impl ClaimUsage {
    fn of(volume: &str, containers: &VolumeUses<'_>) -> ClaimUsage {
        let VolumeUses { mounts, devices } = containers;
        ClaimUsage {
            mounted: mounts.iter().any(|mounts| mounts.iter().any(|mount: &core::VolumeMount| mount.name == volume)),
            device: devices.iter().any(|devices| devices.iter().any(|device| device.name == volume)),
        }
    }
}
