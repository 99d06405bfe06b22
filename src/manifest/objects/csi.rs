//! CSIDriver and VolumeAttachment objects: the features of drivers, and the attachments of volumes to nodes.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::ObjectContent;
use super::metadata::{LongMetadata, Parsed};

/// A CSIDriver object: the options for calls of this driver. A driver without such an object has the API's defaults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CsiDriver {
    /// A volume must be attached to the node before the driver mounts it.
    pub attach_required: bool,
    /// The driver gets the pod's name, namespace, uid and service account with each volume.
    pub pod_info_on_mount: bool,
    /// The life cycles of the volumes that the driver serves: `Persistent`, `Ephemeral`.
    pub lifecycle_modes: Vec<String>,
    /// podfs repeats NodePublishVolume from time to time.
    pub requires_republish: bool,
    /// When podfs gives files to the pod's group.
    pub fs_group_policy: DriverFsGroupPolicy,
    /// The tokens of the pod's service account that the driver gets.
    pub token_requests: Vec<CsiTokenRequest>,
    /// The driver gets the tokens among the secrets of a call, and not among the volume's attributes.
    pub tokens_in_secrets: bool,
}

impl Default for CsiDriver {
    fn default() -> CsiDriver {
        CsiDriver {
            attach_required: true,
            pod_info_on_mount: false,
            lifecycle_modes: default_lifecycle_modes(),
            requires_republish: false,
            fs_group_policy: DriverFsGroupPolicy::default(),
            token_requests: Vec::new(),
            tokens_in_secrets: false,
        }
    }
}

fn default_lifecycle_modes() -> Vec<String> {
    vec!["Persistent".to_owned()]
}

/// When podfs gives the files of a driver's volume to the pod's group (`fsGroupPolicy`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DriverFsGroupPolicy {
    /// If the volume has a file system type, and only one node may use it.
    #[default]
    ReadWriteOnceWithFsType,
    /// Always.
    File,
    /// Never.
    None,
}

/// A token that a driver gets.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CsiTokenRequest {
    /// Its audience; the API server if it is empty.
    #[serde(default)]
    pub audience: String,
    /// The requested lifetime of the token, in seconds.
    pub expiration_seconds: Option<i64>,
}

/// A VolumeAttachment object: the state of a volume's attachment to a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VolumeAttachment {
    /// It is attached.
    pub attached: bool,
    /// The attachment metadata for the driver.
    pub metadata: BTreeMap<String, String>,
    /// Why it could not be attached.
    pub error: Option<String>,
    /// It is being detached.
    pub deleting: bool,
}

#[derive(Deserialize)]
pub(super) struct CsiDriverObject {
    #[serde(default)]
    metadata: LongMetadata,
    #[serde(default)]
    spec: CsiDriverSpec,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct CsiDriverSpec {
    attach_required: Option<bool>,
    pod_info_on_mount: Option<bool>,
    volume_lifecycle_modes: Option<Vec<String>>,
    requires_republish: Option<bool>,
    fs_group_policy: Option<String>,
    token_requests: Option<Vec<CsiTokenRequest>>,
    service_account_token_in_secrets: Option<bool>,
}

pub(super) fn csi_driver(object: CsiDriverObject) -> Parsed {
    let CsiDriverObject { metadata, spec } = object;
    let lifecycle_modes = spec.volume_lifecycle_modes.filter(|modes| !modes.is_empty());
    let driver = CsiDriver {
        attach_required: spec.attach_required.unwrap_or(true),
        pod_info_on_mount: spec.pod_info_on_mount.unwrap_or(false),
        lifecycle_modes: lifecycle_modes.unwrap_or_else(default_lifecycle_modes),
        requires_republish: spec.requires_republish.unwrap_or(false),
        fs_group_policy: match spec.fs_group_policy.as_deref() {
            Some("File") => DriverFsGroupPolicy::File,
            Some("None") => DriverFsGroupPolicy::None,
            _ => DriverFsGroupPolicy::ReadWriteOnceWithFsType,
        },
        token_requests: spec.token_requests.unwrap_or_default(),
        tokens_in_secrets: spec.service_account_token_in_secrets.unwrap_or(false),
    };
    Parsed { metadata: metadata.short(), immutable: false, content: ObjectContent::CsiDriver(driver) }
}

#[derive(Deserialize)]
pub(super) struct VolumeAttachmentObject {
    #[serde(default)]
    metadata: LongMetadata,
    #[serde(default)]
    status: VolumeAttachmentStatus,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct VolumeAttachmentStatus {
    attached: Option<bool>,
    attachment_metadata: Option<BTreeMap<String, String>>,
    attach_error: Option<VolumeError>,
}

#[derive(Deserialize)]
struct VolumeError {
    message: Option<String>,
}

pub(super) fn volume_attachment(object: VolumeAttachmentObject) -> Parsed {
    let VolumeAttachmentObject { metadata, status } = object;
    let attachment = VolumeAttachment {
        attached: status.attached.unwrap_or(false),
        metadata: status.attachment_metadata.unwrap_or_default(),
        error: status.attach_error.map(|error| error.message.unwrap_or_default()),
        deleting: metadata.deletion_timestamp.is_some(),
    };
    Parsed { metadata: metadata.short(), immutable: false, content: ObjectContent::VolumeAttachment(attachment) }
}
