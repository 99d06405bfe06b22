//! The mounts of a container in the words of container runtimes.

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
    /// `:` separates the parts of a binding.
    #[error(
        "volumeMount {name:?}: {path:?} has a ':', which a binding of Docker cannot have; use --output podman or oci"
    )]
    Colon {
        /// The mount.
        name: String,
        /// The path.
        path: String,
    },
    /// A path that is no text.
    #[error("volumeMount {name:?}: the path {path:?} is not UTF-8; choose a root directory whose path is")]
    NotText {
        /// The mount.
        name: String,
        /// The path, as far as it is text.
        path: String,
    },
    /// The runtime of this format does not map ids by itself.
    #[error(
        "volumeMount {name:?}: the pod has a user namespace, so a Mount message needs its ids; give them with --uid-map and \
         --gid-map"
    )]
    NoMappings {
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
    /// Whether runtimes that read it can make the mounts below a mount read-only.
    pub fn has_recursive_read_only(self) -> bool {
        matches!(self, OutputFormat::Oci | OutputFormat::Cri | OutputFormat::Json)
    }

    /// The mounts as text, with a newline at the end of each line: one JSON document, or one argument a line.
    ///
    /// # Errors
    /// The first mount that this format cannot say.
    pub fn print(self, mounts: &[ContainerMount]) -> Result<String, FormatError> {
        match self {
            OutputFormat::Oci => Ok(document(&oci::document(mounts)?)),
            OutputFormat::Cri => Ok(document(&cri::document(mounts)?)),
            OutputFormat::Json => Ok(document(&mounts)),
            OutputFormat::Docker => Ok(lines(docker::arguments(mounts)?)),
            OutputFormat::Podman => Ok(lines(podman::arguments(mounts)?)),
        }
    }
}

fn document(value: &impl serde::Serialize) -> String {
    // Text keys and plain values always become JSON; a path that is no text was refused by its supervisor's answer.
    serde_json::to_string_pretty(value).unwrap_or_default() + "\n"
}

fn lines(arguments: Vec<String>) -> String {
    arguments.into_iter().map(|argument| argument + "\n").collect()
}

/// The path of a host directory as text.
fn text<'a>(mount: &ContainerMount, path: &'a std::path::Path) -> Result<&'a str, FormatError> {
    let not_text = || FormatError::NotText { name: mount.name.clone(), path: path.display().to_string() };
    path.to_str().ok_or_else(not_text)
}

/// Mounts, and devices apart from them.
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
