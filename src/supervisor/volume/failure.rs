//! Why a refresh of a volume failed.

use std::io;
use std::path::PathBuf;

use podfs_fuse::client::CommitError;
use podfs_fuse::mount::MountError;
use podfs_fuse::projection::ImageError;
use podfs_nfs::address::ExportAddress;
use podfs_nfs::mount::NfsMountError;

use crate::binding::BindingError;
use crate::driver::DriverError;
use crate::host::HostError;
use crate::host::empty_dir::PlanError;
use crate::payload::PayloadError;
use crate::supervisor::run_dir::mount_points::MountPointsError;
use crate::volume::nfs_options::BackendError;

/// Why a refresh failed: the cause, and what helps.
#[derive(Debug, thiserror::Error)]
pub(super) enum RefreshFailure {
    /// The pod's manifest or its objects are wrong or incomplete; only a change of them helps.
    #[error(transparent)]
    Manifests(RefreshCause),
    /// The failure may be temporary; podfs tries again.
    #[error(transparent)]
    Temporary(RefreshCause),
    /// This process can never mount the volume.
    #[error(transparent)]
    Permanent(MountError),
}

/// The cause of a refresh that failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum RefreshCause {
    /// podfs refuses the volume, and the sentence says why.
    #[error("{0}")]
    Refused(String),
    #[error(transparent)]
    Mount(#[from] MountError),
    #[error(transparent)]
    MountPoints(#[from] MountPointsError),
    #[error(transparent)]
    Host(#[from] HostError),
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error(transparent)]
    Payload(#[from] PayloadError),
    #[error(transparent)]
    Layout(#[from] ImageError),
    #[error(transparent)]
    Commit(#[from] CommitError),
    #[error(transparent)]
    Binding(#[from] BindingError),
    #[error(transparent)]
    EmptyDir(#[from] PlanError),
    #[error(transparent)]
    Export(#[from] NfsMountError),
    #[error("{export}: {cause}")]
    NfsBackend {
        export: ExportAddress,
        #[source]
        cause: BackendError,
    },
    #[error("no socket for NFS: {0}")]
    NfsSocket(#[source] io::Error),
    #[error("NFS server {server}: its address cannot be found: {cause}")]
    NfsAddress {
        server: String,
        #[source]
        cause: io::Error,
    },
    #[error("cannot lock {}: {cause}", .file.display())]
    Lock {
        file: PathBuf,
        #[source]
        cause: io::Error,
    },
}

impl RefreshFailure {
    pub(super) fn manifests(cause: impl Into<RefreshCause>) -> RefreshFailure {
        RefreshFailure::Manifests(cause.into())
    }

    pub(super) fn temporary(cause: impl Into<RefreshCause>) -> RefreshFailure {
        RefreshFailure::Temporary(cause.into())
    }

    pub(super) fn of_mount(error: MountError) -> RefreshFailure {
        match error {
            MountError::Privilege { .. } | MountError::Unsupported { .. } | MountError::NotFuse { .. } => {
                RefreshFailure::Permanent(error)
            }
            MountError::Occupied { .. } | MountError::Failed { .. } => RefreshFailure::temporary(error),
        }
    }
}

impl From<DriverError> for RefreshFailure {
    fn from(error: DriverError) -> RefreshFailure {
        RefreshFailure::temporary(error)
    }
}

impl From<HostError> for RefreshFailure {
    fn from(error: HostError) -> RefreshFailure {
        RefreshFailure::temporary(error)
    }
}

impl From<String> for RefreshCause {
    fn from(sentence: String) -> RefreshCause {
        RefreshCause::Refused(sentence)
    }
}

impl From<&str> for RefreshCause {
    fn from(sentence: &str) -> RefreshCause {
        RefreshCause::Refused(sentence.to_owned())
    }
}
