//! `Mount` messages of `runtime.v1`, as JSON that both protobuf's JSON readers and `crictl` understand: names with `_`, and
//! numbers for enumerations. Fields with their default value are left out.

use serde_json::{Map, Value, json};

use super::{FormatError, text};
use crate::mounts::{ContainerMount, DeviceNode, IdMapping, MountSource, Propagation};

/// The `Mount` messages; with block devices, an object that has `mounts` and `devices` as a `ContainerConfig` does.
pub(super) fn document(all: &[ContainerMount]) -> Result<Value, FormatError> {
    let (mounts, devices) = super::split(all);
    let mounts = self::mounts(&mounts)?;
    if devices.is_empty() {
        return Ok(Value::from(mounts));
    }
    let device = |(mount, device): &(&ContainerMount, &DeviceNode)| {
        let host_path = text(mount, &device.path)?;
        let permissions = mount.device_permissions();
        Ok(json!({"container_path": mount.container_path, "host_path": host_path, "permissions": permissions}))
    };
    let devices = devices.iter().map(device).collect::<Result<Vec<_>, _>>()?;
    Ok(json!({"mounts": mounts, "devices": devices}))
}

fn mounts(mounts: &[ContainerMount]) -> Result<Vec<Value>, FormatError> {
    mounts.iter().map(message).collect()
}

/// An `IDMapping`. Zeros are written, too, so that a reader sees where each range begins.
fn id_mapping(mapping: &IdMapping) -> Value {
    json!({"container_id": mapping.container_id(), "host_id": mapping.host_id(), "length": mapping.length()})
}

fn message(mount: &ContainerMount) -> Result<Value, FormatError> {
    if mount.id_mapped && mount.uid_mappings.is_empty() {
        return Err(FormatError::NoMappings { name: mount.name.clone() });
    }
    let mut message = Map::new();
    message.insert("container_path".to_owned(), json!(mount.container_path));
    match &mount.source {
        MountSource::HostPath(path) => drop(message.insert("host_path".to_owned(), json!(text(mount, path)?))),
        MountSource::Device(_) => {}
        MountSource::Image { reference, sub_path } => {
            message.insert("image".to_owned(), json!({"image": reference}));
            if !sub_path.is_empty() {
                message.insert("image_sub_path".to_owned(), json!(sub_path));
            }
        }
    }
    let propagation = match mount.propagation {
        Propagation::Private => 0,
        Propagation::HostToContainer => 1,
        Propagation::Bidirectional => 2,
    };
    if propagation != 0 {
        message.insert("propagation".to_owned(), json!(propagation));
    }
    let flags = [
        ("readonly", mount.read_only),
        ("recursive_read_only", mount.recursive_read_only),
        ("selinux_relabel", mount.selinux_relabel),
    ];
    message.extend(flags.into_iter().filter(|(_, is_set)| *is_set).map(|(name, _)| (name.to_owned(), json!(true))));
    let ids = [("uidMappings", &mount.uid_mappings), ("gidMappings", &mount.gid_mappings)];
    let ids = ids.into_iter().filter(|(_, mappings)| !mappings.is_empty());
    message.extend(ids.map(|(name, mappings)| (name.to_owned(), mappings.iter().map(id_mapping).collect())));
    Ok(Value::Object(message))
}
