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
}
