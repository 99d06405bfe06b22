//! Kinds of volume that Kubernetes has moved to CSI drivers, translated to the description that the driver expects (Kubernetes
//! calls this CSI migration, and the rules are those of its csi-translation-lib); and replacements of the kinds that it has
//! removed.
//!
//! The fields of a PersistentVolume are those of a volume in a pod, except a few: [`Context`] distinguishes the two.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1 as core;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::csi::{Csi, SecretReference, non_empty};
use super::{VolumeSource, VolumeType};
use crate::types::{InvalidField, required};

/// The word in a Google disk's handle for a project or zone that the driver finds itself.
const UNSPECIFIED: &str = "UNSPECIFIED";
/// The separator of zones in the label of a disk with several.
const BETWEEN_ZONES: &str = "__";
/// The labels of a PersistentVolume that name its zones. The first, older one takes precedence.
const ZONES: [&str; 2] = ["failure-domain.beta.kubernetes.io/zone", "topology.kubernetes.io/zone"];
const AZURE_FILE_DRIVER: &str = "file.csi.azure.com";
const GOOGLE_DISK_DRIVER: &str = "pd.csi.storage.gke.io";
const PORTWORX_DRIVER: &str = "pxd.portworx.com";
/// The annotation of a PersistentVolume that names the Azure resource group.
const RESOURCE_GROUP: &str = "kubernetes.io/azure-file-resource-group";

/// The inputs of a translation besides the fields of the kind.
#[derive(Clone, Copy, Debug, Default)]
pub struct Context<'a> {
    /// The name of the volume in its pod, or of the PersistentVolume.
    pub name: &'a str,
    /// Labels of the PersistentVolume.
    pub labels: Option<&'a BTreeMap<String, String>>,
    /// Annotations of the PersistentVolume.
    pub annotations: Option<&'a BTreeMap<String, String>>,
    /// The namespace of the claim that the PersistentVolume is bound to.
    pub claim_namespace: Option<&'a str>,
}

/// A kind that is translated.
struct MigratedKind {
    field: &'static str,
    /// Translates the fields of the kind.
    translate: fn(&Value, Context<'_>) -> Result<Csi, InvalidField>,
}

/// The kubelet's plugins for these kinds, as a CSINode object lists them.
pub const REPLACED_PLUGINS: [&str; 7] = [
    "kubernetes.io/aws-ebs",
    "kubernetes.io/azure-disk",
    "kubernetes.io/azure-file",
    "kubernetes.io/cinder",
    "kubernetes.io/gce-pd",
    "kubernetes.io/portworx-volume",
    "kubernetes.io/vsphere-volume",
];

const MIGRATED: [MigratedKind; 7] = [
    MigratedKind { field: "awsElasticBlockStore", translate: |fields, _| aws_elastic_block_store(&typed(fields)?) },
    MigratedKind { field: "azureDisk", translate: |fields, _| azure_disk(&typed(fields)?) },
    MigratedKind { field: "azureFile", translate: |fields, context| azure_file(&typed(fields)?, context) },
    MigratedKind { field: "cinder", translate: |fields, _| cinder(&typed(fields)?) },
    MigratedKind {
        field: "gcePersistentDisk",
        translate: |fields, context| gce_persistent_disk(&typed(fields)?, context),
    },
    MigratedKind { field: "portworxVolume", translate: |fields, _| portworx(&typed(fields)?) },
    MigratedKind { field: "vsphereVolume", translate: |fields, _| vsphere(&typed(fields)?) },
];

const fn kind(field: &'static str, parse: super::Parse) -> VolumeType {
    VolumeType { field, directory: Some(Csi::DIRECTORY), parse }
}

pub(super) const AWS_ELASTIC_BLOCK_STORE: VolumeType = kind("awsElasticBlockStore", |volume, _| {
    inline("awsElasticBlockStore", volume, volume.aws_elastic_block_store.as_ref())
});
pub(super) const AZURE_DISK: VolumeType =
    kind("azureDisk", |volume, _| inline("azureDisk", volume, volume.azure_disk.as_ref()));
pub(super) const AZURE_FILE: VolumeType =
    kind("azureFile", |volume, _| inline("azureFile", volume, volume.azure_file.as_ref()));
pub(super) const CINDER: VolumeType = kind("cinder", |volume, _| inline("cinder", volume, volume.cinder.as_ref()));
pub(super) const GCE_PERSISTENT_DISK: VolumeType =
    kind("gcePersistentDisk", |volume, _| inline("gcePersistentDisk", volume, volume.gce_persistent_disk.as_ref()));
pub(super) const PORTWORX_VOLUME: VolumeType =
    kind("portworxVolume", |volume, _| inline("portworxVolume", volume, volume.portworx_volume.as_ref()));
pub(super) const VSPHERE_VOLUME: VolumeType =
    kind("vsphereVolume", |volume, _| inline("vsphereVolume", volume, volume.vsphere_volume.as_ref()));

/// The source of a volume in a pod's manifest.
fn inline<T: serde::Serialize>(
    field: &str,
    volume: &core::Volume,
    source: Option<&T>,
) -> Option<Result<VolumeSource, InvalidField>> {
    // A struct of plain fields always becomes a value.
    let fields = serde_json::to_value(source?).unwrap_or_default();
    let context = Context { name: &volume.name, ..Context::default() };
    translate(field, &fields, context).map(|csi| csi.map(|csi| VolumeSource::Csi(Box::new(csi))))
}

/// The same volume as its CSI driver describes it, if a driver replaces the kind. Errors are relative to the kind's fields.
pub fn translate(field: &str, fields: &Value, context: Context<'_>) -> Option<Result<Csi, InvalidField>> {
    let migrated = MIGRATED.iter().find(|migrated| migrated.field == field)?;
    Some((migrated.translate)(fields, context))
}

/// The access modes of a PersistentVolume as the CSI driver for its kind takes them. The plugin for Google disks did not check
/// access modes, and its CSI driver does: it refuses `ReadWriteMany`, and a second mode beside `ReadWriteOnce`.
pub fn access_modes(field: &str, modes: Vec<String>) -> Vec<String> {
    let is_writable = modes.iter().any(|mode| matches!(mode.as_str(), "ReadWriteOnce" | "ReadWriteMany"));
    if field == "gcePersistentDisk" && is_writable { vec!["ReadWriteOnce".to_owned()] } else { modes }
}

/// Completes a handle that ends with the namespace of the volume's pod, which [`translate`] does not know.
pub fn complete(csi: &mut Csi, namespace: &str) {
    if let (AZURE_FILE_DRIVER, Some(handle)) = (csi.driver.as_str(), &mut csi.handle)
        && handle.ends_with('#')
    {
        handle.push_str(namespace);
    }
}

/// The access mode of a volume that the pod itself describes; a volume of a claim has those of its PersistentVolume.
pub fn inline_access_mode(csi: &Csi) -> &'static str {
    match csi.driver.as_str() {
        AZURE_FILE_DRIVER if !csi.is_ephemeral() => "ReadWriteMany",
        GOOGLE_DISK_DRIVER | PORTWORX_DRIVER if !csi.is_ephemeral() && csi.read_only => "ReadOnlyMany",
        _ => "ReadWriteOnce",
    }
}

/// The replacement of a kind that podfs does not serve, in words that end a sentence.
pub fn instead_of(field: &str) -> Option<&'static str> {
    Some(match field {
        "iscsi" => "use a PersistentVolume of the CSI driver iscsi.csi.k8s.io, or a local one on the mounted disk",
        "fc" => "use a PersistentVolume of the storage vendor's CSI driver, or a local one on the mounted disk",
        "rbd" => "use a PersistentVolume of the CSI driver rbd.csi.ceph.com",
        "cephfs" => "use a PersistentVolume of the CSI driver cephfs.csi.ceph.com",
        "glusterfs" => "use the servers' NFS export with a volume of kind nfs, or the vendor's CSI driver",
        "gitRepo" => "clone the repository into an emptyDir with an init container",
        "image" => "the container runtime mounts it, and podfs leaves it to the runtime",
        "flocker" | "photonPersistentDisk" | "quobyte" | "scaleIO" | "storageos" => {
            "Kubernetes has removed the kind; use a PersistentVolume of the vendor's CSI driver"
        }
        _ => return None,
    })
}

/// The fields of a kind, as its type.
///
/// # Errors
/// A field of the wrong type. The message has neither its name nor its value, because both may be secret.
pub fn typed<T: DeserializeOwned>(fields: &Value) -> Result<T, InvalidField> {
    serde_json::from_value(fields.clone())
        .map_err(|_| InvalidField::new("", "has a field of the wrong type; compare it with the API's reference"))
}

fn attributes<const N: usize>(attributes: [(&str, String); N]) -> BTreeMap<String, String> {
    attributes.map(|(key, value)| (key.to_owned(), value)).into()
}

fn disk(driver: &str, handle: String, fs_type: &Option<String>, read_only: Option<bool>) -> Csi {
    Csi {
        driver: driver.to_owned(),
        handle: Some(handle),
        fs_type: non_empty(fs_type),
        read_only: read_only.unwrap_or(false),
        ..Csi::default()
    }
}

fn aws_elastic_block_store(source: &core::AWSElasticBlockStoreVolumeSource) -> Result<Csi, InvalidField> {
    let id = required("volumeID", Some(&source.volume_id))?;
    let handle = match id.strip_prefix("aws://") {
        None => id,
        // `aws://ZONE/ID`, where the zone may be empty.
        Some(rest) => rest.split_once('/').map_or("", |(_, path)| path.trim_matches('/')),
    };
    if id.starts_with("aws://") && (!handle.starts_with("vol-") || handle.contains('/')) {
        return Err(InvalidField::new(
            "volumeID",
            format!("{id:?} is no volume of AWS; write vol-ID, or aws://ZONE/vol-ID"),
        ));
    }
    let partition = source.partition.unwrap_or(0).to_string();
    let attributes = attributes([("partition", partition)]);
    Ok(Csi { attributes, ..disk("ebs.csi.aws.com", handle.to_owned(), &source.fs_type, source.read_only) })
}

fn azure_disk(source: &core::AzureDiskVolumeSource) -> Result<Csi, InvalidField> {
    let handle = required("diskURI", Some(&source.disk_uri))?;
    let mut attributes = attributes([("kind", source.kind.clone().unwrap_or_else(|| "Managed".to_owned()))]);
    attributes.extend(non_empty(&source.caching_mode).map(|mode| ("cachingMode".to_owned(), mode)));
    attributes.extend(source.fs_type.clone().map(|fs_type| ("fsType".to_owned(), fs_type)));
    Ok(Csi { attributes, ..disk("disk.csi.azure.com", handle.to_owned(), &source.fs_type, source.read_only) })
}

fn azure_file(source: &core::AzureFilePersistentVolumeSource, context: Context<'_>) -> Result<Csi, InvalidField> {
    let secret = required("secretName", Some(&source.secret_name))?;
    let share = required("shareName", Some(&source.share_name))?;
    let account = secret.split_once("azure-storage-account-").and_then(|(_, rest)| rest.rsplit_once("-secret"));
    let account = account.map_or(secret, |(account, _)| account);
    let group = context.annotations.and_then(|annotations| annotations.get(RESOURCE_GROUP)).map_or("", String::as_str);
    let namespace = non_empty(&source.secret_namespace).or_else(|| context.claim_namespace.map(str::to_owned));
    let of_pod = namespace.as_deref().unwrap_or_default();
    let handle = format!("{group}#{account}#{share}#{}#{of_pod}", context.name);
    Ok(Csi {
        attributes: attributes([("sharename", share.to_owned())]),
        stage_secret: Some(SecretReference { namespace, name: secret.to_owned() }),
        ..disk(AZURE_FILE_DRIVER, handle, &None, source.read_only)
    })
}

fn cinder(source: &core::CinderPersistentVolumeSource) -> Result<Csi, InvalidField> {
    let handle = required("volumeID", Some(&source.volume_id))?;
    Ok(disk("cinder.csi.openstack.org", handle.to_owned(), &source.fs_type, source.read_only))
}

fn gce_persistent_disk(
    source: &core::GCEPersistentDiskVolumeSource,
    context: Context<'_>,
) -> Result<Csi, InvalidField> {
    let name = required("pdName", Some(&source.pd_name))?;
    let label = ZONES.iter().find_map(|key| context.labels?.get(*key).filter(|zones| !zones.is_empty()));
    let zones: Vec<&str> = label.map(|zones| zones.split(BETWEEN_ZONES).collect()).unwrap_or_default();
    let place = match zones.as_slice() {
        [] => format!("zones/{UNSPECIFIED}"),
        [zone] => format!("zones/{zone}"),
        several => format!("regions/{}", region(several)?),
    };
    let partition = source.partition.filter(|partition| *partition != 0);
    let attributes = attributes([("partition", partition.map_or(String::new(), |partition| partition.to_string()))]);
    let handle = format!("projects/{UNSPECIFIED}/{place}/disks/{name}");
    Ok(Csi { attributes, ..disk(GOOGLE_DISK_DRIVER, handle, &source.fs_type, source.read_only) })
}

/// The region of zones such as `europe-west1-b`.
fn region(zones: &[&str]) -> Result<String, InvalidField> {
    let regions: Option<BTreeSet<&str>> = zones
        .iter()
        .map(|zone| zone.rsplit_once('-').map(|(region, _)| region).filter(|it| it.contains('-')))
        .collect();
    match regions.as_ref().and_then(|regions| regions.first()) {
        Some(region) if regions.as_ref().is_some_and(|regions| regions.len() == 1) => Ok((*region).to_owned()),
        _ => Err(InvalidField::new("pdName", "the zones of the PersistentVolume's label are not those of one region")),
    }
}

fn portworx(source: &core::PortworxVolumeSource) -> Result<Csi, InvalidField> {
    let handle = required("volumeID", Some(&source.volume_id))?;
    Ok(disk(PORTWORX_DRIVER, handle.to_owned(), &source.fs_type, source.read_only))
}

fn vsphere(source: &core::VsphereVirtualDiskVolumeSource) -> Result<Csi, InvalidField> {
    let handle = required("volumePath", Some(&source.volume_path))?;
    let policy = non_empty(&source.storage_policy_name);
    let attributes = policy.map(|policy| ("storagepolicyname".to_owned(), policy)).into_iter().collect();
    Ok(Csi { attributes, ..disk("csi.vsphere.vmware.com", handle.to_owned(), &source.fs_type, None) })
}

#[cfg(test)]
mod tests;
