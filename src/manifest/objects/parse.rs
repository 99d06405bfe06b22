//! Documents into objects: the API server's rules, and the data of ConfigMaps and Secrets.
//!
//! The types here have fewer fields than the API's: a field that no volume shows need not be valid. Base64 is decoded key by key,
//! so that an error names the key, and quotes nothing of the value.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::metadata::{Metadata, Parsed, Texts, field};
use super::{ConfigMap, NamedObject, ObjectContent, ObjectKind, Secret, csi, node, storage, trust};
use crate::manifest::{Document, ManifestError, Origin};
use crate::types::decode_base64;

/// Longest key the API accepts.
const MAX_KEY: usize = 253;
/// Most bytes the API accepts in one object, over all values.
const MAX_BYTES: usize = 1024 * 1024;

/// Parses a document as an object podfs uses; any other kind gives none.
///
/// # Errors
/// An object that the API would refuse: no name, a key that cannot be a file name, a key that is
/// given twice, bad base64, more than 1 MiB. The sentence names file, document and key, never a value.
pub fn parse_object(document: Document) -> Result<Option<NamedObject>, ManifestError> {
    let kind = match (document.api_version.as_str(), document.kind.as_str()) {
        ("v1", "ConfigMap") => ObjectKind::ConfigMap,
        ("v1", "Secret") => ObjectKind::Secret,
        ("v1", "Node") => ObjectKind::Node,
        ("v1", "PersistentVolume") => ObjectKind::PersistentVolume,
        ("v1", "PersistentVolumeClaim") => ObjectKind::PersistentVolumeClaim,
        (
            "certificates.k8s.io/v1" | "certificates.k8s.io/v1beta1" | "certificates.k8s.io/v1alpha1",
            "ClusterTrustBundle",
        ) => ObjectKind::ClusterTrustBundle,
        ("storage.k8s.io/v1", "CSIDriver") => ObjectKind::CsiDriver,
        ("storage.k8s.io/v1", "VolumeAttachment") => ObjectKind::VolumeAttachment,
        _ => return Ok(None),
    };
    let origin = document.origin.clone();
    let Parsed { metadata, immutable, content } = match kind {
        ObjectKind::ConfigMap => config_map(document.into_typed()?, &origin)?,
        ObjectKind::Secret => secret(document.into_typed()?, &origin)?,
        ObjectKind::Node => node::node(document.into_typed()?, &origin)?,
        ObjectKind::PersistentVolume => storage::persistent_volume(document.into_typed()?, &origin)?,
        ObjectKind::PersistentVolumeClaim => storage::persistent_volume_claim(document.into_typed()?),
        ObjectKind::CsiDriver => csi::csi_driver(document.into_typed()?),
        ObjectKind::VolumeAttachment => csi::volume_attachment(document.into_typed()?),
        ObjectKind::ClusterTrustBundle => trust::cluster_trust_bundle(document.into_typed()?, &origin)?,
    };
    Ok(Some(NamedObject { key: metadata.key(kind, &origin)?, origin, immutable, content }))
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ConfigMapObject {
    #[serde(default)]
    metadata: Metadata,
    immutable: Option<bool>,
    data: Texts,
    binary_data: Texts,
}

fn config_map(object: ConfigMapObject, origin: &Origin) -> Result<Parsed, ManifestError> {
    let data = object.data.unwrap_or_default();
    check_keys(origin, "data", data.keys())?;
    let binary_data = decode_all(origin, "binaryData", object.binary_data)?;
    if let Some(key) = binary_data.keys().find(|key| data.contains_key(*key)) {
        let sentence = "the key is in data, too; a ConfigMap has each key once";
        return Err(ManifestError::invalid(origin, &field("binaryData", key), sentence));
    }
    let texts = data.values().map(String::len);
    check_size(origin, texts.chain(binary_data.values().map(Vec::len)))?;
    let content = ObjectContent::ConfigMap(ConfigMap { data, binary_data });
    Ok(Parsed { metadata: object.metadata, immutable: object.immutable.unwrap_or(false), content })
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct SecretObject {
    #[serde(default)]
    metadata: Metadata,
    immutable: Option<bool>,
    data: Texts,
    string_data: Texts,
}

fn secret(object: SecretObject, origin: &Origin) -> Result<Parsed, ManifestError> {
    let mut data = decode_all(origin, "data", object.data)?;
    let texts = object.string_data.unwrap_or_default();
    check_keys(origin, "stringData", texts.keys())?;
    // The API server merges stringData over data when a Secret is written.
    data.extend(texts.into_iter().map(|(key, text)| (key, text.into_bytes())));
    check_size(origin, data.values().map(Vec::len))?;
    let content = ObjectContent::Secret(Secret { data });
    Ok(Parsed { metadata: object.metadata, immutable: object.immutable.unwrap_or(false), content })
}

fn check_keys<'a>(origin: &Origin, map: &str, mut keys: impl Iterator<Item = &'a String>) -> Result<(), ManifestError> {
    keys.try_for_each(|key| check_key(key).map_err(|rule| ManifestError::invalid(origin, &field(map, key), rule)))
}

fn check_size(origin: &Origin, sizes: impl Iterator<Item = usize>) -> Result<(), ManifestError> {
    match sizes.sum::<usize>() {
        0..=MAX_BYTES => Ok(()),
        bytes => {
            let sentence = format!("the values have {bytes} bytes together; an object may have at most {MAX_BYTES}");
            Err(ManifestError::invalid(origin, "", sentence))
        }
    }
}

/// The API's rule for keys, which makes them safe as file names.
fn check_key(key: &str) -> Result<(), &'static str> {
    let plain = |c: u8| c.is_ascii_alphanumeric() || b"-._".contains(&c);
    match key {
        "." => Err("a key must not be '.'"),
        ".." => Err("a key must not be '..'"),
        _ if key.len() > MAX_KEY => Err("a key must be no more than 253 characters"),
        _ if key.starts_with("..") => Err("a key must not start with '..'"),
        _ if key.is_empty() || !key.bytes().all(plain) => {
            Err("a valid config key must consist of alphanumeric characters, '-', '_' or '.'")
        }
        _ => Ok(()),
    }
}

fn decode_all(origin: &Origin, map: &str, texts: Texts) -> Result<BTreeMap<String, Vec<u8>>, ManifestError> {
    let texts = texts.unwrap_or_default();
    check_keys(origin, map, texts.keys())?;
    let decode = |(key, text): (String, String)| decode(origin, map, &key, &text).map(|bytes| (key, bytes));
    texts.into_iter().map(decode).collect()
}

fn decode(origin: &Origin, map: &str, key: &str, text: &str) -> Result<Vec<u8>, ManifestError> {
    decode_base64(text).ok_or_else(|| {
        let sentence = match map {
            "data" => "is not base64; encode the value, or move it to stringData as it is",
            _ => "is not base64; encode the value, or move it to data if it is text",
        };
        ManifestError::invalid(origin, &field(map, key), sentence)
    })
}
