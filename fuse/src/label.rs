//! The name of a volume in the server.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The field for the name in the subject of the access log and in the record about a volume.
pub(crate) const NAME: &str = "volume";

/// The name of a volume, for log lines of the server. It comes only from the volume's
/// [identity](crate::client::VolumeIdentity) at its mount.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct VolumeLabel(String);

impl VolumeLabel {
    pub(crate) fn new(name: &str) -> Self {
        Self(name.to_owned())
    }

    /// The label of the volume that a record is about.
    pub(crate) fn in_record(about: &Value) -> Self {
        Self::new(name_in(about).unwrap_or_default())
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The name in the record about a volume.
pub(crate) fn name_in(about: &Value) -> Option<&str> {
    about[NAME].as_str()
}
