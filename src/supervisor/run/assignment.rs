//! What a supervisor is started with, and why it may end early.

use std::net::TcpListener;
use std::path::PathBuf;
use std::time::Duration;

use podfs_fuse::mount::MountError;

use crate::manifest::pod::{PodFacts, PodIdentity};
use crate::supervisor::run_dir::claim::{ClaimLeftovers, PodClaim};
use crate::supervisor::run_dir::mount_points::MountPointsError;
use crate::supervisor::run_dir::site::Site;
use crate::supervisor::server::program::ServerProgram;
use crate::volume::{SubPathMode, Volume};

/// What one supervisor serves.
pub struct Assignment {
    /// The pod the volumes belong to.
    pub identity: PodIdentity,
    /// What else is known of it, until the source says more.
    pub facts: PodFacts,
    /// The volumes.
    pub volumes: Vec<Volume>,
    /// Where they are to be seen.
    pub site: Site,
    /// The right to serve them, if other supervisors could serve the pod too.
    pub claim: Option<PodClaim>,
    /// What is left of a podfs that served the pod before.
    pub inheritance: ClaimLeftovers,
    /// The program of its servers.
    pub server_program: ServerProgram,
    /// Where FlexVolume drivers are.
    pub flex_volumes: PathBuf,
    /// Report every FUSE request on standard output.
    pub trace: bool,
    /// How long a projection keeps a generation after the switch to the next one.
    pub keep_old_generations: Duration,
    /// What containers that mount parts of projections see after a change, where a volume does not say it.
    pub sub_path: SubPathMode,
    /// Whether requests for directories of the node go over io_uring, where that is possible.
    pub io_uring: bool,
    /// Whether an agent watches the mount table, and asks for a Remount of volumes that another process has unmounted.
    pub agent_watches_mounts: bool,
    /// Whether the content of emptyDirs stays when a signal ends the supervisor, for an agent to delete.
    pub keep_empty_dirs: bool,
    /// Most bytes of memory that the server may take.
    pub server_memory: Option<u64>,
    /// Where metrics are served over HTTP, too.
    pub metrics: Option<TcpListener>,
}

/// Why a supervisor ended early. Everything it had mounted is unmounted again.
#[derive(Debug, thiserror::Error)]
pub enum SupervisorError {
    /// A volume cannot be mounted, and waiting would not help.
    #[error("volume {volume:?}: {cause}")]
    Mount {
        /// Its name.
        volume: String,
        /// Why.
        #[source]
        cause: MountError,
    },
    /// The server could not be started.
    #[error("cannot start the server process: {0}")]
    Start(#[source] std::io::Error),
    /// What was made could not be written down.
    #[error(transparent)]
    MountPoints(#[from] MountPointsError),
    /// The socket that the server is found at cannot be made.
    #[error("cannot make the socket {}: {cause}", path.display())]
    Socket {
        /// Where.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        cause: std::io::Error,
    },
    /// The process cannot listen for signals.
    #[error("cannot listen for signals: {0}")]
    Signals(#[source] std::io::Error),
}
