//! How a program reports that it failed: an exit code and one sentence.

use std::fmt;
use std::process::ExitCode;

use podfs_fuse::mount::MountError;
use podfs_fuse::printable::printable;

use crate::manifest::ManifestError;
use crate::source::SourceError;
use crate::supervisor::SupervisorError;
use crate::supervisor::run_dir::claim::PodLockError;

/// A failure and its exit code. The codes are part of the node agent's contract.
#[derive(Debug)]
pub(crate) struct Failure {
    code: u8,
    error: anyhow::Error,
}

impl Failure {
    /// A failure with exit code 1.
    pub(crate) fn general(error: impl Into<anyhow::Error>) -> Self {
        Self { code: 1, error: error.into() }
    }

    /// A failure with exit code 2: bad arguments or a bad manifest.
    pub(crate) fn input(error: impl Into<anyhow::Error>) -> Self {
        Self { code: 2, error: error.into() }
    }

    /// A failure with exit code 3: a privilege, a kernel feature or a program of podfs is missing.
    pub(crate) fn machine(error: impl Into<anyhow::Error>) -> Self {
        Self { code: 3, error: error.into() }
    }

    /// Prints the sentence on standard error, and returns the exit code.
    pub(crate) fn report(self) -> ExitCode {
        // One write(2) for the whole line, because a server may write to the same standard error.
        let line = format!("podfs: {}\n", printable(&self.to_string()));
        podfs_fuse::log::write_unless_stuck(line.as_bytes());
        ExitCode::from(self.code)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl From<ManifestError> for Failure {
    fn from(error: ManifestError) -> Self {
        Self::input(error)
    }
}

impl From<SourceError> for Failure {
    fn from(error: SourceError) -> Self {
        Self::input(error)
    }
}

impl From<PodLockError> for Failure {
    fn from(error: PodLockError) -> Self {
        match error {
            PodLockError::Directory(error) => error.into(),
            PodLockError::TooLong { .. } | PodLockError::Untrusted(_) | PodLockError::Elsewhere { .. } => {
                Self::input(error)
            }
            other => Self::general(other),
        }
    }
}

impl From<MountError> for Failure {
    fn from(error: MountError) -> Self {
        match error {
            MountError::Privilege { .. } | MountError::Unsupported { .. } => Self::machine(error),
            MountError::Occupied { .. } | MountError::Failed { .. } => Self::general(error),
        }
    }
}

impl From<SupervisorError> for Failure {
    fn from(error: SupervisorError) -> Self {
        match error {
            SupervisorError::Mount { cause: MountError::Privilege { .. } | MountError::Unsupported { .. }, .. } => {
                Self::machine(error)
            }
            _ => Self::general(error),
        }
    }
}
