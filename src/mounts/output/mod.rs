//! The mounts of a container in the formats of container runtimes.

mod cri;
mod docker;
mod oci;
mod podman;

use super::{ContainerMount, DeviceNode, MountSource};

/// The format of a program that starts containers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputFormat {
    /// Entries for `mounts` of an OCI runtime's `config.json`.
    Oci,
    /// `Mount` messages of the CRI (`runtime.v1`).
    Cri,
    /// Arguments of `docker run`.
    Docker,
    /// Arguments of `podman run`.
    Podman,
    /// A JSON object with all properties of the mounts.
    Json,
}

/// Why a format cannot express the mounts.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// A path has a `:`, which separates the parts of a binding.
    #[error("volumeMount {name:?}: {path:?} has a ':', which {what} cannot have; use --output {instead}")]
    Colon {
        /// The mount.
        name: String,
        /// The path.
        path: String,
        /// The argument that cannot have it.
        what: &'static str,
        /// Formats that can.
        instead: &'static str,
    },
    /// A path or an image has a control character. A line break would begin another argument.
    #[error(
        "volumeMount {name:?}: {argument:?} has a control character, which no argument can have; use --output oci, cri or json"
    )]
    Control {
        /// The mount.
        name: String,
        /// The argument.
        argument: String,
    },
    /// A path is not UTF-8.
    #[error("volumeMount {name:?}: the path {path:?} is not UTF-8; choose a root directory whose path is")]
    NotText {
        /// The mount.
        name: String,
        /// The path, as far as it is UTF-8.
        path: String,
    },
    /// The pod has a user namespace, and the runtime of this format needs the id mappings in each mount.
    #[error(
        "volumeMount {name:?}: the pod has a user namespace, so a Mount message needs its ids; give them with --uid-map and \
         --gid-map"
    )]
    NoMappings {
        /// The mount.
        name: String,
    },
    /// The pod has a user namespace, and the runtime of this format maps no ids.
    #[error(
        "volumeMount {name:?}: the pod has a user namespace, and Docker cannot map the ids of a mount; use --output podman, oci \
         or cri"
    )]
    IdMapped {
        /// The mount.
        name: String,
    },
    /// The runtime of this format mounts no images, or no parts of them.
    #[error("volumeMount {name:?}: {format} cannot mount {what}; use --output cri")]
    Image {
        /// The mount.
        name: String,
        /// The format.
        format: &'static str,
        /// The source that it cannot mount.
        what: &'static str,
    },
}

impl OutputFormat {
    /// Whether runtimes that read this format can make the mounts below a mount read-only.
    pub fn has_recursive_read_only(self) -> bool {
        matches!(self, OutputFormat::Oci | OutputFormat::Cri | OutputFormat::Json)
    }

    /// The mounts as text, with a newline at the end of each line: one JSON document, or one argument for each line.
    ///
    /// # Errors
    /// The first mount that this format cannot express.
    pub fn print(self, mounts: &[ContainerMount]) -> Result<String, FormatError> {
        match self {
            OutputFormat::Oci => Ok(document(&oci::document(mounts)?)),
            OutputFormat::Cri => Ok(document(&cri::document(mounts)?)),
            OutputFormat::Json => Ok(document(&mounts)),
            OutputFormat::Docker => lines(mounts, docker::arguments(mounts)?),
            OutputFormat::Podman => lines(mounts, podman::arguments(mounts)?),
        }
    }
}

fn document(value: &impl serde::Serialize) -> String {
    // Text keys and plain values always become JSON. The supervisor answers with an error if a path is not UTF-8.
    serde_json::to_string_pretty(value).unwrap_or_default() + "\n"
}

/// One line for the argument of each mount.
fn lines(mounts: &[ContainerMount], arguments: Vec<String>) -> Result<String, FormatError> {
    let line = |(mount, argument): (&ContainerMount, String)| match argument.contains(char::is_control) {
        true => Err(FormatError::Control { name: mount.name.clone(), argument }),
        false => Ok(argument + "\n"),
    };
    mounts.iter().zip(arguments).map(line).collect()
}

/// Checks that no path of a mount has a `:`, which separates the parts of an argument like `what`. `instead` are formats for such
/// a path.
fn without_colon(
    mount: &ContainerMount,
    paths: [&str; 2],
    what: &'static str,
    instead: &'static str,
) -> Result<(), FormatError> {
    match paths.into_iter().find(|path| path.contains(':')) {
        Some(path) => Err(FormatError::Colon { name: mount.name.clone(), path: path.to_owned(), what, instead }),
        None => Ok(()),
    }
}

/// The path of a host directory as text.
fn text<'a>(mount: &ContainerMount, path: &'a std::path::Path) -> Result<&'a str, FormatError> {
    let not_text = || FormatError::NotText { name: mount.name.clone(), path: path.display().to_string() };
    path.to_str().ok_or_else(not_text)
}

/// Separates the block devices from the other mounts.
fn split(all: &[ContainerMount]) -> (Vec<ContainerMount>, Vec<(&ContainerMount, &DeviceNode)>) {
    let mounts = all.iter().filter(|mount| !matches!(mount.source, MountSource::Device(_))).cloned().collect();
    let devices = all.iter().filter_map(|mount| match &mount.source {
        MountSource::Device(device) => Some((mount, device)),
        _ => None,
    });
    (mounts, devices.collect())
}

#[cfg(test)]
mod tests;
