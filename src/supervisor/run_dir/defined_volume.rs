//! The definition of a volume in the pod's record. After a crash, containers may use a volume whose definition in the manifest was
//! changed meanwhile. So the next `podfs run` serves the volume as it was, while it is mounted.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::manifest::pod::{Pod, VolumeDefinition};

/// A volume as podfs serves it. The bytes are a format: other versions of podfs read them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DefinedVolume {
    /// Its definition.
    #[serde(flatten)]
    pub definition: VolumeDefinition,
    /// Whether an agent has published it. Then the agent decides, by the manifest that it writes, how long the volume stays.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub published: bool,
}

impl DefinedVolume {
    /// The definitions in a record.
    ///
    /// # Errors
    /// When this version of podfs cannot read one. podfs must not unmount its volume then, which containers may use.
    pub(super) fn of_record(definitions: Vec<Value>) -> serde_json::Result<Vec<DefinedVolume>> {
        definitions.into_iter().map(serde_json::from_value).collect()
    }

    /// The definitions of the volumes of a manifest.
    pub fn of_manifest(pod: &Pod, published: bool) -> impl Iterator<Item = DefinedVolume> {
        pod.definitions.iter().map(move |definition| DefinedVolume { definition: definition.clone(), published })
    }
}
