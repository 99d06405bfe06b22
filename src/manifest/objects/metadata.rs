//! The metadata of objects: their names, checked by the API server's rules.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::{ObjectContent, ObjectKey, ObjectKind};
use crate::manifest::{ManifestError, Origin};
use crate::types::{DNS_LABEL_RULE, DNS_NAME_RULE, is_dns_label, is_domain};

/// An object with its metadata, whose name and namespace are not checked yet.
pub(super) struct Parsed {
    pub(super) metadata: Metadata,
    pub(super) immutable: bool,
    pub(super) content: ObjectContent,
}

/// The metadata of every object.
#[derive(Default, Deserialize)]
pub(super) struct Metadata {
    name: Option<String>,
    namespace: Option<String>,
}

impl Metadata {
    /// The key of an object of this kind.
    pub(super) fn key(self, kind: ObjectKind, origin: &Origin) -> Result<ObjectKey, ManifestError> {
        let given = |text: Option<String>| text.filter(|text| !text.is_empty());
        let name = given(self.name).ok_or_else(|| {
            ManifestError::invalid(origin, "metadata.name", format!("a {kind} needs a name for volumes to refer to"))
        })?;
        if let Err(rule) = check_name(&name, kind) {
            return Err(ManifestError::invalid(origin, "metadata.name", rule));
        }
        let namespace = match kind {
            kind if kind.is_of_cluster() => String::new(),
            _ => given(self.namespace).unwrap_or_else(|| "default".to_owned()),
        };
        if !kind.is_of_cluster() && !is_dns_label(&namespace) {
            return Err(ManifestError::invalid(origin, "metadata.namespace", DNS_LABEL_RULE));
        }
        Ok(ObjectKey { kind, namespace, name })
    }
}

/// Checks the name of an object by the API server's rule for its kind. Such a name is also safe as a path element.
fn check_name(name: &str, kind: ObjectKind) -> Result<(), &'static str> {
    match kind {
        // The name of a bundle with a signer starts with the signer's: `example.com:mysigner:root-1`.
        ObjectKind::ClusterTrustBundle if ![".", ".."].contains(&name) && !name.contains(['/', '%']) => Ok(()),
        ObjectKind::ClusterTrustBundle => Err("must not be '.' or '..', nor contain '/' or '%'"),
        _ if is_domain(name) => Ok(()),
        _ => Err(DNS_NAME_RULE),
    }
}

/// The metadata of objects without secrets, which has more fields.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct LongMetadata {
    pub(super) name: Option<String>,
    namespace: Option<String>,
    pub(super) uid: Option<String>,
    pub(super) labels: Texts,
    pub(super) annotations: Texts,
    pub(super) finalizers: Option<Vec<String>>,
    pub(super) deletion_timestamp: Option<String>,
    pub(super) owner_references: Option<Vec<OwnerReference>>,
}

#[derive(Deserialize)]
pub(super) struct OwnerReference {
    pub(super) kind: Option<String>,
    pub(super) name: Option<String>,
    pub(super) uid: Option<String>,
    pub(super) controller: Option<bool>,
}

impl LongMetadata {
    pub(super) fn short(self) -> Metadata {
        Metadata { name: self.name, namespace: self.namespace }
    }
}

/// Texts by key, if the object has them.
pub(super) type Texts = Option<BTreeMap<String, String>>;

/// The path of a key, spelled so that dots of the key do not look like a path.
pub(super) fn field(map: &str, key: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    match !key.is_empty() && key.chars().all(plain) {
        true => format!("{map}.{key}"),
        false => format!("{map}[{}]", key.escape_debug()),
    }
}
