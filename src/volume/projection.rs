//! Projections: the sources of their files, with modes and owners.
//!
//! configMap, secret, downwardAPI and projected volumes all become one [`Projection`]; the first three have a single
//! source. Its values are valid: modes are permission bits, paths are clean.

use std::fmt;

use k8s_openapi::api::core::v1::KeyToPath;

use super::certificate::CertificateFiles;
use super::credential::{BundleFile, TokenFile};
use super::downward_file::DownwardFile;
use crate::types::PayloadPath;
use crate::types::{self, InvalidField};

/// Mode of files for which neither the item nor the volume gives one: the API server's default. podfs applies it too,
/// because the manifest may be a file that no API server has seen.
const DEFAULT_MODE: u16 = 0o644;

/// A volume made of files that podfs assembles.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Projection {
    /// Permission bits of files whose item gives none.
    pub default_mode: u16,
    /// Owner of files whose item gives none (KEP-5936).
    pub default_user: Option<u32>,
    /// The medium on which the kubelet would keep the files.
    pub medium: Medium,
    /// The sources of the files. If two give the same path, the later one wins.
    pub sources: Vec<ProjectionSource>,
}

impl Projection {
    /// Whether the volume shows fields of its pod.
    pub fn needs_pod(&self) -> bool {
        self.sources.iter().any(|source| matches!(source, ProjectionSource::DownwardApi(_)))
    }

    /// The objects that the volume needs, in the order of its sources.
    pub fn references(&self) -> impl Iterator<Item = Reference<'_>> {
        self.sources.iter().filter_map(|source| match source {
            ProjectionSource::ConfigMap(object) => Some(Reference::to("ConfigMap", object)),
            ProjectionSource::Secret(object) => Some(Reference::to("Secret", object)),
            _ => None,
        })
    }
}

/// The medium on which the kubelet would keep a volume's files. The mode of the volume's root depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    /// The node's disk, as for configMap volumes.
    Disk,
    /// A tmpfs, as for everything that may be secret.
    Memory,
}

/// A source of files, such as a ConfigMap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProjectionSource {
    /// Keys of a ConfigMap.
    ConfigMap(ObjectSource),
    /// Keys of a Secret.
    Secret(ObjectSource),
    /// Fields of the pod.
    DownwardApi(Vec<DownwardFile>),
    /// A token of the pod's service account, issued by the API server.
    ServiceAccountToken(TokenFile),
    /// Trust anchors of the cluster.
    ClusterTrustBundle(BundleFile),
    /// A key and a certificate for the pod, issued through the API server.
    PodCertificate(CertificateFiles),
}

impl ProjectionSource {
    /// Whether its files are confidential: keys of Secrets, tokens, private keys.
    pub fn is_secret(&self) -> bool {
        match self {
            ProjectionSource::Secret(_)
            | ProjectionSource::ServiceAccountToken(_)
            | ProjectionSource::PodCertificate(_) => true,
            ProjectionSource::ConfigMap(_)
            | ProjectionSource::DownwardApi(_)
            | ProjectionSource::ClusterTrustBundle(_) => false,
        }
    }

    /// The paths that the manifest itself gives to files of this source.
    pub fn explicit_paths(&self) -> Vec<&PayloadPath> {
        match self {
            ProjectionSource::ConfigMap(object) | ProjectionSource::Secret(object) => {
                object.items.iter().map(|item| &item.path).collect()
            }
            ProjectionSource::DownwardApi(files) => files.iter().map(|file| &file.path).collect(),
            ProjectionSource::ServiceAccountToken(file) => vec![&file.path],
            ProjectionSource::ClusterTrustBundle(file) => vec![&file.path],
            ProjectionSource::PodCertificate(files) => files.paths().collect(),
        }
    }
}

/// The text is `configMap "app"`; for a source without a name, it has the path: `serviceAccountToken "token"`.
impl fmt::Display for ProjectionSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ProjectionSource::ConfigMap(object) => write!(f, "configMap {:?}", object.name),
            ProjectionSource::Secret(object) => write!(f, "secret {:?}", object.name),
            ProjectionSource::DownwardApi(_) => f.write_str("downwardAPI"),
            ProjectionSource::ServiceAccountToken(file) => write!(f, "serviceAccountToken {:?}", file.path.as_str()),
            ProjectionSource::ClusterTrustBundle(file) => write!(f, "clusterTrustBundle {:?}", file.path.as_str()),
            ProjectionSource::PodCertificate(files) => {
                let paths: Vec<&str> = files.paths().map(PayloadPath::as_str).collect();
                write!(f, "podCertificate {:?}", paths.join(", "))
            }
        }
    }
}

/// Keys of one ConfigMap or Secret of the pod's namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectSource {
    /// The object's name.
    pub name: String,
    /// The keys to show; none means every key, under its own name.
    pub items: Vec<KeyPath>,
    /// Whether the object, or a listed key of it, may be absent.
    pub optional: bool,
}

impl ObjectSource {
    /// Parses what configMap and secret sources have in common, in volumes and in projected volumes alike.
    ///
    /// `name_field` is the field that names the object. Errors are relative to the source.
    pub(super) fn parse(
        name_field: &str,
        name: Option<&str>,
        items: Option<&[KeyToPath]>,
        optional: Option<bool>,
    ) -> Result<ObjectSource, InvalidField> {
        let items = items.unwrap_or_default().iter().enumerate();
        Ok(ObjectSource {
            name: types::required(name_field, name)?.to_owned(),
            items: items
                .map(|(index, item)| KeyPath::parse(item).map_err(|error| error.under(format!("items[{index}]"))))
                .collect::<Result<_, _>>()?,
            optional: optional.unwrap_or(false),
        })
    }
}

/// A key of an object, and the file that it becomes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyPath {
    /// The key in the object.
    pub key: String,
    /// The file in the volume.
    pub path: PayloadPath,
    /// Permission bits; without them, those of the volume.
    pub mode: Option<u16>,
    /// Owner; without it, that of the volume (KEP-5936).
    pub user: Option<u32>,
}

impl KeyPath {
    fn parse(item: &KeyToPath) -> Result<KeyPath, InvalidField> {
        Ok(KeyPath {
            key: types::required("key", Some(&item.key))?.to_owned(),
            path: types::payload_path("path", &item.path)?,
            mode: item.mode.map(|mode| types::mode("mode", mode)).transpose()?,
            user: item.user.map(|user| types::numeric_id("user", user)).transpose()?,
        })
    }
}

/// An object that a volume needs. Its text is `ConfigMap app`, or `ConfigMap app (optional)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reference<'a> {
    /// `ConfigMap` or `Secret`.
    pub kind: &'static str,
    /// The object's name, in the pod's namespace.
    pub name: &'a str,
    /// Whether podfs mounts the volume without the object.
    pub optional: bool,
}

impl<'a> Reference<'a> {
    fn to(kind: &'static str, object: &'a ObjectSource) -> Reference<'a> {
        Reference { kind, name: &object.name, optional: object.optional }
    }
}

impl fmt::Display for Reference<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let optional = if self.optional { " (optional)" } else { "" };
        write!(f, "{} {}{optional}", self.kind, self.name)
    }
}

/// A volume's `defaultMode`.
pub(super) fn default_mode(mode: Option<i32>) -> Result<u16, InvalidField> {
    mode.map_or(Ok(DEFAULT_MODE), |mode| types::mode("defaultMode", mode))
}

/// A volume's `defaultUser`.
pub(super) fn default_user(user: Option<i64>) -> Result<Option<u32>, InvalidField> {
    user.map(|user| types::numeric_id("defaultUser", user)).transpose()
}
