//! Errors of commits.

use std::io;

/// Why a commit failed.
#[derive(Debug, thiserror::Error)]
pub enum CommitError {
    /// The kernel refused memory for the generation.
    #[error("cannot hold the new generation in memory: {0}")]
    Memory(#[source] io::Error),
    /// The server refused the generation, or has ended.
    #[error("the server did not take the new generation: {0}")]
    Server(#[source] io::Error),
    /// A system call on the private mount failed.
    #[error("cannot commit: {call} failed: {cause}")]
    Step {
        /// The call and its file name.
        call: String,
        /// The kernel's error.
        #[source]
        cause: io::Error,
    },
    /// The content of a file cannot be read from the generation that shows it.
    #[error("cannot read {path:?} to update live subPath mounts, which keep their earlier content: {cause}")]
    LiveContent {
        /// The path in the payload.
        path: String,
        /// The kernel's error.
        #[source]
        cause: io::Error,
    },
}
