//! The input of a supervisor, and the errors that end it early.

use std::net::TcpListener;
use std::path::PathBuf;
use std::time::Duration;

use podfs_fuse::mount::MountError;

use super::adoption::UnknownServer;
use crate::manifest::pod::{PodFacts, PodIdentity};
use crate::supervisor::run_dir::claim::{PodLeftovers, PodLock};
use crate::supervisor::run_dir::defined_volume::DefinedVolume;
use crate::supervisor::run_dir::mount_points::MountPointsError;
use crate::supervisor::run_dir::site::Site;
use crate::supervisor::run_dir::volumes_lock::VolumesTaken;
use crate::supervisor::server::program::ServerProgram;
use crate::volume::{SubPathMode, Volume};

/// The pod that a supervisor serves, and the settings for it.
pub struct Assignment {
    /// The pod to which the volumes belong.
    pub identity: PodIdentity,
    /// The pod's labels and other facts, until the source sends newer ones.
    pub facts: PodFacts,
    /// The volumes to serve.
    pub volumes: Vec<Volume>,
    /// The definitions of the volumes, to record them. Empty if the record needs none, because an agent gives the next supervisor
    /// the volumes.
    pub definitions: Vec<DefinedVolume>,
    /// Where the volumes appear.
    pub site: Site,
    /// The exclusive right to serve the pod; `None` if no other supervisor can serve these volumes.
    pub claim: Option<PodLock>,
    /// The leftovers of a podfs that served the pod before.
    pub inheritance: PodLeftovers,
    /// The program of the pod's servers.
    pub server_program: ServerProgram,
    /// The directory of FlexVolume drivers.
    pub flex_volumes: PathBuf,
    /// Whether the server reports every FUSE request on standard output.
    pub trace: bool,
    /// How long a projection keeps a generation after the switch to the next one.
    pub keep_old_generations: Duration,
    /// What containers with a subPath of a projection see after a change, unless the volume has a mode of its own.
    pub sub_path: SubPathMode,
    /// Whether requests for directories of the node go over io_uring, where that is possible.
    pub io_uring: bool,
    /// Whether an agent watches the mount table, and asks the supervisor to mount the volumes again that another
    /// process has unmounted (`ControlQuestion::Remount`).
    pub agent_watches_mounts: bool,
    /// Whether the content of emptyDirs stays when a signal ends the supervisor, for an agent to delete.
    pub keep_empty_dirs: bool,
    /// Most bytes of memory that the server may take.
    pub server_memory: Option<u64>,
    /// The listener for metrics over HTTP. The control socket has the metrics, too.
    pub metrics: Option<TcpListener>,
}

/// Why a supervisor ended early. Everything it had mounted is unmounted again.
#[derive(Debug, thiserror::Error)]
pub enum SupervisorError {
    /// A volume cannot be mounted, and waiting would not help.
    #[error("volume {volume:?}: {cause}")]
    Mount {
        /// The name of the volume.
        volume: String,
        /// The error of the mount.
        #[source]
        cause: MountError,
    },
    /// Another podfs has the directory of the volumes.
    #[error(transparent)]
    Volumes(#[from] VolumesTaken),
    /// Only another version of podfs can take over the server, which works.
    #[error(transparent)]
    UnknownServer(#[from] UnknownServer),
    /// The server could not be started.
    #[error("cannot start the server process: {0}")]
    Start(#[source] std::io::Error),
    /// podfs could not record its mount points.
    #[error(transparent)]
    MountPoints(#[from] MountPointsError),
    /// podfs cannot make the socket on which a later supervisor finds the server.
    #[error("cannot make the socket {}: {cause}", path.display())]
    Socket {
        /// The path of the socket.
        path: PathBuf,
        /// The error of the system call.
        #[source]
        cause: std::io::Error,
    },
    /// The process cannot listen for signals.
    #[error("cannot listen for signals: {0}")]
    Signals(#[source] std::io::Error),
}
