//! The name of a volume, as the server has it.

use serde::{Deserialize, Serialize};

/// The name of a volume, for log lines of the server. A volume gets it when it is mounted, from its
/// [identity](crate::client::VolumeIdentity), and from nowhere else.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct VolumeLabel(String);

impl VolumeLabel {
    pub(crate) fn new(name: &str) -> Self {
        Self(name.to_owned())
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}
