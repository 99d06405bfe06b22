//! csi volumes: volumes that a CSI driver of the node mounts. Kinds of volume that Kubernetes has moved to CSI drivers are
//! [translated](super::migration) to the same description.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{CSIPersistentVolumeSource, CSIVolumeSource, LocalObjectReference, Volume};
use ring::digest::{SHA256, digest};

use super::{VolumeSource, VolumeType};
use crate::types::{InvalidField, required};

/// Longest name of a driver.
const MAX_DRIVER: usize = 63;

pub(super) const KIND: VolumeType = VolumeType {
    field: "csi",
    directory: Some(Csi::DIRECTORY),
    parse: |volume: &Volume, _| {
        let csi = Csi::parse_inline(volume.csi.as_ref()?);
        Some(csi.map(|csi| VolumeSource::Csi(Box::new(csi))))
    },
};

/// A volume of a CSI driver.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Csi {
    /// The driver's name, which is safe as a path element.
    pub driver: String,
    /// The driver's handle of the volume. An inline ephemeral volume, which exists as long as its pod, has none.
    pub handle: Option<String>,
    /// The file system that the volume should have; the driver decides if there is none.
    pub fs_type: Option<String>,
    /// Whether containers can only read the volume. For a claim, the claim's `readOnly` decides instead (PV-07).
    pub read_only: bool,
    /// Further attributes for the driver.
    pub attributes: BTreeMap<String, String>,
    /// The Secret that podfs sends with NodeStageVolume.
    pub stage_secret: Option<SecretReference>,
    /// The Secret that podfs sends with NodePublishVolume.
    pub publish_secret: Option<SecretReference>,
    /// The Secret that podfs sends with NodeExpandVolume.
    pub expand_secret: Option<SecretReference>,
}

/// A Secret, as a volume names it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SecretReference {
    /// Its namespace; that of the pod if there is none.
    pub namespace: Option<String>,
    /// Its name.
    pub name: String,
}

impl Csi {
    /// The directory in which the kubelet would keep such volumes.
    pub const DIRECTORY: &str = "kubernetes.io~csi";

    /// The driver's handle of the volume. An ephemeral volume has the handle that the kubelet would make for it.
    pub fn handle_in(&self, pod_uid: &str, volume: &str) -> String {
        self.handle.clone().unwrap_or_else(|| format!("csi-{}", sha256(&[pod_uid, volume])))
    }

    /// The name of the VolumeAttachment that attaches the volume to a node; none for an ephemeral volume, which is never
    /// attached.
    pub fn attachment(&self, node: Option<&str>) -> Option<String> {
        Some(format!("csi-{}", sha256(&[self.handle.as_deref()?, &self.driver, node?])))
    }

    /// The Secrets that the driver gets.
    pub fn secrets(&self) -> impl Iterator<Item = &SecretReference> {
        [&self.stage_secret, &self.publish_secret, &self.expand_secret].into_iter().flatten()
    }

    /// Whether it is an ephemeral volume, which exists as long as its pod.
    pub fn is_ephemeral(&self) -> bool {
        self.handle.is_none()
    }

    /// The name of its life cycle in a CSIDriver object.
    pub fn lifecycle_mode(&self) -> &'static str {
        if self.is_ephemeral() { "Ephemeral" } else { "Persistent" }
    }

    /// Parses the source of a PersistentVolume. Errors are relative to it.
    ///
    /// # Errors
    /// No driver or handle, and a name that no driver can have.
    pub fn parse_persistent(source: &CSIPersistentVolumeSource) -> Result<Csi, InvalidField> {
        let secret = |reference: &Option<k8s_openapi::api::core::v1::SecretReference>| {
            let reference = reference.as_ref()?;
            let name = non_empty(&reference.name)?;
            Some(SecretReference { namespace: non_empty(&reference.namespace), name })
        };
        Ok(Csi {
            driver: driver(&source.driver)?,
            handle: Some(required("volumeHandle", Some(&source.volume_handle))?.to_owned()),
            fs_type: non_empty(&source.fs_type),
            read_only: source.read_only.unwrap_or(false),
            attributes: source.volume_attributes.clone().unwrap_or_default(),
            stage_secret: secret(&source.node_stage_secret_ref),
            publish_secret: secret(&source.node_publish_secret_ref),
            expand_secret: secret(&source.node_expand_secret_ref),
        })
    }

    fn parse_inline(source: &CSIVolumeSource) -> Result<Csi, InvalidField> {
        let secret = |reference: &LocalObjectReference| {
            let name = Some(reference.name.clone()).filter(|name| !name.is_empty())?;
            Some(SecretReference { namespace: None, name })
        };
        Ok(Csi {
            driver: driver(&source.driver)?,
            fs_type: non_empty(&source.fs_type),
            read_only: source.read_only.unwrap_or(false),
            attributes: source.volume_attributes.clone().unwrap_or_default(),
            publish_secret: source.node_publish_secret_ref.as_ref().and_then(secret),
            ..Csi::default()
        })
    }
}

/// The SHA-256 digest of the joined texts, in hexadecimal digits.
pub fn sha256(texts: &[&str]) -> String {
    let digest = digest(&SHA256, texts.concat().as_bytes());
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The text, if it is not empty.
pub(super) fn non_empty(text: &Option<String>) -> Option<String> {
    text.clone().filter(|text| !text.is_empty())
}

/// Checks a driver's name by the API's rule. A name that passes is safe as the name of a directory of the node.
fn driver(name: &str) -> Result<String, InvalidField> {
    let name = required("driver", Some(name))?;
    let bytes = name.as_bytes();
    let framed =
        bytes.first().is_some_and(u8::is_ascii_alphanumeric) && bytes.last().is_some_and(u8::is_ascii_alphanumeric);
    let plain = |c: &u8| c.is_ascii_alphanumeric() || b"-._".contains(c);
    if name.len() <= MAX_DRIVER && framed && bytes.iter().all(plain) {
        return Ok(name.to_owned());
    }
    let sentence = format!(
        "{name:?} is no name of a CSI driver: at most {MAX_DRIVER} letters, digits, '-', '_' and '.', with a letter or digit \
         at both ends"
    );
    Err(InvalidField::new("driver", sentence))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cs_01_names_are_the_kubelets() {
        // echo -n abc | sha256sum
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let inline = Csi { driver: "b".to_owned(), ..Csi::default() };
        assert_eq!(inline.handle_in("a", "bc"), format!("csi-{abc}"));
        assert_eq!(inline.attachment(Some("c")), None);
        let persistent = Csi { handle: Some("a".to_owned()), ..inline };
        assert_eq!(persistent.attachment(Some("c")), Some(format!("csi-{abc}")));
        assert_eq!(persistent.handle_in("x", "y"), "a");
    }

    #[test]
    fn a_name_that_leads_to_another_directory_is_no_driver() {
        for name in ["..", "a/b", "-a", "a-", "", &"a".repeat(64)] {
            assert!(driver(name).is_err(), "{name}");
        }
        for name in ["a", "disk.csi.azure.com", "A_1-b.c"] {
            assert!(driver(name).is_ok(), "{name}");
        }
    }
}
