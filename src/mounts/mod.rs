//! Container mounts: the mounts that a container runtime makes for one container of the pod, by the rules of the kubelet's
//! `makeMounts`. This module does no I/O.
//!
//! | module | owns |
//! |---|---|
//! | `plan` | from the pod's manifest and its mounted volumes to the mounts of a container |
//! | `expansion` | `$(VAR)` in a `subPathExpr` |
//! | `modes` | mount propagation and recursive read-only mounts |
//! | `id_mapping` | the ids of a pod's user namespace |
//! | [`hosts`] | the text of the pod's `/etc/hosts` |
//! | [`output`] | the mounts in the words of runtimes: OCI, CRI, Docker, podman |
//!
//! [`plan()`] names the sources. The pod's supervisor makes the sources, and so turns each [`PlannedMount`] into a
//! [`ContainerMount`].

mod expansion;
pub mod hosts;
mod id_mapping;
mod modes;
pub mod output;
pub mod plan;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use id_mapping::{IdMapping, InvalidMapping};
pub use plan::{
    AgentFacts, ContainerMountRequest, Features, MountedPodVolume, MountsError, NotMounted, PlannedMount,
    PlannedSource, plan,
};

/// The name of the mount of the pod's `/etc/hosts`.
pub const HOSTS_NAME: &str = "k8s-managed-etc-hosts";
/// The name of the mount of a container's termination log.
pub const TERMINATION_LOG_NAME: &str = "termination-log";

/// A mount that a container runtime can make, because its source exists.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerMount {
    /// The volume's name in the pod, [`HOSTS_NAME`] or [`TERMINATION_LOG_NAME`].
    pub name: String,
    /// The absolute path of the mount in the container.
    pub container_path: String,
    /// The source of the mount.
    pub source: MountSource,
    /// The container gets the volume read-only.
    pub read_only: bool,
    /// The mounts below the source are read-only in the container, too.
    pub recursive_read_only: bool,
    /// The propagation of later mounts between the container and the host.
    pub propagation: Propagation,
    /// The runtime has to give the source's files the container's SELinux label. Never true for a FUSE volume, whose label is
    /// fixed when it is mounted.
    pub selinux_relabel: bool,
    /// The pod has a user namespace, and the mount has to map its ids.
    pub id_mapped: bool,
    /// The users of that namespace, if the agent has named them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub uid_mappings: Vec<IdMapping>,
    /// The groups of that namespace, if the agent has named them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gid_mappings: Vec<IdMapping>,
    /// The source is mounted `nosuid`. A runtime that does not repeat the option may mount the source without it.
    pub nosuid: bool,
    /// The source is mounted `nodev`. A runtime that does not repeat the option may mount the source without it.
    pub nodev: bool,
    /// The source is mounted `noexec`. A runtime that does not repeat the option may mount the source without it.
    pub noexec: bool,
}

/// The source of a container's mount.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum MountSource {
    /// A directory or file of the host.
    HostPath(PathBuf),
    /// An image, which the runtime mounts without podfs.
    Image {
        /// The image.
        reference: String,
        /// The path in the image that the container mounts; empty for the whole image.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        sub_path: String,
    },
    /// A block device of the host (`volumeDevices`). If the mount is read-only, the container may not write to the device.
    Device(DeviceNode),
}

/// A block device that a container gets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceNode {
    /// The link to the device. podfs removes the link with the pod.
    pub path: PathBuf,
    /// The major number. The kernel gives the device number to no other device as long as the pod's supervisor runs.
    pub major: u32,
    /// The minor number.
    pub minor: u32,
}

impl ContainerMount {
    /// The container's permissions for a device, as runtimes and the kubelet write them.
    pub fn device_permissions(&self) -> &'static str {
        if self.read_only { "r" } else { "mrw" }
    }
}

/// The propagation of later mounts between the container and the host (`mountPropagation`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Propagation {
    /// Container and host do not see later mounts of each other (`rprivate`).
    #[default]
    Private,
    /// The container sees later mounts of the host (`rslave`).
    HostToContainer,
    /// Container and host see later mounts of each other (`rshared`).
    Bidirectional,
}

impl Propagation {
    /// The mount option of `mount(8)`.
    pub fn option(self) -> &'static str {
        match self {
            Propagation::Private => "rprivate",
            Propagation::HostToContainer => "rslave",
            Propagation::Bidirectional => "rshared",
        }
    }
}

#[cfg(test)]
mod tests;
