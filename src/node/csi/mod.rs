//! The CSI driver `podfs.io`: a kubelet publishes volumes, and podfs mounts them at the kubelet's targets.
//!
//! | module | owns |
//! |---|---|
//! | [`attributes`] | from `volumeAttributes` to a volume of a pod |
//! | [`request`] | from a NodePublishVolume request to a publication |
//! | [`target`] | the directories of the kubelet at which volumes appear |
//! | `service` | the services Identity and Node |
//! | `busy` | which targets have a call that has not ended |
//! | `operations` | publish, unpublish and the state of a volume |
//! | [`sockets`] | the sockets for the kubelet, and the registration of the driver |
//!
//! **Why this is safe to kill.**
//!
//! 1. The service writes the record of a publication before it reports it to the manager, and removes the record after the
//!    target. So the next daemon knows at least every mounted volume.
//! 2. A target is a second mount of the volume's file system. The pod's supervisor and server do not know it and may be
//!    replaced; the target shows the same files as the volume.
//! 3. One call for a target runs at a time; the service refuses a second one with ABORTED. A call runs to its end even if the
//!    client disconnects.

pub mod attributes;
mod busy;
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
    /// The socket on which the driver takes the kubelet's calls.
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

/// A directory of the node that volumes may show. Both paths are without symbolic links.
struct AllowedDirectory {
    real: PathBuf,
    /// The directory of the list that has it.
    within: PathBuf,
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

    /// The directory of the node at this path, if it may be shown.
    fn directory(&self, path: &str) -> Option<AllowedDirectory> {
        let real = std::fs::canonicalize(path).ok()?;
        let allowed = self.directories.iter().filter_map(|directory| directory.canonicalize().ok());
        // Users may write in the outermost one, also where it has another one in it.
        let within = allowed.filter(|within| real.starts_with(within)).min_by_key(|within| within.iter().count())?;
        Some(AllowedDirectory { real, within })
    }

    fn has_server(&self, server: &str) -> bool {
        self.servers.iter().any(|allowed| allowed == server)
    }
}
