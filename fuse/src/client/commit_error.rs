//! Why the files of a projection are not shown.

use std::io;

/// Why a commit did not happen.
#[derive(Debug, thiserror::Error)]
pub enum CommitError {
    /// Memory for the generation could not be had.
    #[error("cannot hold the new generation in memory: {0}")]
    Memory(#[source] io::Error),
    /// The server did not take the generation.
    #[error("the server did not take the new generation: {0}")]
    Server(#[source] io::Error),
    /// A system call on the private mount failed.
    #[error("cannot commit: {call} failed: {cause}")]
    Step {
        /// The call and the name it was for.
        call: String,
        /// What the kernel said.
        #[source]
        cause: io::Error,
    },
}
