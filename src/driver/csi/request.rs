//! The request messages of CSI.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use super::client::CsiCapabilities;
use super::{CsiMount, DriverError, DriverHome, NodeMount};
use crate::csi::v1::volume_capability::access_mode::Mode;
use crate::csi::v1::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use crate::csi::v1::{
    CapacityRange, NodeExpandVolumeRequest, NodePublishVolumeRequest, NodeStageVolumeRequest, VolumeCapability,
};
use crate::manifest::objects::{Secret, Values};

/// The prefix of the attributes that describe the pod.
const ATTRIBUTE: &str = "csi.storage.k8s.io/";

impl CsiMount<'_> {
    /// The request to stage the volume at a path of the node.
    pub(super) fn stage_request(
        &self,
        can: CsiCapabilities,
        path: &Path,
    ) -> Result<NodeStageVolumeRequest, DriverError> {
        Ok(NodeStageVolumeRequest {
            volume_id: self.handle(),
            publish_context: pairs(self.publish_context),
            staging_target_path: text(path)?,
            volume_capability: Some(self.capability(can)),
            secrets: secrets(self.stage_secret)?,
            volume_context: pairs(&self.csi.attributes),
        })
    }

    /// The request to publish the volume at its home.
    pub(super) fn publish_request(
        &self,
        home: &DriverHome,
        can: CsiCapabilities,
        node_mount: Option<&NodeMount>,
    ) -> Result<NodePublishVolumeRequest, DriverError> {
        let mut volume_context = self.csi.attributes.clone();
        if self.driver.pod_info_on_mount {
            let ephemeral = self.csi.is_ephemeral().to_string();
            for (key, value) in [
                ("pod.name", self.pod.name.as_str()),
                ("pod.namespace", &self.pod.namespace),
                ("pod.uid", self.pod.uid.as_str()),
                ("serviceAccount.name", &self.facts.service_account),
                ("ephemeral", &ephemeral),
            ] {
                volume_context.insert(format!("{ATTRIBUTE}{key}"), value.to_owned());
            }
        }
        let mut secrets = secrets(self.publish_secret)?;
        if let Some(tokens) = &self.tokens {
            let key = format!("{ATTRIBUTE}serviceAccount.tokens");
            match self.driver.tokens_in_secrets {
                true => drop(secrets.insert(key, tokens.clone())),
                false => drop(volume_context.insert(key, tokens.clone())),
            }
        }
        Ok(NodePublishVolumeRequest {
            volume_id: self.handle(),
            publish_context: pairs(self.publish_context),
            staging_target_path: node_mount.map(|mount| text(&mount.path())).transpose()?.unwrap_or_default(),
            target_path: text(&home.target())?,
            volume_capability: Some(self.capability(can)),
            readonly: self.read_only,
            secrets,
            volume_context: pairs(&volume_context),
        })
    }

    /// The request to grow the volume to a number of bytes.
    pub(super) fn expand_request(
        &self,
        home: &DriverHome,
        can: CsiCapabilities,
        node_mount: Option<&NodeMount>,
        bytes: u64,
    ) -> Result<NodeExpandVolumeRequest, DriverError> {
        let required_bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        Ok(NodeExpandVolumeRequest {
            volume_id: self.handle(),
            volume_path: text(&home.target())?,
            capacity_range: Some(CapacityRange { required_bytes, limit_bytes: 0 }),
            staging_target_path: node_mount.map(|mount| text(&mount.path())).transpose()?.unwrap_or_default(),
            volume_capability: Some(self.capability(can)),
            secrets: secrets(self.expand_secret)?,
        })
    }

    fn capability(&self, can: CsiCapabilities) -> VolumeCapability {
        let mode = access_mode(self.access_modes.first().copied(), can);
        let access_type = match self.is_block {
            true => AccessType::Block(BlockVolume {}),
            false => AccessType::Mount(self.mount_volume(can)),
        };
        VolumeCapability { access_mode: Some(AccessMode { mode: mode.into() }), access_type: Some(access_type) }
    }

    fn mount_volume(&self, can: CsiCapabilities) -> MountVolume {
        let group = self.facts.fs_group.filter(|_| can.mount_group);
        MountVolume {
            fs_type: self.csi.fs_type.clone().unwrap_or_default(),
            mount_flags: self.mount_options.iter().filter(|option| !option.is_empty()).cloned().collect(),
            volume_mount_group: group.map(|group| group.to_string()).unwrap_or_default(),
        }
    }
}

/// Converts an access mode of the API to that of CSI.
fn access_mode(mode: Option<&str>, can: CsiCapabilities) -> Mode {
    match (mode, can.multi_writer) {
        (Some("ReadOnlyMany"), _) => Mode::MultiNodeReaderOnly,
        (Some("ReadWriteMany"), _) => Mode::MultiNodeMultiWriter,
        (Some("ReadWriteOncePod"), true) => Mode::SingleNodeSingleWriter,
        (Some("ReadWriteOnce"), true) => Mode::SingleNodeMultiWriter,
        _ => Mode::SingleNodeWriter,
    }
}

/// The fields of a Secret. CSI only has text.
fn secrets(secret: Option<&Secret>) -> Result<HashMap<String, String>, DriverError> {
    let values = secret.into_iter().flat_map(Values::values);
    let text = |(key, value): (&str, &[u8])| match String::from_utf8(value.to_vec()) {
        Ok(value) => Ok((key.to_owned(), value)),
        Err(_) => Err(DriverError::refused(format!(
            "key {key:?} of the volume's Secret is no text, and CSI drivers take text"
        ))),
    };
    values.map(text).collect()
}

fn pairs(pairs: &BTreeMap<String, String>) -> HashMap<String, String> {
    pairs.iter().map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// A path for a driver, as text.
///
/// # Errors
/// When it is not UTF-8.
pub(super) fn text(path: &Path) -> Result<String, DriverError> {
    let path: PathBuf = path.to_owned();
    path.into_os_string()
        .into_string()
        .map_err(|path| DriverError::refused(format!("{} is not UTF-8, and drivers take text", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cs_02_access_modes_are_those_of_the_driver() {
        let (plain, multi) =
            (CsiCapabilities::default(), CsiCapabilities { multi_writer: true, ..CsiCapabilities::default() });
        for (mode, can, expected) in [
            (None, plain, Mode::SingleNodeWriter),
            (Some("ReadWriteOnce"), plain, Mode::SingleNodeWriter),
            (Some("ReadWriteOnce"), multi, Mode::SingleNodeMultiWriter),
            (Some("ReadWriteOncePod"), plain, Mode::SingleNodeWriter),
            (Some("ReadWriteOncePod"), multi, Mode::SingleNodeSingleWriter),
            (Some("ReadOnlyMany"), multi, Mode::MultiNodeReaderOnly),
            (Some("ReadWriteMany"), plain, Mode::MultiNodeMultiWriter),
        ] {
            assert_eq!(access_mode(mode, can), expected, "{mode:?}");
        }
    }
}
