//! A volume that an earlier supervisor has mounted, and what that recorded of it. The bytes of [`VolumeRecord`] are a format:
//! other versions of podfs read them.

use std::path::PathBuf;

use podfs_fuse::client::AdoptedVolume;
use podfs_fuse::mount::visible::{MountPoint, VisibleMount};
use serde::{Deserialize, Serialize};

/// What a supervisor records of a volume for the one that adopts it, beside its name.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(in crate::supervisor) struct VolumeRecord {
    /// Where it is visible.
    pub(in crate::supervisor) path: PathBuf,
    /// A group that containers need to use it.
    #[serde(default)]
    pub(in crate::supervisor) group: Option<u32>,
    /// Whether it is visible read-only; `None` from an earlier version of podfs.
    #[serde(default)]
    pub(in crate::supervisor) read_only: Option<bool>,
}

/// A volume that is served and visible already.
pub(in crate::supervisor) struct KeptVolume {
    pub(in crate::supervisor) about: VolumeRecord,
    pub(in crate::supervisor) served: AdoptedVolume,
    pub(in crate::supervisor) point: MountPoint,
    pub(in crate::supervisor) visible: VisibleMount,
}
