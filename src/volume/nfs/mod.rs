//! nfs volumes: a directory that an NFS server exports.

pub mod options;
#[cfg(test)]
mod tests;

use k8s_openapi::api::core::v1::{NFSVolumeSource, Volume};

use podfs_nfs::ExportAddress;

use super::{VolumeSource, VolumeType};
use crate::types::{InvalidField, required};
pub use options::NfsOptions;

pub(super) const KIND: VolumeType = VolumeType {
    field: "nfs",
    directory: Some(Nfs::DIRECTORY),
    parse: |volume: &Volume, _| {
        volume.nfs.as_ref().map(|source| Nfs::parse(source).map(|nfs| VolumeSource::Nfs(nfs, Box::default())))
    },
};

/// A directory that an NFS server exports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nfs {
    /// The server and the path of the export (NF-02).
    pub address: ExportAddress,
    /// Whether containers can only read the volume. For a claim, the claim's `readOnly` decides instead (NF-03).
    pub read_only: bool,
}

impl Nfs {
    /// The directory in which the kubelet would keep such volumes.
    pub const DIRECTORY: &str = "kubernetes.io~nfs";

    /// Parses the source of a volume or of a PersistentVolume. Errors are relative to it.
    ///
    /// # Errors
    /// A missing server or path, a path that is not absolute, or a byte that server or path cannot have.
    pub fn parse(source: &NFSVolumeSource) -> Result<Nfs, InvalidField> {
        let server = required("server", Some(&source.server))?;
        let path = required("path", Some(&source.path))?;
        let address = ExportAddress::parse(server, path).map_err(|error| {
            InvalidField::new(if error.is_about_path() { "path" } else { "server" }, error.to_string())
        })?;
        Ok(Nfs { address, read_only: source.read_only.unwrap_or(false) })
    }
}
