//! The content of token, certificate and trust bundle files.

use std::collections::BTreeSet;

use pem::{EncodeConfig, LineEnding, Pem};

use super::Problem;
use crate::manifest::Tokens;
use crate::manifest::objects::{ClusterTrustBundle, ObjectKind, Objects};
use crate::types::PayloadPath;
use crate::volume::{BundleFile, BundleKey, CertificateFiles, ProjectionSource, TokenFile};

/// The first line of a certificate in PEM.
const CERTIFICATE: &[u8] = b"-----BEGIN CERTIFICATE-----";

/// The token that a file shows.
pub(super) fn token<'a>(file: &TokenFile, tokens: &'a Tokens) -> Result<&'a [u8], Problem> {
    match tokens.get(&file.token) {
        Some(Ok(token)) => Ok(token),
        Some(Err(reason)) => Err(Problem::NoToken(reason.to_owned())),
        None => Err(Problem::NeedsApiServer(format!("serviceAccountToken {:?}", file.path.as_str()))),
    }
}

/// The files of a certificate and its key: the key comes first in the bundle (PC-01).
pub(super) fn certificate<'a>(
    source: &ProjectionSource,
    files: &'a CertificateFiles,
    tokens: &'a Tokens,
) -> Result<impl Iterator<Item = (&'a PayloadPath, &'a [u8])>, Problem> {
    let bundle = match tokens.certificate(&files.certificate) {
        Some(Ok(bundle)) => bundle,
        Some(Err(reason)) => return Err(Problem::NoCertificate(reason.to_owned())),
        None => return Err(Problem::NeedsApiServer(source.to_string())),
    };
    let key_end = bundle.windows(CERTIFICATE.len()).position(|bytes| bytes == CERTIFICATE).unwrap_or(bundle.len());
    let (key, chain) = bundle.split_at(key_end);
    let parts = [(&files.bundle, bundle), (&files.key, key), (&files.chain, chain)];
    Ok(parts.into_iter().filter_map(|(path, content)| Some((path.as_ref()?, content))))
}

/// The trust anchors that a file shows: each of them once, as PEM blocks in the order of their bytes. So the file
/// changes when the set of anchors does, and only then (CB-02, CB-03).
pub(super) fn trust_bundle(file: &BundleFile, objects: &Objects) -> Result<Vec<u8>, Problem> {
    let bundles = match &file.bundles {
        BundleKey::Named(name) => named(name, file.optional, objects)?,
        BundleKey::OfSigner { signer, selector } => {
            if let Some(reason) = objects.why_no_bundles_of(signer) {
                return Err(Problem::Unknown(reason.to_owned()));
            }
            let matches = |bundle: &&ClusterTrustBundle| selector.as_ref().is_some_and(|s| s.matches(&bundle.labels));
            objects.trust_bundles_of(signer).filter(matches).collect()
        }
    };
    if bundles.is_empty() && !file.optional {
        return Err(Problem::NoTrustBundles);
    }
    let anchors: BTreeSet<&[u8]> = bundles.iter().flat_map(|bundle| bundle.anchors.iter().map(Vec::as_slice)).collect();
    let blocks: Vec<Pem> = anchors.into_iter().map(|der| Pem::new("CERTIFICATE", der)).collect();
    let unix = EncodeConfig::new().set_line_ending(LineEnding::LF);
    Ok(blocks.iter().map(|block| pem::encode_config(block, unix)).collect::<String>().into_bytes())
}

/// The ClusterTrustBundle of that name; an empty list if it is optional and missing.
fn named<'a>(name: &str, optional: bool, objects: &'a Objects) -> Result<Vec<&'a ClusterTrustBundle>, Problem> {
    if let Some(reason) = objects.why_absent(ObjectKind::ClusterTrustBundle, "", name) {
        return Err(Problem::Unknown(reason.to_owned()));
    }
    match objects.trust_bundle(name) {
        None if !optional => Err(Problem::TrustBundleNotFound(name.to_owned())),
        bundle => Ok(bundle.into_iter().collect()),
    }
}
