//! Why the daemon of a node does not start, or ends.

use std::io;
use std::path::PathBuf;

use super::csi::CsiError;
use super::feed::FeedError;
use super::nri::NriError;
use super::root_lock::RootLockError;
use super::service::DaemonError;

/// Why the daemon does not start.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// Another daemon serves the run directory, or its lock or socket cannot be used.
    #[error(transparent)]
    Daemon(#[from] DaemonError),
    /// Another daemon uses the root directory, or it cannot be used.
    #[error(transparent)]
    Root(#[from] RootLockError),
    /// The sources cannot be read.
    #[error(transparent)]
    Feed(#[from] FeedError),
    /// podfs cannot search for what earlier daemons left.
    #[error("cannot look for the volumes of an earlier daemon below {}: {cause}", .path.display())]
    Reconstruct {
        /// The root directory.
        path: PathBuf,
        /// The error of the system call.
        #[source]
        cause: io::Error,
    },
    /// The CSI driver cannot be served.
    #[error(transparent)]
    Csi(#[from] CsiError),
    /// The plugin of the container runtime cannot be served.
    #[error(transparent)]
    Nri(#[from] NriError),
    /// The socket for agents cannot be served.
    #[error("cannot serve agents: {0}")]
    Service(#[source] io::Error),
}
