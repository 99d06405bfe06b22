//! The built-in plugins: one for each kind of volume that `podfs run` serves.

use super::VolumePlugin;
use crate::volume::{Volume, VolumeSource};

/// A built-in kind: its name, and whether a volume is of the kind.
struct BuiltIn(&'static str, fn(&Volume) -> bool);

const BUILT_IN: [BuiltIn; 10] = [
    BuiltIn("kubernetes.io/configmap", |volume| volume.kind.field == "configMap"),
    BuiltIn("kubernetes.io/secret", |volume| volume.kind.field == "secret"),
    BuiltIn("kubernetes.io/downward-api", |volume| volume.kind.field == "downwardAPI"),
    BuiltIn("kubernetes.io/projected", |volume| volume.kind.field == "projected"),
    BuiltIn("kubernetes.io/host-path", |volume| matches!(volume.source, VolumeSource::HostPath(_))),
    BuiltIn("kubernetes.io/empty-dir", |volume| matches!(volume.source, VolumeSource::EmptyDir(_))),
    BuiltIn("kubernetes.io/nfs", |volume| matches!(volume.source, VolumeSource::Nfs(..))),
    BuiltIn("kubernetes.io/flexvolume", |volume| matches!(volume.source, VolumeSource::Flex(_))),
    BuiltIn("kubernetes.io/csi", |volume| matches!(volume.source, VolumeSource::Csi(_))),
    // The supervisor finds the PersistentVolume behind a claim, and with it the plugin that serves it.
    BuiltIn("kubernetes.io/persistent-claim", |volume| matches!(volume.source, VolumeSource::Claim(_))),
];

pub(super) fn plugins() -> Vec<Box<dyn VolumePlugin>> {
    BUILT_IN.into_iter().map(|plugin| Box::new(plugin) as Box<dyn VolumePlugin>).collect()
}

impl VolumePlugin for BuiltIn {
    fn name(&self) -> &'static str {
        self.0
    }

    fn can_support(&self, volume: &Volume) -> bool {
        (self.1)(volume)
    }
}
