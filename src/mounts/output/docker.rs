//! Arguments of `docker run`, one a line: `--volume=SOURCE:TARGET:OPTIONS`, whose value is a binding of Docker's API, too.

use super::{FormatError, text};
use crate::mounts::{ContainerMount, DeviceNode, MountSource, Propagation};

pub(super) fn arguments(mounts: &[ContainerMount]) -> Result<Vec<String>, FormatError> {
    let argument = |mount: &ContainerMount| match &mount.source {
        MountSource::Device(device) => device_argument(mount, device),
        _ => Ok(format!("--volume={}", binding(mount)?)),
    };
    mounts.iter().map(argument).collect()
}

/// `--device=SOURCE:TARGET:PERMISSIONS`, which podman has, too.
pub(super) fn device_argument(mount: &ContainerMount, device: &DeviceNode) -> Result<String, FormatError> {
    let (source, target) = (text(mount, &device.path)?, mount.container_path.as_str());
    if let Some(path) = [source, target].into_iter().find(|path| path.contains(':')) {
        return Err(FormatError::Colon { name: mount.name.clone(), path: path.to_owned() });
    }
    Ok(format!("--device={source}:{target}:{}", if mount.read_only { "r" } else { "rwm" }))
}

fn binding(mount: &ContainerMount) -> Result<String, FormatError> {
    let MountSource::HostPath(source) = &mount.source else {
        return Err(FormatError::Image { name: mount.name.clone(), format: "a binding of Docker", what: "an image" });
    };
    let (source, target) = (text(mount, source)?, mount.container_path.as_str());
    if let Some(path) = [source, target].into_iter().find(|path| path.contains(':')) {
        return Err(FormatError::Colon { name: mount.name.clone(), path: path.to_owned() });
    }
    let options = [
        Some(if mount.read_only { "ro" } else { "rw" }),
        mount.selinux_relabel.then_some("Z"),
        (mount.propagation != Propagation::Private).then(|| mount.propagation.option()),
    ];
    Ok(format!("{source}:{target}:{}", options.into_iter().flatten().collect::<Vec<_>>().join(",")))
}
