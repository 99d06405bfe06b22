//! Volume plugins: the properties of a kind of volume that the manager needs, as in the kubelet's `VolumePlugin`.
//!
//! A plugin names its volumes. It mounts nothing: the pod's supervisor mounts the volumes. The kinds of
//! `podfs run` are the built-in plugins (`built_in`).

mod built_in;

use std::fmt;

use crate::manifest::pod::PodUid;
use crate::volume::Volume;

/// A kind of volume.
pub trait VolumePlugin: Send + Sync {
    /// Its name: `kubernetes.io/configmap`.
    fn name(&self) -> &'static str;

    /// Whether it serves this volume of a pod.
    fn can_support(&self, volume: &Volume) -> bool;

    /// The name of the volume on the node. Volumes with one name are one volume: they share attachment and device.
    fn unique_volume_name(&self, pod: &PodUid, volume: &str) -> String {
        format!("{}/{pod}-{volume}", self.name())
    }
}

/// Why there is no plugin for a volume. The texts are those of the kubelet.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PluginError {
    /// No plugin serves it.
    #[error(
        "no volume plugin matched: volume {volume:?} is of kind {kind}; remove it, or use a kind that podfs serves"
    )]
    NoneMatched {
        /// The volume's name in the pod.
        volume: String,
        /// Its kind.
        kind: String,
    },
    /// Two plugins or more claim to serve it.
    #[error("multiple volume plugins matched: {}", .0.join(","))]
    Several(Vec<&'static str>),
    /// Two plugins have one name.
    #[error("volume plugin {0:?} was registered more than once")]
    Twice(&'static str),
}

/// The plugins of the node.
pub struct PluginRegistry(Vec<Box<dyn VolumePlugin>>);

impl PluginRegistry {
    /// The kinds of volume that `podfs run` serves.
    pub fn built_in() -> PluginRegistry {
        PluginRegistry(built_in::plugins())
    }

    /// A registry of these plugins.
    ///
    /// # Errors
    /// When two have one name.
    pub fn new(plugins: Vec<Box<dyn VolumePlugin>>) -> Result<PluginRegistry, PluginError> {
        let names: Vec<_> = plugins.iter().map(|plugin| plugin.name()).collect();
        match names.iter().enumerate().find(|(index, name)| names[..*index].contains(name)) {
            Some((_, name)) => Err(PluginError::Twice(name)),
            None => Ok(PluginRegistry(plugins)),
        }
    }

    /// The plugin that serves a volume.
    ///
    /// # Errors
    /// When no plugin takes the volume, or more than one.
    pub fn find(&self, volume: &Volume) -> Result<&dyn VolumePlugin, PluginError> {
        let mut matching = self.0.iter().filter(|plugin| plugin.can_support(volume));
        match (matching.next(), matching.next()) {
            (Some(plugin), None) => Ok(plugin.as_ref()),
            (None, _) => {
                Err(PluginError::NoneMatched { volume: volume.name.to_string(), kind: volume.field().to_owned() })
            }
            (Some(first), Some(second)) => {
                let names = [first, second].into_iter().chain(matching).map(|plugin| plugin.name());
                Err(PluginError::Several(names.collect()))
            }
        }
    }
}

impl fmt::Debug for PluginRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|plugin| plugin.name())).finish()
    }
}

#[cfg(test)]
mod tests;
