//! ClusterTrustBundles: trust anchors for the whole cluster, of a signer or without one.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use super::ObjectContent;
use super::metadata::{LongMetadata, Parsed};
use crate::manifest::error::TrustAnchorsError;
use crate::manifest::{ManifestError, Origin};

/// The one type of PEM block a bundle may hold.
const CERTIFICATE: &str = "CERTIFICATE";

/// Trust anchors of the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterTrustBundle {
    /// The signer to which the trust anchors belong, if any.
    pub signer: Option<String>,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// The certificates in DER, each of them once; at least one.
    pub anchors: BTreeSet<Vec<u8>>,
}

#[derive(Deserialize)]
pub(super) struct ClusterTrustBundleObject {
    #[serde(default)]
    metadata: LongMetadata,
    #[serde(default)]
    spec: ClusterTrustBundleSpec,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ClusterTrustBundleSpec {
    signer_name: Option<String>,
    trust_bundle: Option<String>,
}

pub(super) fn cluster_trust_bundle(object: ClusterTrustBundleObject, origin: &Origin) -> Result<Parsed, ManifestError> {
    let ClusterTrustBundleObject { metadata, spec } = object;
    let text = spec.trust_bundle.unwrap_or_default();
    let bundle = ClusterTrustBundle {
        signer: spec.signer_name.filter(|name| !name.is_empty()),
        labels: metadata.labels.clone().unwrap_or_default(),
        anchors: anchors(&text).map_err(|cause| ManifestError::TrustBundle { origin: origin.clone(), cause })?,
    };
    Ok(Parsed { metadata: metadata.short(), immutable: false, content: ObjectContent::ClusterTrustBundle(bundle) })
}

/// The certificates among PEM blocks, with the API's rules.
fn anchors(text: &str) -> Result<BTreeSet<Vec<u8>>, TrustAnchorsError> {
    let blocks = pem::parse_many(text).map_err(TrustAnchorsError::Pem)?;
    if blocks.is_empty() {
        return Err(TrustAnchorsError::Empty);
    }
    for (index, block) in blocks.iter().enumerate() {
        if block.tag() != CERTIFICATE {
            return Err(TrustAnchorsError::OtherBlock(index));
        }
        if block.headers().iter().next().is_some() {
            return Err(TrustAnchorsError::Headers(index));
        }
    }
    Ok(blocks.into_iter().map(pem::Pem::into_contents).collect())
}
