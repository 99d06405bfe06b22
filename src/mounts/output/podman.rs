//! Arguments of `podman run`, one for each line: `--mount=type=bind,…`. The value is a line of comma-separated values
//! (CSV).

use super::docker::device_argument;
use super::{FormatError, text};
use crate::mounts::{ContainerMount, MountSource};

pub(super) fn arguments(mounts: &[ContainerMount]) -> Result<Vec<String>, FormatError> {
    mounts.iter().map(argument).collect()
}

fn argument(mount: &ContainerMount) -> Result<String, FormatError> {
    let target = field("target", &mount.container_path);
    let fields = match &mount.source {
        MountSource::Image { sub_path, .. } if !sub_path.is_empty() => {
            return Err(FormatError::Image { name: mount.name.clone(), format: "podman", what: "a part of an image" });
        }
        MountSource::Image { reference, .. } => vec!["type=image".to_owned(), field("source", reference), target],
        MountSource::Device(device) => return device_argument(mount, device, "a device of podman"),
        MountSource::HostPath(source) => {
            let mut fields = vec!["type=bind".to_owned(), field("source", text(mount, source)?), target];
            fields.push(format!("ro={}", mount.read_only));
            fields.push(format!("bind-propagation={}", mount.propagation.option()));
            fields.extend(mount.selinux_relabel.then(|| "relabel=private".to_owned()));
            fields.extend(mount.id_mapped.then(|| "idmap".to_owned()));
            fields
        }
    };
    Ok(format!("--mount={}", fields.join(",")))
}

/// `key=value`, in quotes if it has a comma or a quote, as in CSV.
fn field(key: &str, value: &str) -> String {
    let field = format!("{key}={value}");
    if field.contains([',', '"']) { format!("\"{}\"", field.replace('"', "\"\"")) } else { field }
}
