//! A volume that an earlier supervisor has mounted, and that supervisor's record of the volume. The bytes of [`VolumeRecord`]
//! are a format: other versions of podfs read them.

use std::io;
use std::path::PathBuf;

use podfs_fuse::client::AdoptedVolume;
use podfs_fuse::mount::point::MountPoint;
use podfs_fuse::mount::visible::VisibleMount;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::types::{UnusableRecord, parse_record};

/// What a supervisor records of a volume, besides its name, for the supervisor that adopts the volume.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(in crate::supervisor) struct VolumeRecord {
    /// The path of the volume's visible mount.
    pub(in crate::supervisor) path: PathBuf,
    /// A group that containers need to use the volume.
    #[serde(default)]
    pub(in crate::supervisor) group: Option<u32>,
    /// Whether the visible mount is read-only; `None` in a record of an earlier version of podfs.
    #[serde(default)]
    pub(in crate::supervisor) read_only: Option<bool>,
    /// The name of the volume's claim. `None` for a volume without a claim, and in a record of an earlier version of podfs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::supervisor) claim: Option<String>,
}

impl VolumeRecord {
    /// The record of a volume that a server serves.
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`] when only another version of podfs can use the record.
    pub(in crate::supervisor) fn of_served(about: &Value) -> io::Result<VolumeRecord> {
        parse_record(about.to_string().as_bytes()).map_err(|error: UnusableRecord| {
            let sentence = format!("podfs cannot use the record of a volume: {error}");
            io::Error::new(io::ErrorKind::Unsupported, sentence)
        })
    }
}

/// A volume that the adopted server serves, and whose mount is kept.
pub(in crate::supervisor) struct KeptVolume {
    pub(in crate::supervisor) record: VolumeRecord,
    pub(in crate::supervisor) served: AdoptedVolume,
    pub(in crate::supervisor) point: MountPoint,
    pub(in crate::supervisor) visible: VisibleMount,
    /// Earlier mounts of the volume, which containers may still use.
    pub(in crate::supervisor) earlier: Vec<AdoptedVolume>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::golden::{golden, parts};

    #[test]
    fn a_record_has_the_bytes_that_other_versions_read() {
        let records = parts::<VolumeRecord>(golden!("adopted-volumes.jsonl"));
        assert_eq!((records[0].group, records[0].claim.as_deref()), (Some(7), Some("data")));
        assert_eq!((records[1].read_only, records[1].claim.as_deref()), (None, None));
    }

    #[test]
    fn a_record_that_only_another_version_can_use_is_refused() {
        for unknown in [r#"{"version":2,"path":"/p"}"#, r#"{"paths":["/p"]}"#, "7"] {
            let about = serde_json::from_str(unknown).expect("JSON");
            let refused = VolumeRecord::of_served(&about).expect_err(unknown);
            assert_eq!(refused.kind(), io::ErrorKind::Unsupported);
            assert!(refused.to_string().ends_with("use the podfs that wrote it"), "{refused}");
        }
    }
}
