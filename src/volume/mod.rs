//! Volumes of a pod: from the manifest's words to a description of the mount. This module does no I/O.
//!
//! Each kind of volume is one file with a [`VolumeType`], and one line in `KINDS`. A kind has its names, and parses its part of
//! the manifest; the result is a [`VolumeSource`].

mod certificate;
mod claim;
mod config_map;
mod credential;
pub mod csi;
mod downward_api;
mod downward_file;
mod empty_dir;
mod flex;
mod host_path;
pub mod migration;
mod nested;
mod nfs;
mod preferences;
mod projected;
mod projection;
mod secret;
mod selector;
mod unsupported;

use std::fmt;

use k8s_openapi::api::core::v1 as core;

pub use certificate::{CertificateFiles, CertificateKey, KeyType};
pub use claim::{Claim, ClaimReference, ClaimUsage};
pub use credential::{BundleFile, BundleKey, CredentialKey, TokenFile, TokenKey};
pub use csi::{Csi, SecretReference};
pub use downward_file::{ContainerResource, DownwardFile, DownwardValue, ResourceBound};
pub(crate) use empty_dir::PageSize;
pub use empty_dir::{EmptyDir, Storage};
pub use flex::Flex;
pub use host_path::{HostPath, HostPathType};
pub use nfs::{Nfs, NfsOptions, options as nfs_options};
pub use preferences::{Preferences, ServedBy, SubPathMode, VOLUMES_KEY};
pub(crate) use preferences::{check_annotation_keys, forget_other_volumes, keep_volume, set_mount_options, set_within};
pub use projection::{KeyPath, Medium, ObjectSource, Projection, ProjectionSource, Reference};
pub use selector::Selector;
pub use unsupported::VolumeFields;

use crate::types::{InvalidField, PayloadPath, is_dns_label, required};

/// Every kind of volume this version knows.
const KINDS: &[&VolumeType] = &[
    &config_map::KIND,
    &secret::KIND,
    &downward_api::KIND,
    &projected::KIND,
    &host_path::KIND,
    &empty_dir::KIND,
    &nfs::KIND,
    &claim::KIND,
    &claim::EPHEMERAL,
    &flex::KIND,
    &csi::KIND,
    &migration::AWS_ELASTIC_BLOCK_STORE,
    &migration::AZURE_DISK,
    &migration::AZURE_FILE,
    &migration::CINDER,
    &migration::GCE_PERSISTENT_DISK,
    &migration::PORTWORX_VOLUME,
    &migration::VSPHERE_VOLUME,
];

/// A volume of a pod. If a volume of a changed pod equals the earlier one, podfs need not mount it anew.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volume {
    /// Its name in the pod.
    pub name: VolumeName,
    /// Its kind.
    pub kind: &'static VolumeType,
    /// Directories that podfs makes in the volume for other volumes that containers mount there. Only a projection has them;
    /// those of a passthrough volume belong to the user.
    pub nested: Vec<PayloadPath>,
    /// The source of its content.
    pub source: VolumeSource,
    /// The user's choices for it.
    pub preferences: Preferences,
}

/// The volumes that the containers of a pod use: an entry for each container, init container and ephemeral container.
#[derive(Clone, Debug, Default)]
pub struct VolumeUses<'a> {
    /// Their `volumeMounts`.
    pub mounts: Vec<&'a [core::VolumeMount]>,
    /// Their `volumeDevices`.
    pub devices: Vec<&'a [core::VolumeDevice]>,
}

impl Volume {
    /// Parses one entry of a pod's `spec.volumes`.
    ///
    /// `containers` is empty for a volume without a pod (`podfs mount`). `fields` are the fields of the volume in the manifest.
    /// A kind that podfs does not serve becomes [`VolumeSource::Unsupported`].
    ///
    /// # Errors
    /// The first field that breaks a rule of the API; the sentence names the volume, the path is relative to it.
    pub fn parse(
        volume: &core::Volume,
        fields: &VolumeFields,
        containers: &VolumeUses<'_>,
    ) -> Result<Volume, InvalidField> {
        let name = VolumeName::parse(&volume.name)?;
        let named = |error: InvalidField| InvalidField {
            sentence: format!("volume {:?}: {}", name.as_str(), error.sentence),
            ..error
        };
        let (kind, source) = match fields.newer_kind(volume).map_err(named)? {
            Some(kind) => (&unsupported::UNSUPPORTED, VolumeSource::Unsupported(kind)),
            None => parse_source(volume, containers).map_err(named)?,
        };
        let nested = match source {
            VolumeSource::Projection(_) => nested::directories(name.as_str(), &containers.mounts),
            _ => Ok(Vec::new()),
        };
        let nested = nested.map_err(|error| named(InvalidField::new("", error)))?;
        Ok(Volume { name, kind, nested, source, preferences: Preferences::default() })
    }

    /// Whether its mount fits a new definition of the volume. Annotations, and how containers use the volume, are not compared: they
    /// take effect only when podfs mounts the volume.
    pub fn fits(&self, next: &Volume) -> bool {
        let source = |volume: &Volume| match volume.source.clone() {
            VolumeSource::Claim(claim) => VolumeSource::Claim(Claim { usage: ClaimUsage::default(), ..claim }),
            source => source,
        };
        self.kind.directory == next.kind.directory && source(self).can_become(&source(next))
    }

    /// Whether containers get it as a block device.
    pub fn is_block_device(&self) -> bool {
        matches!(&self.source, VolumeSource::Claim(claim) if claim.usage.device)
    }

    /// Its kind, as the manifest says it: `configMap`.
    pub fn field(&self) -> &str {
        match &self.source {
            VolumeSource::Unsupported(field) => field,
            _ => self.kind.field,
        }
    }

    /// Why podfs does not serve it, if it does not.
    pub fn unsupported_reason(&self) -> Option<String> {
        let field = self.field();
        let instead = match &self.source {
            VolumeSource::Unsupported(_) => migration::instead_of(field).map(str::to_owned),
            _ => return None,
        };
        let instead = instead.unwrap_or_else(|| format!("supported are {}", supported()));
        Some(format!("{field} volumes are not supported by this version; {instead}"))
    }

    /// The name of the claim that it shows, if it shows one, in the pod of this name.
    pub fn claim_name(&self, pod: &str) -> Option<String> {
        match &self.source {
            VolumeSource::Claim(claim) => Some(claim.reference.name(pod, self.name.as_str())),
            _ => None,
        }
    }
}

/// The source of a volume's content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VolumeSource {
    /// Files that podfs assembles.
    Projection(Projection),
    /// A file or directory of the node.
    HostPath(HostPath),
    /// A directory that belongs to the pod.
    EmptyDir(EmptyDir),
    /// A directory that an NFS server exports, and the options of its mount.
    Nfs(Nfs, Box<NfsOptions>),
    /// The PersistentVolume of a claim.
    Claim(Claim),
    /// A volume of a FlexVolume driver.
    Flex(Box<Flex>),
    /// A volume of a CSI driver.
    Csi(Box<Csi>),
    /// A kind that this version does not serve, by its name in the manifest.
    Unsupported(String),
}

impl VolumeSource {
    /// Whether a volume of this source that is mounted can show `next` without a new mount: both are the same, or an emptyDir has
    /// another size limit.
    pub fn can_become(&self, next: &VolumeSource) -> bool {
        match (self, next) {
            (VolumeSource::EmptyDir(now), VolumeSource::EmptyDir(next)) => now == next || now.can_become(*next),
            _ => self == next,
        }
    }
}

/// A kind of volume: its names and its parser.
pub struct VolumeType {
    /// Its field in the manifest, such as `configMap`.
    pub field: &'static str,
    /// The directory in which the kubelet keeps such volumes, such as `kubernetes.io~configmap`; none if it depends on the
    /// PersistentVolume or on the driver.
    pub directory: Option<&'static str>,
    /// Parses the kind's field; none if the volume does not have the field. Errors are relative to the field.
    parse: Parse,
}

type Parse = fn(&core::Volume, &VolumeUses<'_>) -> Option<Result<VolumeSource, InvalidField>>;

impl PartialEq for VolumeType {
    fn eq(&self, other: &VolumeType) -> bool {
        self.field == other.field
    }
}

impl Eq for VolumeType {}

impl fmt::Debug for VolumeType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.field)
    }
}

/// The name of a volume in its pod: a DNS label, and so safe as a path element.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeName(String);

impl VolumeName {
    fn parse(name: &str) -> Result<VolumeName, InvalidField> {
        required("name", Some(name))?;
        if !is_dns_label(name) {
            let sentence = format!(
                "volume {name:?}: a volume's name is at most 63 lower-case letters, digits and '-', \
                 with a letter or digit at both ends"
            );
            return Err(InvalidField::new("name", sentence));
        }
        Ok(VolumeName(name.to_owned()))
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for VolumeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn parse_source(
    volume: &core::Volume,
    containers: &VolumeUses<'_>,
) -> Result<(&'static VolumeType, VolumeSource), InvalidField> {
    let given = sources_given(volume);
    let field = match given.as_slice() {
        [field] => field,
        [] => {
            // The default of the API server and the kubelet (`SetDefaults_Volume`).
            let volume = core::Volume { empty_dir: Some(core::EmptyDirVolumeSource::default()), ..volume.clone() };
            return parse_source(&volume, containers);
        }
        several => {
            let sentence = format!("may not specify more than 1 volume type; it has {}", several.join(" and "));
            return Err(InvalidField::new("", sentence));
        }
    };
    let parsed = KINDS.iter().find_map(|kind| (kind.parse)(volume, containers).map(|source| (*kind, source)));
    match parsed {
        Some((kind, source)) => Ok((kind, source.map_err(|error| error.under(kind.field))?)),
        None => Ok((&unsupported::UNSUPPORTED, VolumeSource::Unsupported(field.clone()))),
    }
}

/// The names of a volume's fields that are sources: all but `name`.
fn sources_given(volume: &core::Volume) -> Vec<String> {
    match serde_json::to_value(volume) {
        Ok(serde_json::Value::Object(fields)) => {
            fields.into_iter().map(|(field, _)| field).filter(|field| field != "name").collect()
        }
        // A struct of plain fields always becomes an object.
        _ => Vec::new(),
    }
}

fn supported() -> String {
    let own = KINDS.iter().filter(|kind| kind.directory != Some(Csi::DIRECTORY) || kind.field == csi::KIND.field);
    own.map(|kind| kind.field).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests;
