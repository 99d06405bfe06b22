//! nfs volumes: a directory that an NFS server exports.

pub mod options;
#[cfg(test)]
mod tests;

use k8s_openapi::api::core::v1::{NFSVolumeSource, Volume};

use super::{Kind, VolumeSource};
use crate::types::{InvalidField, required};
pub use options::NfsOptions;

pub(super) const KIND: Kind = Kind {
    word: "nfs",
    directory: Some(Nfs::DIRECTORY),
    parse: |volume: &Volume, _| {
        volume.nfs.as_ref().map(|source| Nfs::parse(source).map(|nfs| VolumeSource::Nfs(nfs, Box::default())))
    },
};

/// A directory that an NFS server exports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nfs {
    /// The server's name or address. An address of IPv6 is without brackets (NF-02).
    pub server: String,
    /// The exported directory, an absolute path on the server.
    pub path: String,
    /// Whether containers may only look. A claim says it itself (NF-03).
    pub read_only: bool,
}

impl Nfs {
    /// The directory the kubelet would keep such volumes in.
    pub const DIRECTORY: &str = "kubernetes.io~nfs";

    /// Parses the source of a volume or of a PersistentVolume. Errors are relative to it.
    ///
    /// # Errors
    /// No server, no path, one that is not absolute, or a byte that cannot be in either.
    pub fn parse(source: &NFSVolumeSource) -> Result<Nfs, InvalidField> {
        let server = required("server", Some(&source.server))?;
        let path = required("path", Some(&source.path))?;
        if !path.starts_with('/') {
            return Err(InvalidField::new("path", "must be an absolute path"));
        }
        if path.contains('\0') {
            return Err(InvalidField::new("path", "must not contain a NUL character"));
        }
        let inner = server.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(server);
        if inner.is_empty() || inner.contains(|c: char| c.is_whitespace() || c.is_control() || "/,[]".contains(c)) {
            return Err(InvalidField::new("server", format!("{server:?} is no name or address of a server")));
        }
        Ok(Nfs { server: inner.to_owned(), path: path.to_owned(), read_only: source.read_only.unwrap_or(false) })
    }
}
