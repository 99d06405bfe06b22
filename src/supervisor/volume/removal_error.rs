//! Why podfs could not remove a volume, or a part of one.

use std::path::PathBuf;

use podfs_fuse::mount::MountError;

use crate::driver::UndoError;
use crate::host::HostError;
use crate::supervisor::run_dir::mount_points::MountPointsError;

/// Why a volume, or a leftover of an earlier supervisor, is still on the node.
#[derive(Debug, thiserror::Error)]
pub(in crate::supervisor) enum RemovalError {
    /// A driver failed to undo its calls. Its error names the volume.
    #[error(transparent)]
    Driver(#[from] UndoError),
    /// A mount, a file or a directory of a volume of the pod stays.
    #[error("volume {volume:?}: {cause}")]
    Volume {
        volume: String,
        #[source]
        cause: RemovalCause,
    },
    /// A mount or a directory of an earlier supervisor stays.
    #[error("podfs cannot remove {} of an earlier podfs: {cause}", .path.display())]
    OfEarlier {
        path: PathBuf,
        #[source]
        cause: RemovalCause,
    },
}

/// The cause of a [`RemovalError`].
#[derive(Debug, thiserror::Error)]
pub(in crate::supervisor) enum RemovalCause {
    #[error(transparent)]
    Mount(#[from] MountError),
    #[error(transparent)]
    Files(#[from] HostError),
    /// A part of the content of an emptyDir stays. The text names it.
    #[error("{0}")]
    Content(String),
    #[error(transparent)]
    MountPoints(#[from] MountPointsError),
    #[error("podfs cannot unmount a subPath: {0}")]
    SubPath(#[source] MountPointsError),
}
