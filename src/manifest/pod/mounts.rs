//! Where containers mount the volumes of their pod.

use k8s_openapi::api::core::v1::{PodSpec, VolumeMount};

/// A container of any of the three kinds, and its `volumeMounts`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerMounts {
    /// The container's name.
    pub container: String,
    /// In the manifest's order.
    pub mounts: Vec<Mount>,
}

/// One `volumeMount`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// The volume's name.
    pub volume: String,
    /// The path in the container, as the manifest has it.
    pub path: String,
    /// Which part of the volume is mounted.
    pub sub_path: SubPath,
}

/// The part of a volume that a container mounts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SubPath {
    /// All of it.
    Whole,
    /// What is at this path of the volume.
    At(String),
    /// A path that depends on the container's environment (`subPathExpr`).
    Expression(String),
}

/// The mounts of all containers.
pub(super) fn of_containers(spec: &PodSpec) -> Vec<ContainerMounts> {
    let init = spec.init_containers.iter().flatten().map(|one| (&one.name, &one.volume_mounts));
    let regular = spec.containers.iter().map(|one| (&one.name, &one.volume_mounts));
    let ephemeral = spec.ephemeral_containers.iter().flatten().map(|one| (&one.name, &one.volume_mounts));
    let all = init.chain(regular).chain(ephemeral);
    all.map(|(name, mounts)| ContainerMounts {
        container: name.clone(),
        mounts: mounts.iter().flatten().map(mount).collect(),
    })
    .collect()
}

fn mount(mount: &VolumeMount) -> Mount {
    let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    let sub_path = match (given(&mount.sub_path), given(&mount.sub_path_expr)) {
        (Some(path), _) => SubPath::At(path),
        (None, Some(expression)) => SubPath::Expression(expression),
        (None, None) => SubPath::Whole,
    };
    Mount { volume: mount.name.clone(), path: mount.mount_path.clone(), sub_path }
}
