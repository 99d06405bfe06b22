//! The name of a volume in the server.

use serde::{Deserialize, Serialize};

/// The name of a volume, for log lines of the server. It comes only from the volume's
/// [identity](crate::client::VolumeIdentity) at its mount.
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
