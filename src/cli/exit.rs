//! Converts errors of commands to exit codes, and says sentences on standard error.

pub(super) use crate::supervisor::program::failure::Failure;

use crate::source::StartError;
use crate::view::ViewError;

/// A sentence for people, on standard error.
pub(in crate::cli) fn say(sentence: &str) {
    podfs_fuse::log::say("podfs", sentence);
}

impl From<StartError> for Failure {
    fn from(error: StartError) -> Self {
        match error {
            StartError::Thread(_) | StartError::Refused { is_final: false, .. } => Self::general(error),
            _ => Self::input(error),
        }
    }
}

impl From<ViewError> for Failure {
    fn from(error: ViewError) -> Self {
        match error {
            ViewError::Directory(_)
            | ViewError::NotOwned { .. }
            | ViewError::Occupied(_)
            | ViewError::Dead(_)
            | ViewError::AllowOther => Self::input(error),
            ViewError::NoProgram | ViewError::Program(_) | ViewError::Device(_) | ViewError::Refused { .. } => {
                Self::machine(error)
            }
            ViewError::Session { .. } | ViewError::Unmount { .. } => Self::general(error),
        }
    }
}
