//! How a program reports that it failed: an exit code and one sentence.

use std::fmt;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::ExitCode;

use podfs_fuse::mount::MountError;
use tracing::debug;

use crate::manifest::ManifestError;
use crate::source::SourceError;
use crate::supervisor::SupervisorError;
use crate::supervisor::run_dir::claim::PodLockError;
use crate::supervisor::run_dir::trust;

/// The file in which a supervisor of `podfs node` leaves the sentence of its failure, beside the pod's manifest.
pub(crate) const FAILURE: &str = "failure";

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
        podfs_fuse::log::say("podfs", &self.to_string());
        ExitCode::from(self.code)
    }
}

/// Leaves the sentence of a failure beside the pod's manifest, for `podfs node`: another program has the log of a supervisor.
pub(super) fn leave_failure(manifest: &Path, sentence: &str) {
    let Some(directory) = manifest.parent() else { return };
    let leave = || {
        trust::check(directory)?;
        let mut options = OpenOptions::new();
        let mut file = trust::open(options.write(true).create(true).mode(0o600), &directory.join(FAILURE))?;
        file.set_len(0)?;
        file.write_all(sentence.as_bytes())
    };
    if let Err::<(), io::Error>(error) = leave() {
        debug!("cannot leave the failure beside {}: {error}", manifest.display());
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
            MountError::Privilege { .. } | MountError::Unsupported { .. } | MountError::NotFuse { .. } => {
                Self::machine(error)
            }
            MountError::Occupied { .. } | MountError::Failed { .. } => Self::general(error),
        }
    }
}

impl From<SupervisorError> for Failure {
    fn from(error: SupervisorError) -> Self {
        match error {
            SupervisorError::Mount {
                cause: MountError::Privilege { .. } | MountError::Unsupported { .. } | MountError::NotFuse { .. },
                ..
            } => Self::machine(error),
            _ => Self::general(error),
        }
    }
}
