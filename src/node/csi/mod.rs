//! The CSI driver `podfs.io`: a kubelet publishes volumes, and podfs mounts them at the kubelet's targets.
//!
//! | module | owns |
//! |---|---|
//! | [`attributes`] | from `volumeAttributes` to a volume of a pod |
//! | [`request`] | from a NodePublishVolume request to a publication |
//! | [`target`] | the directories of the kubelet at which volumes appear |
//! | `service` | the services Identity and Node |
//! | `operations` | publish, unpublish and the state of a volume |
//! | [`sockets`] | the sockets for the kubelet, and registration |
//!
//! **Why this is safe to kill.**
//!
//! 1. The service writes the record of a publication before it reports it to the manager, and removes the record after the
//!    target. So the next daemon knows at least every mounted volume.
//! 2. A target is a second mount of the volume's file system. The pod's supervisor and server do not know it and may be
//!    replaced; it shows the same files as the volume.
//! 3. One call for a target runs at a time; the service refuses another with ABORTED. A call runs to its end even if its client
//!    disconnects.

pub mod attributes;
mod operations;
pub mod request;
mod service;
pub mod sockets;
pub mod target;

use std::path::PathBuf;

pub use service::{CsiDriverServer, serve};
pub use sockets::{CsiError, CsiSockets};

/// The settings of the driver.
#[derive(Clone, Debug)]
pub struct CsiSettings {
    /// The socket that the kubelet calls.
    pub socket: PathBuf,
    /// The directory of the kubelet: `/var/lib/kubelet`.
    pub kubelet_root: PathBuf,
    /// The name of the node.
    pub node: String,
    /// The directories and NFS servers that volumes may show.
    pub allow: AllowList,
}

/// The sources that volumes may show: directories of the node, each with everything below it, and NFS servers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllowList {
    directories: Vec<PathBuf>,
    servers: Vec<String>,
}

impl AllowList {
    /// The list of these entries: absolute paths, and names or addresses of servers.
    pub fn new<'a>(entries: impl IntoIterator<Item = &'a str>) -> AllowList {
        let mut list = AllowList::default();
        for entry in entries.into_iter().map(str::trim).filter(|entry| !entry.is_empty()) {
            match entry.starts_with('/') {
                true => list.directories.push(PathBuf::from(entry)),
                false => list.servers.push(entry.to_owned()),
            }
        }
        list
    }

    /// The real path of a directory of the node, without symbolic links, if it may be shown.
    fn directory(&self, path: &str) -> Option<PathBuf> {
        let real = std::fs::canonicalize(path).ok()?;
        let allowed = |directory: &PathBuf| directory.canonicalize().is_ok_and(|directory| real.starts_with(directory));
        self.directories.iter().any(allowed).then_some(real)
    }

    fn has_server(&self, server: &str) -> bool {
        self.servers.iter().any(|allowed| allowed == server)
    }
}
