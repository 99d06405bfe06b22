//! Entries for `mounts` of a `config.json`, as runc and crun accept them.

use serde_json::{Value, json};

use super::{FormatError, text};
use crate::mounts::{ContainerMount, DeviceNode, MountSource};

/// The mounts; with block devices, an object that has `mounts` and `linux` as `config.json` does.
pub(super) fn document(all: &[ContainerMount]) -> Result<Value, FormatError> {
    let (mounts, devices) = super::split(all);
    let mounts = self::mounts(&mounts)?;
    if devices.is_empty() {
        return Ok(Value::from(mounts));
    }
    let node = |(mount, device): &(&ContainerMount, &DeviceNode)| {
        let DeviceNode { major, minor, .. } = device;
        json!({"path": mount.container_path, "type": "b", "major": major, "minor": minor})
    };
    let rule = |(mount, device): &(&ContainerMount, &DeviceNode)| {
        let (DeviceNode { major, minor, .. }, access) = (device, if mount.read_only { "r" } else { "rwm" });
        json!({"allow": true, "type": "b", "major": major, "minor": minor, "access": access})
    };
    let (nodes, rules): (Vec<_>, Vec<_>) = (devices.iter().map(node).collect(), devices.iter().map(rule).collect());
    Ok(json!({"mounts": mounts, "linux": {"devices": nodes, "resources": {"devices": rules}}}))
}

/// Runtimes mount in the order of the entries, so an outer mount comes before the mounts below it. Otherwise the order
/// stays.
fn mounts(mounts: &[ContainerMount]) -> Result<Vec<Value>, FormatError> {
    let mut sorted: Vec<_> = mounts.iter().collect();
    sorted.sort_by_key(|mount| mount.container_path.split('/').filter(|name| !name.is_empty()).count());
    sorted.into_iter().map(entry).collect()
}

fn entry(mount: &ContainerMount) -> Result<Value, FormatError> {
    let MountSource::HostPath(source) = &mount.source else {
        return Err(FormatError::Image { name: mount.name.clone(), format: "an OCI runtime", what: "an image" });
    };
    Ok(json!({
        "destination": mount.container_path,
        "type": "bind",
        "source": text(mount, source)?,
        "options": options(mount),
    }))
}

fn options(mount: &ContainerMount) -> Vec<&'static str> {
    let mut options = vec!["rbind", mount.propagation.option(), if mount.read_only { "ro" } else { "rw" }];
    let others = [
        (mount.recursive_read_only, "rro"),
        // runc mounts without the flags that are not named.
        (mount.nosuid, "nosuid"),
        (mount.nodev, "nodev"),
        (mount.noexec, "noexec"),
        (mount.id_mapped, "idmap"),
    ];
    options.extend(others.into_iter().filter(|(is_set, _)| *is_set).map(|(_, option)| option));
    options
}
