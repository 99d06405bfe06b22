//! The mounts of a pod's containers: `volumeMounts`, `volumeDevices` and termination messages.

use k8s_openapi::api::core::v1::{PodSpec, SecurityContext, VolumeDevice, VolumeMount};

/// The API server's default for `terminationMessagePath`.
const TERMINATION_LOG: &str = "/dev/termination-log";

/// A container, init container or ephemeral container, and its `volumeMounts` and `volumeDevices`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerMounts {
    /// The container's name.
    pub container: String,
    /// Its `volumeMounts`, in the manifest's order.
    pub mounts: Vec<Mount>,
    /// Its `volumeDevices`, in the manifest's order.
    pub devices: Vec<ContainerDevice>,
    /// It is privileged: it has all rights of root on the node.
    pub privileged: bool,
    /// The path of its termination message in the container.
    pub termination_log: String,
}

/// An entry of `volumeMounts`. podfs parses an entry that the API server would refuse, and later refuses the mounts of
/// this container alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// The volume's name.
    pub volume: String,
    /// The path in the container, as the manifest has it.
    pub path: String,
    /// The part of the volume that the container mounts.
    pub sub_path: SubPath,
    /// The container gets the volume read-only.
    pub read_only: bool,
    /// Whether mounts below the volume are read-only, too: `Disabled`, `IfPossible` or `Enabled`.
    pub recursive_read_only: Option<String>,
    /// `None`, `HostToContainer` or `Bidirectional`.
    pub propagation: Option<String>,
}

/// The part of a volume that a container mounts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SubPath {
    /// All of it.
    Whole,
    /// The part of the volume at this path.
    At(String),
    /// A path that depends on the container's environment (`subPathExpr`).
    Expression(String),
    /// The manifest has `subPath` and `subPathExpr`, which exclude each other.
    Both,
}

/// An entry of `volumeDevices`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerDevice {
    /// The volume's name.
    pub volume: String,
    /// The path in the container, as the manifest has it.
    pub path: String,
}

/// The mounts of all containers.
pub(super) fn of_containers(spec: &PodSpec) -> Vec<ContainerMounts> {
    macro_rules! containers {
        ($list:expr) => {
            $list.map(|one| ContainerMounts {
                container: one.name.clone(),
                mounts: one.volume_mounts.iter().flatten().map(mount).collect(),
                devices: one.volume_devices.iter().flatten().map(device).collect(),
                privileged: is_privileged(one.security_context.as_ref()),
                termination_log: non_empty(&one.termination_message_path).unwrap_or_else(|| TERMINATION_LOG.to_owned()),
            })
        };
    }
    let init = containers!(spec.init_containers.iter().flatten());
    let ephemeral = containers!(spec.ephemeral_containers.iter().flatten());
    init.chain(containers!(spec.containers.iter())).chain(ephemeral).collect()
}

fn mount(mount: &VolumeMount) -> Mount {
    let sub_path = match (non_empty(&mount.sub_path), non_empty(&mount.sub_path_expr)) {
        (Some(path), None) => SubPath::At(path),
        (None, Some(expression)) => SubPath::Expression(expression),
        (None, None) => SubPath::Whole,
        (Some(_), Some(_)) => SubPath::Both,
    };
    Mount {
        volume: mount.name.clone(),
        path: mount.mount_path.clone(),
        sub_path,
        read_only: mount.read_only.unwrap_or_default(),
        recursive_read_only: non_empty(&mount.recursive_read_only),
        propagation: non_empty(&mount.mount_propagation),
    }
}

fn device(device: &VolumeDevice) -> ContainerDevice {
    ContainerDevice { volume: device.name.clone(), path: device.device_path.clone() }
}

fn is_privileged(context: Option<&SecurityContext>) -> bool {
    context.and_then(|context| context.privileged).unwrap_or_default()
}

fn non_empty(text: &Option<String>) -> Option<String> {
    text.clone().filter(|text| !text.is_empty())
}
