//! Drivers of other vendors: programs and services of the node that mount volumes for podfs, as they do for a kubelet.
//!
//! A driver mounts a volume at a place that only podfs uses, the volume's [`Home`]; podfs shows that to the pod as it shows a
//! directory of the node. So a container never sees the driver's own mount, and the code for hostPath volumes serves it.
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

use std::io;
use std::path::{Path, PathBuf};

pub use home::{Home, Record};
pub use node_mount::NodeMount;

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
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{sentence}")]
pub struct DriverError {
    /// What went wrong, and what to do.
    pub sentence: String,
    /// Whether the driver may have done it all the same.
    pub is_uncertain: bool,
    /// Whether the driver cannot do it with these arguments at any time.
    pub is_infeasible: bool,
}

impl DriverError {
    /// The driver has not done it.
    pub(crate) fn refused(sentence: impl Into<String>) -> DriverError {
        DriverError { sentence: sentence.into(), is_uncertain: false, is_infeasible: false }
    }

    /// The driver may have done it.
    pub(crate) fn uncertain(sentence: impl Into<String>) -> DriverError {
        DriverError { sentence: sentence.into(), is_uncertain: true, is_infeasible: false }
    }

    /// The node refused.
    pub(crate) fn of_node(what: &str, path: &Path, cause: &io::Error) -> DriverError {
        DriverError::refused(format!("cannot {what} {}: {cause}", path.display()))
    }
}

impl From<HostError> for DriverError {
    fn from(error: HostError) -> DriverError {
        DriverError::refused(error.to_string())
    }
}

/// Undoes what drivers have done for a volume of a pod, and removes its home. Blocks for as long as the driver takes.
///
/// # Errors
/// What is left, and why. It can be tried again.
pub fn undo(home: &Home) -> Result<(), String> {
    let Some(record) = home.read() else {
        return home.remove().map_err(|error| format!("cannot remove {}: {error}", home.path().display()));
    };
    let undone = match &record.executable {
        Some(_) => flex::undo(home, &record),
        None => csi::undo(home, &record),
    };
    undone.map_err(|error| format!("volume {:?}: {error}", record.volume))?;
    home.remove().map_err(|error| format!("cannot remove {}: {error}", home.path().display()))
}
