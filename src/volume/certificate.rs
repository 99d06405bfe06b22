//! podCertificate sources: a private key that podfs makes, and a certificate for it that a signer of the cluster issues
//! (KEP-4317).

use std::collections::BTreeMap;
use std::fmt;

use k8s_openapi::api::core::v1::PodCertificateProjection;

use crate::types::{self, InvalidField, PayloadPath};

/// Lifetime of a certificate whose source gives none, in seconds: the API server's default.
const DEFAULT_EXPIRATION: i32 = 24 * 60 * 60;
/// Shortest and longest lifetime that the API accepts, in seconds.
const SHORTEST_EXPIRATION: i32 = 60 * 60;
const LONGEST_EXPIRATION: i32 = 91 * 24 * 60 * 60;

/// The files that hold a private key, its certificate chain, or both. In each generation, all of them belong to one
/// key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateFiles {
    /// The path of the file with the key, followed by the chain.
    pub bundle: Option<PayloadPath>,
    /// The path of the file with the key alone.
    pub key: Option<PayloadPath>,
    /// The path of the file with the chain alone.
    pub chain: Option<PayloadPath>,
    /// Their owner; without it, that of the volume (KEP-5936).
    pub user: Option<u32>,
    /// The requirements for the certificate.
    pub certificate: CertificateKey,
}

/// The requirements for a certificate. Files with equal requirements show the same certificate.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CertificateKey {
    /// The name of the signer, such as `example.com/server`.
    pub signer: String,
    /// The type of the private key.
    pub key_type: KeyType,
    /// The longest lifetime, in seconds. A signer may choose a shorter one.
    pub max_expiration_seconds: i32,
    /// The pod's annotations for the signer.
    pub annotations: BTreeMap<String, String>,
}

/// A type of private keys, by the API's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "each is its name")]
pub enum KeyType {
    Rsa3072,
    Rsa4096,
    EcdsaP256,
    EcdsaP384,
    EcdsaP521,
    Ed25519,
}

impl KeyType {
    const ALL: [(KeyType, &str); 6] = [
        (KeyType::Rsa3072, "RSA3072"),
        (KeyType::Rsa4096, "RSA4096"),
        (KeyType::EcdsaP256, "ECDSAP256"),
        (KeyType::EcdsaP384, "ECDSAP384"),
        (KeyType::EcdsaP521, "ECDSAP521"),
        (KeyType::Ed25519, "ED25519"),
    ];

    /// The type of this name.
    pub fn parse(name: &str) -> Option<KeyType> {
        Self::ALL.into_iter().find(|(_, known)| *known == name).map(|(key_type, _)| key_type)
    }
}

impl fmt::Display for KeyType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (_, name) = Self::ALL.into_iter().find(|(known, _)| known == self).expect("all are there");
        f.write_str(name)
    }
}

impl CertificateFiles {
    /// Errors are relative to the source.
    pub(super) fn parse(source: &PodCertificateProjection) -> Result<CertificateFiles, InvalidField> {
        let path =
            |field, path: &Option<String>| path.as_deref().map(|path| types::payload_path(field, path)).transpose();
        let files = CertificateFiles {
            bundle: path("credentialBundlePath", &source.credential_bundle_path)?,
            key: path("keyPath", &source.key_path)?,
            chain: path("certificateChainPath", &source.certificate_chain_path)?,
            user: source.user.map(|user| types::numeric_id("user", user)).transpose()?,
            certificate: CertificateKey::parse(
                &source.signer_name,
                &source.key_type,
                source.max_expiration_seconds,
                source.user_annotations.clone().unwrap_or_default(),
            )?,
        };
        if files.paths().next().is_none() {
            return Err(InvalidField::new(
                "",
                "one of credentialBundlePath, keyPath and certificateChainPath is required",
            ));
        }
        Ok(files)
    }

    /// The paths of all its files.
    pub fn paths(&self) -> impl Iterator<Item = &PayloadPath> {
        [&self.bundle, &self.key, &self.chain].into_iter().flatten()
    }
}

impl CertificateKey {
    /// A certificate that a source asks for with these fields. Errors are relative to the source.
    pub(crate) fn parse(
        signer: &str,
        key_type: &str,
        max_expiration_seconds: Option<i32>,
        annotations: BTreeMap<String, String>,
    ) -> Result<CertificateKey, InvalidField> {
        let signer = signer_name(signer)?.to_owned();
        let known = KeyType::parse(types::required("keyType", Some(key_type))?);
        let key_type = known.ok_or_else(|| {
            let names: Vec<&str> = KeyType::ALL.iter().map(|(_, name)| *name).collect();
            InvalidField::new("keyType", format!("{key_type:?} is not one of {}", names.join(", ")))
        })?;
        let max_expiration_seconds = max_expiration_seconds.unwrap_or(DEFAULT_EXPIRATION);
        let wrong = match max_expiration_seconds {
            ..SHORTEST_EXPIRATION => Some("may not be less than 3600, an hour"),
            SHORTEST_EXPIRATION..=LONGEST_EXPIRATION => None,
            _ => Some("may not be more than 7862400, 91 days"),
        };
        match wrong {
            Some(sentence) => Err(InvalidField::new("maxExpirationSeconds", sentence)),
            None => Ok(CertificateKey { signer, key_type, max_expiration_seconds, annotations }),
        }
    }
}

/// The name of a signer, of certificates or of trust bundles.
pub(super) fn signer_name(name: &str) -> Result<&str, InvalidField> {
    let name = types::required("signerName", Some(name))?;
    match name.split_once('/') {
        Some((domain, path)) if !domain.is_empty() && !path.is_empty() && !path.contains('/') => Ok(name),
        _ => Err(InvalidField::new(
            "signerName",
            "must be a fully qualified domain and path of the form 'example.com/signer-name'",
        )),
    }
}
