//! From the pod's manifest and its mounted volumes to the mounts of a container: the kubelet's `makeMounts`, with its
//! texts (MT-01 to MT-09).
//!
//! This module also checks the rules that the API server checks for the kubelet, because the manifest may be a file that no API
//! server has seen.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::expansion::{MissingValues, expand};
use super::modes::{self, PropagationError, RecursiveReadOnlyError};
use super::{ContainerMount, DeviceNode, HOSTS_NAME, IdMapping, MountSource, Propagation, TERMINATION_LOG_NAME};
use crate::manifest::pod::{ContainerDevice, ContainerMounts, Mount, Pod, SubPath};

/// The path at which containers look up names of hosts.
const HOSTS_PATH: &str = "/etc/hosts";

/// A request for the mounts of a container.
#[derive(Clone, Copy, Debug)]
pub struct ContainerMountRequest<'a> {
    /// The pod.
    pub pod: &'a Pod,
    /// The container's name.
    pub container: &'a str,
    /// The pod's volumes by name: where each is mounted, or why it is not.
    pub volumes: &'a BTreeMap<String, Result<MountedPodVolume, NotMounted>>,
    /// The agent's facts of the container.
    pub environment: &'a AgentFacts,
    /// The features of the runtime and the node.
    pub features: Features,
}

/// A volume of the pod that is mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountedPodVolume {
    /// The path at which it is mounted on the node.
    pub path: PathBuf,
    /// It is read-only, by its kind or by its manifest.
    pub read_only: bool,
    /// The runtime has to give its files the SELinux label of each container that mounts it. A FUSE volume gets its label when it
    /// is mounted.
    pub selinux_relabel: bool,
    /// The device number, if the volume is a block device.
    pub device: Option<(u32, u32)>,
}

/// Why a container cannot have a volume.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotMounted {
    /// The reason that the status of the pod gives.
    #[error("{0}")]
    Waiting(String),
    /// The volume is not mounted, and the status of the pod gives no reason.
    #[error("it is not mounted")]
    NotYet,
    /// The mount has no path on the node.
    #[error("its path is not known")]
    NoPath,
    /// The container uses the volume as a block device, and it is none.
    #[error("it is no block device")]
    NoBlockDevice,
}

/// Facts that only the agent that starts the container knows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct AgentFacts {
    /// The container's environment variables, as it will see them.
    pub variables: BTreeMap<String, String>,
    /// The pod's addresses.
    pub pod_ips: Vec<IpAddr>,
    /// The pod's name in its network, with its domain if it has one: `web-0.web.default.svc.cluster.local`.
    pub hostname: Option<String>,
    /// The pod shares the node's network, whatever its manifest says.
    pub host_network: bool,
    /// The users of the pod's user namespace. Runtimes of the CRI need them for each mount; other runtimes use those of the
    /// container.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub uid_mappings: Vec<IdMapping>,
    /// The groups of that namespace, if the agent has named them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gid_mappings: Vec<IdMapping>,
}

/// The features of the runtime and the node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// The runtime can make a mount read-only with everything below it.
    pub recursive_read_only: bool,
    /// The node uses SELinux.
    pub selinux: bool,
}

/// A mount of the container whose source may have to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedMount {
    /// Its index among the container's `volumeMounts`. The devices and the mounts that podfs adds follow them.
    pub index: usize,
    /// The volume's name, or the name of a mount that podfs adds.
    pub name: String,
    /// The absolute path of the mount in the container.
    pub container_path: String,
    /// The source of the mount.
    pub source: PlannedSource,
    /// The container gets the volume read-only.
    pub read_only: bool,
    /// The mounts below the source are read-only in the container, too.
    pub recursive_read_only: bool,
    /// The propagation of later mounts between the container and the host.
    pub propagation: Propagation,
    /// The runtime gives the source's files the container's SELinux label.
    pub selinux_relabel: bool,
    /// The mount maps the ids of the pod's user namespace.
    pub id_mapped: bool,
    /// The users of that namespace, if the agent has named them.
    pub uid_mappings: Vec<IdMapping>,
    /// The groups of that namespace, if the agent has named them.
    pub gid_mappings: Vec<IdMapping>,
}

/// The source of the mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlannedSource {
    /// A whole volume, mounted at this path of the node.
    Volume(PathBuf),
    /// The part of the volume at this path: relative, not empty, and without `..`.
    SubPath(String),
    /// An image, which the runtime mounts.
    Image {
        /// The image.
        reference: String,
        /// The path in the image that the container mounts; empty for the whole image.
        sub_path: String,
    },
    /// A block device.
    Device(DeviceNode),
    /// The pod's `/etc/hosts`.
    Hosts,
    /// A new file for the container's termination message.
    TerminationLog,
}

/// Why a container cannot have its mounts.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum MountsError {
    /// The pod has no such container.
    #[error("pod {pod} has no container {container:?}; its containers are {}", .known.join(", "))]
    NoContainer {
        /// The pod.
        pod: String,
        /// The requested container.
        container: String,
        /// The names of the pod's containers.
        known: Vec<String>,
    },
    /// A volumeMount has no path.
    #[error("container {container:?}: the volumeMount of {volume:?} needs a mountPath")]
    NoPath {
        /// The container.
        container: String,
        /// The volume.
        volume: String,
    },
    /// Two volumeMounts of the container have one path.
    #[error("container {container:?}: mountPath {path:?} must be unique; give each volumeMount a path of its own")]
    SamePath {
        /// The container.
        container: String,
        /// The path.
        path: String,
    },
    /// A volumeMount has both a subPath and a subPathExpr.
    #[error("container {container:?}, volumeMount {volume:?}: subPath and subPathExpr are mutually exclusive")]
    TwoSubPaths {
        /// The container.
        container: String,
        /// The volume.
        volume: String,
    },
    /// The pod has no such volume, or it is not mounted for this reason.
    #[error("cannot find volume {volume:?} to mount into container {container:?}{}", because(.reason.as_ref()))]
    NoVolume {
        /// The volume.
        volume: String,
        /// The container.
        container: String,
        /// Why it is not mounted, if the pod has it.
        #[source]
        reason: Option<NotMounted>,
    },
    /// The container uses the volume as a block device. The volume does not exist, or is no block device for this reason.
    #[error("cannot find volume {volume:?} to pass into container {container:?}{}", because(.reason.as_ref()))]
    NoDevice {
        /// The volume.
        volume: String,
        /// The container.
        container: String,
        /// Why it is not there, if the pod has it.
        #[source]
        reason: Option<NotMounted>,
    },
    /// The path of a block device in the container is relative.
    #[error("error DevicePath `{0}` must be an absolute path")]
    RelativeDevicePath(String),
    /// Variables of a subPathExpr are unset or empty.
    #[error(transparent)]
    MissingValues(#[from] MissingValues),
    /// The subPath begins at the root.
    #[error("error SubPath `{0}` must not be an absolute path")]
    AbsoluteSubPath(String),
    /// The subPath may lead out of the volume.
    #[error("unable to provision SubPath `{0}`: must not contain '..'")]
    Backsteps(String),
    /// podfs cannot give the mount the propagation of its volumeMount.
    #[error(transparent)]
    Propagation(#[from] PropagationError),
    /// The agent has named id mappings for a pod without a user namespace.
    #[error(
        "pod {0} shares the users of the node (hostUsers is not false), so no mount of it maps ids; leave the id mappings out"
    )]
    NoUserNamespace(String),
    /// The agent has named mappings of users and none of groups, or the reverse.
    #[error("the id mappings of users and those of groups belong together; give both, or none")]
    HalfMapped,
    /// The mounts below a mount cannot be read-only.
    #[error("failed to resolve recursive read-only mode: {0}")]
    RecursiveReadOnly(#[from] RecursiveReadOnlyError),
}

fn because(reason: Option<&NotMounted>) -> String {
    reason.map(|reason| format!(": {reason}")).unwrap_or_default()
}

/// The mounts of a container, in the order of its `volumeMounts`; then `/etc/hosts`, then the termination log.
///
/// # Errors
/// The first field that the kubelet, or the API server before it, would refuse.
pub fn plan(request: ContainerMountRequest<'_>) -> Result<Vec<PlannedMount>, MountsError> {
    let ContainerMountRequest { pod, container, environment, .. } = request;
    let spec = pod.mounts.iter().find(|one| one.container == container).ok_or_else(|| MountsError::NoContainer {
        pod: pod.identity.to_string(),
        container: container.to_owned(),
        known: pod.mounts.iter().map(|one| one.container.clone()).collect(),
    })?;
    check(spec)?;
    check_mappings(request)?;
    let mounts = spec.mounts.iter().enumerate();
    let mut planned: Vec<_> =
        mounts.map(|(index, mount)| of_volume(request, spec, index, mount)).collect::<Result<_, _>>()?;
    for device in &spec.devices {
        let index = planned.len();
        planned.push(of_device(request, index, device)?);
    }
    let has_network = environment.host_network || pod.network.host_network || !environment.pod_ips.is_empty();
    if has_network && !spec.mounts.iter().any(|mount| mount.path == HOSTS_PATH) {
        planned.push(file(planned.len(), HOSTS_NAME, HOSTS_PATH, PlannedSource::Hosts, request));
    }
    let log = file(planned.len(), TERMINATION_LOG_NAME, &spec.termination_log, PlannedSource::TerminationLog, request);
    planned.push(log);
    Ok(planned)
}

/// Refuses mounts that the API server would refuse.
fn check(container: &ContainerMounts) -> Result<(), MountsError> {
    let name = || container.container.clone();
    for (index, mount) in container.mounts.iter().enumerate() {
        if mount.path.is_empty() {
            return Err(MountsError::NoPath { container: name(), volume: mount.volume.clone() });
        }
        if container.mounts[..index].iter().any(|other| other.path == mount.path) {
            return Err(MountsError::SamePath { container: name(), path: mount.path.clone() });
        }
        if mount.sub_path == SubPath::Both {
            return Err(MountsError::TwoSubPaths { container: name(), volume: mount.volume.clone() });
        }
    }
    match container.devices.iter().find(|device| !device.path.starts_with('/')) {
        Some(device) => Err(MountsError::RelativeDevicePath(device.path.clone())),
        None => Ok(()),
    }
}

/// Checks that the agent's id mappings fit the user namespace of the pod.
fn check_mappings(
    ContainerMountRequest { pod, environment, .. }: ContainerMountRequest<'_>,
) -> Result<(), MountsError> {
    let is_mapped = [&environment.uid_mappings, &environment.gid_mappings].map(|mappings| !mappings.is_empty());
    match (is_mapped, pod.facts.user_namespace) {
        ([false, false], _) | ([true, true], true) => Ok(()),
        ([true, true], false) => Err(MountsError::NoUserNamespace(pod.identity.to_string())),
        ([true, false] | [false, true], _) => Err(MountsError::HalfMapped),
    }
}

fn of_device(
    request: ContainerMountRequest<'_>,
    index: usize,
    device: &ContainerDevice,
) -> Result<PlannedMount, MountsError> {
    let no_device = |reason| MountsError::NoDevice {
        volume: device.volume.clone(),
        container: request.container.to_owned(),
        reason,
    };
    let volume = match request.volumes.get(&device.volume) {
        Some(Ok(volume)) => volume,
        other => return Err(no_device(other.and_then(|reason| reason.as_ref().err()).cloned())),
    };
    let (major, minor) = volume.device.ok_or_else(|| no_device(Some(NotMounted::NoBlockDevice)))?;
    Ok(PlannedMount {
        read_only: volume.read_only,
        selinux_relabel: false,
        id_mapped: false,
        uid_mappings: Vec::new(),
        gid_mappings: Vec::new(),
        ..file(
            index,
            &device.volume,
            &device.path,
            PlannedSource::Device(DeviceNode { path: volume.path.clone(), major, minor }),
            request,
        )
    })
}

fn of_volume(
    request: ContainerMountRequest<'_>,
    container: &ContainerMounts,
    index: usize,
    mount: &Mount,
) -> Result<PlannedMount, MountsError> {
    let ContainerMountRequest { pod, environment, features, .. } = request;
    let image = pod.images.get(&mount.volume);
    let volume = match (image, request.volumes.get(&mount.volume)) {
        (Some(_), _) => None,
        (None, Some(Ok(volume))) => Some(volume),
        (None, missing) => {
            return Err(MountsError::NoVolume {
                volume: mount.volume.clone(),
                container: container.container.clone(),
                reason: missing.and_then(|reason| reason.as_ref().err()).cloned(),
            });
        }
    };
    let sub_path = match &mount.sub_path {
        SubPath::Whole | SubPath::Both => None,
        SubPath::At(path) => Some(path.clone()),
        SubPath::Expression(text) => Some(expand(text, &environment.variables)?).filter(|path| !path.is_empty()),
    };
    let sub_path = sub_path.map(check_sub_path).transpose()?;
    let propagation = modes::propagation(mount, container.privileged)?;
    let recursive_read_only = modes::recursive_read_only(mount, features.recursive_read_only)?;
    let source = match (image, volume, sub_path) {
        (Some(reference), _, sub_path) => {
            PlannedSource::Image { reference: reference.clone(), sub_path: sub_path.unwrap_or_default() }
        }
        (None, Some(volume), None) => PlannedSource::Volume(volume.path.clone()),
        (None, _, sub_path) => PlannedSource::SubPath(sub_path.unwrap_or_default()),
    };
    Ok(PlannedMount {
        index,
        name: mount.volume.clone(),
        container_path: absolute(&mount.path),
        source,
        read_only: mount.read_only || volume.is_none_or(|volume| volume.read_only),
        recursive_read_only,
        propagation,
        selinux_relabel: features.selinux && volume.is_some_and(|volume| volume.selinux_relabel),
        id_mapped: pod.facts.user_namespace && image.is_none(),
        uid_mappings: environment.uid_mappings.clone(),
        gid_mappings: environment.gid_mappings.clone(),
    })
}

/// Checks that a subPath stays in the volume. Leaves out empty names and `.`, as the kubelet does (`filepath.Join`).
fn check_sub_path(path: String) -> Result<String, MountsError> {
    if path.starts_with('/') {
        return Err(MountsError::AbsoluteSubPath(path));
    }
    if path.split('/').any(|name| name == "..") {
        return Err(MountsError::Backsteps(path));
    }
    let names: Vec<_> = path.split('/').filter(|name| !matches!(*name, "" | ".")).collect();
    Ok(if names.is_empty() { ".".to_owned() } else { names.join("/") })
}

/// The mount of a file that podfs adds. The container may write to the file.
fn file(
    index: usize,
    name: &str,
    path: &str,
    source: PlannedSource,
    request: ContainerMountRequest<'_>,
) -> PlannedMount {
    PlannedMount {
        index,
        name: name.to_owned(),
        container_path: absolute(path),
        source,
        read_only: false,
        recursive_read_only: false,
        propagation: Propagation::Private,
        selinux_relabel: request.features.selinux,
        id_mapped: request.pod.facts.user_namespace,
        uid_mappings: request.environment.uid_mappings.clone(),
        gid_mappings: request.environment.gid_mappings.clone(),
    }
}

/// A relative path begins at the container's root.
fn absolute(path: &str) -> String {
    if path.starts_with('/') { path.to_owned() } else { format!("/{path}") }
}

impl PlannedMount {
    /// The mount for the container, after podfs has made the source.
    pub fn with_source(self, source: MountSource) -> ContainerMount {
        ContainerMount {
            name: self.name,
            container_path: self.container_path,
            source,
            read_only: self.read_only,
            recursive_read_only: self.recursive_read_only,
            propagation: self.propagation,
            selinux_relabel: self.selinux_relabel,
            id_mapped: self.id_mapped,
            uid_mappings: self.uid_mappings,
            gid_mappings: self.gid_mappings,
            nosuid: false,
            nodev: false,
            noexec: false,
        }
    }
}

impl AgentFacts {
    /// The pod's name in its network, and its domain.
    pub fn host_and_domain<'a>(&'a self, pod: &'a Pod) -> (&'a str, Option<&'a str>) {
        match (&self.hostname, &pod.network.hostname) {
            (Some(name), _) => name.split_once('.').map_or((name, None), |(host, domain)| (host, Some(domain))),
            (None, Some(name)) => (name, None),
            (None, None) => (&pod.identity.name, None),
        }
    }
}
