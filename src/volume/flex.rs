//! flexVolume volumes: volumes that a FlexVolume driver of the node mounts.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{FlexPersistentVolumeSource, FlexVolumeSource, Volume};

use super::csi::{SecretReference, non_empty};
use super::{VolumeSource, VolumeType};
use crate::types::{InvalidField, required};

pub(super) const KIND: VolumeType = VolumeType {
    field: "flexVolume",
    directory: None,
    parse: |volume: &Volume, _| {
        let flex = Flex::parse_inline(volume.flex_volume.as_ref()?);
        Some(flex.map(|flex| VolumeSource::Flex(Box::new(flex))))
    },
};

/// A volume of a FlexVolume driver.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Flex {
    /// The driver's name, `vendor/driver` or `driver`; each part is safe as a path element.
    pub driver: String,
    /// The file system that the volume should have; the driver decides if there is none.
    pub fs_type: Option<String>,
    /// Whether containers can only read the volume. For a claim, the claim's `readOnly` decides instead (PV-07).
    pub read_only: bool,
    /// Further options for the driver.
    pub options: BTreeMap<String, String>,
    /// The Secret that the driver gets.
    pub secret: Option<SecretReference>,
}

impl Flex {
    /// The name of the directory in which the kubelet would keep such volumes, and of the driver's directory.
    pub fn directory(&self) -> String {
        self.driver.replace('/', "~")
    }

    /// Parses the source of a PersistentVolume. Errors are relative to it.
    ///
    /// # Errors
    /// A name that no driver can have.
    pub fn parse_persistent(source: &FlexPersistentVolumeSource) -> Result<Flex, InvalidField> {
        let secret = source.secret_ref.as_ref().and_then(|reference| {
            Some(SecretReference { namespace: non_empty(&reference.namespace), name: non_empty(&reference.name)? })
        });
        Ok(Flex {
            driver: driver(&source.driver)?,
            fs_type: non_empty(&source.fs_type),
            read_only: source.read_only.unwrap_or(false),
            options: source.options.clone().unwrap_or_default(),
            secret,
        })
    }

    fn parse_inline(source: &FlexVolumeSource) -> Result<Flex, InvalidField> {
        let name = source.secret_ref.as_ref().map(|reference| reference.name.clone()).filter(|name| !name.is_empty());
        Ok(Flex {
            driver: driver(&source.driver)?,
            fs_type: non_empty(&source.fs_type),
            read_only: source.read_only.unwrap_or(false),
            options: source.options.clone().unwrap_or_default(),
            secret: name.map(|name| SecretReference { namespace: None, name }),
        })
    }
}

/// Checks that a driver's name leads to no other directory, because podfs runs the program of that name.
fn driver(name: &str) -> Result<String, InvalidField> {
    let name = required("driver", Some(name))?;
    let plain = |c: u8| c.is_ascii_alphanumeric() || b"-._".contains(&c);
    let is_part = |part: &str| !part.is_empty() && !part.starts_with('.') && part.bytes().all(plain);
    if name.split('/').count() <= 2 && name.split('/').all(is_part) {
        return Ok(name.to_owned());
    }
    Err(InvalidField::new("driver", format!("{name:?} is no name of a FlexVolume driver; write vendor/driver")))
}
