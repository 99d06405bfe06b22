//! The built-in plugins: one for each kind of volume that `podfs run` serves.

use super::VolumePlugin;
use crate::volume::{Volume, VolumeSource};

/// A built-in kind.
struct BuiltIn {
    name: &'static str,
    can_support: fn(&Volume) -> bool,
    requires_remount: bool,
    supports_mount_options: bool,
}

/// Kinds whose content follows objects of the cluster.
const PROJECTION: BuiltIn =
    BuiltIn { name: "", can_support: |_| false, requires_remount: true, supports_mount_options: false };
/// Kinds that show a directory of the node.
const DIRECTORY: BuiltIn = BuiltIn { requires_remount: false, ..PROJECTION };

const BUILT_IN: [BuiltIn; 9] = [
    BuiltIn { name: "kubernetes.io/configmap", can_support: |volume| volume.kind.word == "configMap", ..PROJECTION },
    BuiltIn { name: "kubernetes.io/secret", can_support: |volume| volume.kind.word == "secret", ..PROJECTION },
    BuiltIn {
        name: "kubernetes.io/downward-api",
        can_support: |volume| volume.kind.word == "downwardAPI",
        ..PROJECTION
    },
    BuiltIn { name: "kubernetes.io/projected", can_support: |volume| volume.kind.word == "projected", ..PROJECTION },
    BuiltIn {
        name: "kubernetes.io/host-path",
        can_support: |volume| matches!(volume.source, VolumeSource::HostPath(_)),
        ..DIRECTORY
    },
    BuiltIn {
        name: "kubernetes.io/empty-dir",
        can_support: |volume| matches!(volume.source, VolumeSource::EmptyDir(_)),
        ..DIRECTORY
    },
    BuiltIn {
        name: "kubernetes.io/nfs",
        can_support: |volume| matches!(volume.source, VolumeSource::Nfs(_)),
        supports_mount_options: true,
        ..DIRECTORY
    },
    BuiltIn {
        name: "kubernetes.io/flexvolume",
        can_support: |volume| matches!(volume.source, VolumeSource::Flex(_)),
        ..DIRECTORY
    },
    // The supervisor finds the PersistentVolume behind a claim, and with it the plugin that serves it.
    BuiltIn {
        name: "kubernetes.io/persistent-claim",
        can_support: |volume| matches!(volume.source, VolumeSource::Claim(_)),
        supports_mount_options: true,
        ..DIRECTORY
    },
];

pub(super) fn plugins() -> Vec<Box<dyn VolumePlugin>> {
    BUILT_IN.into_iter().map(|plugin| Box::new(plugin) as Box<dyn VolumePlugin>).collect()
}

impl VolumePlugin for BuiltIn {
    fn name(&self) -> &'static str {
        self.name
    }

    fn can_support(&self, volume: &Volume) -> bool {
        (self.can_support)(volume)
    }

    fn requires_remount(&self) -> bool {
        self.requires_remount
    }

    fn supports_mount_options(&self) -> bool {
        self.supports_mount_options
    }
}
