//! Two properties of a container's mount: its propagation, and whether the mounts below it are read-only, too.

use super::Propagation;
use crate::manifest::pod::Mount;

/// The propagation that a volumeMount asks for (MT-04).
///
/// # Errors
/// An unknown word, and `Bidirectional` without the privilege.
pub(super) fn propagation(mount: &Mount, privileged: bool) -> Result<Propagation, PropagationError> {
    match mount.propagation.as_deref() {
        None | Some("None") => Ok(Propagation::Private),
        Some("HostToContainer") => Ok(Propagation::HostToContainer),
        Some("Bidirectional") if privileged => Ok(Propagation::Bidirectional),
        Some("Bidirectional") => Err(PropagationError::WithoutPrivilege(mount.volume.clone())),
        Some(other) => Err(PropagationError::Unknown(other.to_owned())),
    }
}

/// Whether the mounts below a container's mount are read-only, too (MT-05).
///
/// # Errors
/// When the volumeMount requires that, and it is impossible.
pub(super) fn recursive_read_only(mount: &Mount, is_supported: bool) -> Result<bool, RecursiveReadOnlyError> {
    let volume = || mount.volume.clone();
    let mode = match mount.recursive_read_only.as_deref() {
        None | Some("Disabled") => return Ok(false),
        Some(mode) => mode,
    };
    if !mount.read_only {
        return Err(RecursiveReadOnlyError::Writable(volume()));
    }
    if let Some(propagation) = mount.propagation.as_deref().filter(|propagation| *propagation != "None") {
        return Err(RecursiveReadOnlyError::Propagated(volume(), propagation.to_owned()));
    }
    match mode {
        "IfPossible" => Ok(is_supported),
        "Enabled" if is_supported => Ok(true),
        "Enabled" => Err(RecursiveReadOnlyError::Unsupported(volume())),
        other => Err(RecursiveReadOnlyError::Unknown(other.to_owned())),
    }
}

/// Why podfs cannot give a mount the propagation of its volumeMount.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum PropagationError {
    /// A word that is no mount propagation.
    #[error("invalid MountPropagation mode: {0:?}")]
    Unknown(String),
    /// Mounts of the container would reach the host.
    #[error("volumeMount {0:?}: Bidirectional mount propagation is available only to privileged containers")]
    WithoutPrivilege(String),
}

/// Why the mounts below a mount cannot be made read-only, in the kubelet's words.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecursiveReadOnlyError {
    /// The mount itself is not read-only.
    #[error("volume {0:?} requested recursive read-only mode, but it is not read-only")]
    Writable(String),
    /// Mounts of the host would appear in it.
    #[error("volume {0:?} requested recursive read-only mode, but it is not compatible with propagation {1:?}")]
    Propagated(String, String),
    /// The runtime cannot make the mounts below a mount read-only.
    #[error("volume {0:?} requested recursive read-only mode, but it is not supported by the runtime")]
    Unsupported(String),
    /// The API does not know the word.
    #[error("unknown recursive read-only mode {0:?}")]
    Unknown(String),
}
