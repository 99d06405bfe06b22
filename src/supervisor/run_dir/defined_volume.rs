//! The definition of a volume in the pod's record. After a crash, containers may use a volume whose definition in the manifest was
//! changed meanwhile. So the next `podfs run` serves the volume as it was, while it is mounted.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tracing::warn;

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
    /// The definitions in a record. Leaves out those that this version of podfs cannot read.
    pub(super) fn of_record(definitions: Vec<Value>) -> Vec<DefinedVolume> {
        let unreadable = |error: &_| warn!("podfs cannot read a recorded definition of a volume: {error}");
        definitions
            .into_iter()
            .filter_map(|definition| serde_json::from_value(definition).inspect_err(unreadable).ok())
            .collect()
    }

    /// The definitions of the volumes of a manifest.
    pub fn of_manifest(pod: &Pod, published: bool) -> impl Iterator<Item = DefinedVolume> {
        pod.definitions.iter().map(move |definition| DefinedVolume { definition: definition.clone(), published })
    }
}
