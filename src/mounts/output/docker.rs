//! Arguments of `docker run`, one for each line: `--volume=SOURCE:TARGET:OPTIONS`. The value is also a binding of Docker's API.

use super::{FormatError, text, without_colon};
use crate::mounts::{ContainerMount, DeviceNode, MountSource, Propagation};

pub(super) fn arguments(mounts: &[ContainerMount]) -> Result<Vec<String>, FormatError> {
    let argument = |mount: &ContainerMount| match &mount.source {
        MountSource::Device(device) => device_argument(mount, device, "a device of Docker"),
        _ => Ok(format!("--volume={}", binding(mount)?)),
    };
    mounts.iter().map(argument).collect()
}

/// `--device=SOURCE:TARGET:PERMISSIONS`, which podman has, too. `what` names it in an error.
pub(super) fn device_argument(
    mount: &ContainerMount,
    device: &DeviceNode,
    what: &'static str,
) -> Result<String, FormatError> {
    let (source, target) = (text(mount, &device.path)?, mount.container_path.as_str());
    without_colon(mount, [source, target], what, "oci")?;
    Ok(format!("--device={source}:{target}:{}", if mount.read_only { "r" } else { "rwm" }))
}

fn binding(mount: &ContainerMount) -> Result<String, FormatError> {
    let MountSource::HostPath(source) = &mount.source else {
        return Err(FormatError::Image { name: mount.name.clone(), format: "a binding of Docker", what: "an image" });
    };
    let (source, target) = (text(mount, source)?, mount.container_path.as_str());
    without_colon(mount, [source, target], "a binding of Docker", "podman or oci")?;
    if mount.id_mapped {
        return Err(FormatError::IdMapped { name: mount.name.clone() });
    }
    let options = [
        Some(if mount.read_only { "ro" } else { "rw" }),
        mount.selinux_relabel.then_some("Z"),
        (mount.propagation != Propagation::Private).then(|| mount.propagation.option()),
    ];
    Ok(format!("{source}:{target}:{}", options.into_iter().flatten().collect::<Vec<_>>().join(",")))
}
