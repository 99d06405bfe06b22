//! hostPath volumes: a file or directory of the node.

use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::{HostPathVolumeSource, Volume};

use super::{VolumeSource, VolumeType};
use crate::types::{InvalidField, required};

pub(super) const KIND: VolumeType = VolumeType {
    field: "hostPath",
    directory: Some(HostPath::DIRECTORY),
    parse: |volume: &Volume, _| {
        volume.host_path.as_ref().map(|source| HostPath::parse(source).map(VolumeSource::HostPath))
    },
};

/// A file or directory of the node, and its required type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPath {
    /// An absolute path without `..`.
    pub path: PathBuf,
    /// The required type.
    pub kind: HostPathType,
    /// A directory above the path, below which podfs follows no symbolic link. Users may write there.
    pub within: Option<PathBuf>,
}

/// The required type of a host path, and whether podfs makes a missing one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostPathType {
    /// Any type; something must exist at the path.
    Unchecked,
    /// A directory; one is made if there is nothing.
    DirectoryOrCreate,
    /// A directory.
    Directory,
    /// A regular file; an empty one is made if there is nothing.
    FileOrCreate,
    /// A regular file.
    File,
    /// A unix socket.
    Socket,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
}

impl HostPath {
    /// The directory in which the kubelet would keep such volumes.
    pub const DIRECTORY: &str = "kubernetes.io~host-path";

    /// Parses the source of a volume or of a PersistentVolume. Errors are relative to it.
    ///
    /// # Errors
    /// A path that is missing, not absolute, or has a part `..` (HP-06); an unknown type.
    pub fn parse(source: &HostPathVolumeSource) -> Result<HostPath, InvalidField> {
        let path = required("path", Some(&source.path))?;
        if Path::new(path).components().any(|part| part == std::path::Component::ParentDir) {
            return Err(InvalidField::new("path", format!("invalid HostPath `{path}`: must not contain '..'")));
        }
        if !path.starts_with('/') {
            let sentence = "must be absolute: it starts with '/', since there is no directory it could be relative to";
            return Err(InvalidField::new("path", sentence));
        }
        let kind = HostPathType::parse(source.type_.as_deref().unwrap_or_default())?;
        Ok(HostPath { path: PathBuf::from(path), kind, within: None })
    }
}

impl HostPathType {
    fn parse(word: &str) -> Result<HostPathType, InvalidField> {
        Ok(match word {
            "" => HostPathType::Unchecked,
            "DirectoryOrCreate" => HostPathType::DirectoryOrCreate,
            "Directory" => HostPathType::Directory,
            "FileOrCreate" => HostPathType::FileOrCreate,
            "File" => HostPathType::File,
            "Socket" => HostPathType::Socket,
            "CharDevice" => HostPathType::CharDevice,
            "BlockDevice" => HostPathType::BlockDevice,
            _ => {
                let sentence = format!(
                    "{word} is an invalid volume type; valid are DirectoryOrCreate, Directory, FileOrCreate, File, \
                     Socket, CharDevice, BlockDevice, and \"\" for no check"
                );
                return Err(InvalidField::new("type", sentence));
            }
        })
    }
}
