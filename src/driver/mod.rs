//! Drivers of other vendors: programs and services of the node that mount volumes for podfs, as they do for a kubelet.
//!
//! A driver mounts a volume at a directory that only podfs uses, the volume's [`DriverHome`]; podfs shows it to the pod as it shows
//! a directory of the node. So a container never sees the driver's own mount, and the code for hostPath volumes serves it.
//!
//! | module | owns |
//! |---|---|
//! | `home` | where a driver mounts a volume for a pod, and the record of it |
//! | `node_mount` | one mount for each node, which the mounts of pods are made from |
//! | [`csi`] | CSI drivers: services that speak gRPC |
//! | [`flex`] | FlexVolume drivers: programs that print JSON |
//!
//! When podfs is killed, the next podfs can undo everything that a driver has done:
//! 1. podfs writes the record of a home before the first call of the driver, and updates it before each call with what the driver
//!    may have done. It removes the record after the last call.
//! 2. A call that ended without a definite answer counts as done: podfs repeats it, or undoes it.
//! 3. [`undo`] needs only a home. The process that removes the pod calls it: its supervisor, the next one, or a cleanup.

pub mod csi;
pub mod flex;
mod home;
mod node_mount;

use std::error::Error;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use home::{DriverHome, DriverRecord};
pub use node_mount::NodeMount;

use podfs_fuse::mount::MountError;

use crate::host::HostError;

/// Where the drivers of the node are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drivers {
    /// The root directory, below which pods and drivers have their directories.
    pub root: PathBuf,
    /// The directory with a directory for each FlexVolume driver.
    pub flex_volumes: PathBuf,
}

/// Why a driver did not do what it was called for.
#[derive(Clone, Debug)]
pub struct DriverError {
    /// The failure, and the advice.
    pub sentence: String,
    /// Whether the driver may have done it all the same.
    pub is_uncertain: bool,
    /// Whether the driver cannot do it with these arguments at any time.
    pub is_infeasible: bool,
    /// The error that the sentence is about, if it is not the driver's.
    cause: Option<Arc<dyn Error + Send + Sync>>,
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sentence)
    }
}

/// Gives the cause itself, and not its `Arc`, as thiserror would.
impl Error for DriverError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.cause.as_deref().map(|cause| cause as &(dyn Error + 'static))
    }
}

impl DriverError {
    /// The driver has not done it.
    pub(crate) fn refused(sentence: impl Into<String>) -> DriverError {
        DriverError { sentence: sentence.into(), is_uncertain: false, is_infeasible: false, cause: None }
    }

    /// The driver may have done it.
    pub(crate) fn uncertain(sentence: impl Into<String>) -> DriverError {
        DriverError { sentence: sentence.into(), is_uncertain: true, is_infeasible: false, cause: None }
    }

    /// The driver was not called, or not reached, because of this error.
    pub(crate) fn because(sentence: impl Into<String>, cause: impl Error + Send + Sync + 'static) -> DriverError {
        DriverError { cause: Some(Arc::new(cause)), ..DriverError::refused(sentence) }
    }

    /// The node refused.
    pub(crate) fn of_node(what: &str, path: &Path, cause: io::Error) -> DriverError {
        DriverError::because(format!("cannot {what} {}: {cause}", path.display()), cause)
    }
}

impl From<HostError> for DriverError {
    fn from(error: HostError) -> DriverError {
        DriverError::because(error.to_string(), error)
    }
}

/// Why something of a driver's volume is left.
#[derive(Debug, thiserror::Error)]
pub enum UndoError {
    /// The directory of the volume stays.
    #[error("cannot remove {}: {cause}", .home.display())]
    Home {
        /// The directory.
        home: PathBuf,
        /// The kernel's error.
        #[source]
        cause: io::Error,
    },
    /// The driver has not undone its part.
    #[error("volume {volume:?}: {cause}")]
    Volume {
        /// The volume.
        volume: String,
        /// Why not.
        #[source]
        cause: LeaveError,
    },
}

/// Why a volume is not unmounted from a pod, or from the node.
#[derive(Debug, thiserror::Error)]
pub enum LeaveError {
    /// The driver refuses, or does not answer.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The node's shared mount cannot be looked at.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The CSI driver says what is not so.
    #[error("CSI driver {driver} says that it has unpublished the volume, but {} is still mounted", .target.display())]
    StillPublished {
        /// The driver.
        driver: String,
        /// The mount.
        target: PathBuf,
    },
    /// The FlexVolume driver says what is not so.
    #[error("cannot unmount {}: the driver says that it has, but it is still mounted", .0.display())]
    StillMounted(PathBuf),
    /// The kernel does not unmount it.
    #[error("cannot unmount {}: {cause}", .target.display())]
    Unmount {
        /// The mount.
        target: PathBuf,
        /// Why not.
        #[source]
        cause: UnmountError,
    },
    /// A mount of the driver's stays, which the kernel does not unmount.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// The record of the node's mount cannot be changed.
    #[error("cannot leave {}: {cause}", .directory.display())]
    Leave {
        /// The directory of the node's mount.
        directory: PathBuf,
        /// The kernel's error.
        #[source]
        cause: io::Error,
    },
    /// The directory of the node's mount stays.
    #[error("cannot remove {}: {cause}", .directory.display())]
    Remove {
        /// The directory.
        directory: PathBuf,
        /// The kernel's error.
        #[source]
        cause: io::Error,
    },
}

/// Why the kernel does not unmount a volume of a driver.
#[derive(Debug, thiserror::Error)]
pub enum UnmountError {
    /// The mount table cannot be read.
    #[error(transparent)]
    MountTable(#[from] io::Error),
    /// The mount stays.
    #[error(transparent)]
    Mount(#[from] MountError),
}

/// Undoes what drivers have done for a volume of a pod, and removes its home. Blocks for as long as the driver takes.
///
/// # Errors
/// What is left, and why. It can be tried again.
pub fn undo(home: &DriverHome) -> Result<(), UndoError> {
    let remove = || home.remove().map_err(|cause| UndoError::Home { home: home.path().to_owned(), cause });
    let Some(record) = home.read() else {
        return remove();
    };
    let undone = match &record.executable {
        Some(_) => flex::undo(home, &record),
        None => csi::undo(home, &record),
    };
    undone.map_err(|cause| UndoError::Volume { volume: record.volume.clone(), cause })?;
    remove()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_the_node_keeps_its_causes() {
        let kernel = io::Error::from(io::ErrorKind::PermissionDenied);
        let error = DriverError::from(HostError::system("use", Path::new("/d"), kernel));
        assert_eq!(error.to_string(), "cannot use /d: permission denied");
        let host = error.source().and_then(|source| source.downcast_ref::<HostError>()).expect("the error of the node");
        let kernel = Error::source(host).and_then(|source| source.downcast_ref::<io::Error>()).expect("the kernel's");
        assert_eq!(kernel.kind(), io::ErrorKind::PermissionDenied);
    }
}
