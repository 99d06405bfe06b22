//! serviceAccountToken and clusterTrustBundle sources, and the credentials that the API server issues for a pod.

use k8s_openapi::api::core::v1::{ClusterTrustBundleProjection, ServiceAccountTokenProjection};

use super::certificate::{CertificateKey, signer_name};
use super::selector::Selector;
use crate::types::PayloadPath;
use crate::types::{self, InvalidField};

/// Lifetime of a token whose source gives none, in seconds: the API server's default. podfs applies it too, because the
/// manifest may be a file that no API server has seen.
const DEFAULT_EXPIRATION: i64 = 3600;
/// Shortest and longest lifetime that the API accepts, in seconds.
const SHORTEST_EXPIRATION: i64 = 600;
const LONGEST_EXPIRATION: i64 = 1 << 32;

/// The file that holds a token of the pod's service account.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenFile {
    /// The path of the file in the volume.
    pub path: PayloadPath,
    /// Its owner; without it, that of the volume (KEP-5936).
    pub user: Option<u32>,
    /// The token in the file.
    pub token: TokenKey,
}

/// A credential that the API server issues for a pod.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CredentialKey {
    /// A token of its service account.
    Token(TokenKey),
    /// A certificate for a private key that podfs makes.
    Certificate(CertificateKey),
}

/// The requirements for a token. Files with equal requirements show the same token.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TokenKey {
    /// Its audience; without one, the API server chooses.
    pub audience: Option<String>,
    /// The requested lifetime, in seconds.
    pub expiration_seconds: i64,
}

impl TokenKey {
    /// A token that a source asks for with these fields.
    pub fn new(audience: Option<String>, expiration_seconds: Option<i64>) -> TokenKey {
        TokenKey {
            audience: audience.filter(|audience| !audience.is_empty()),
            expiration_seconds: expiration_seconds.unwrap_or(DEFAULT_EXPIRATION),
        }
    }
}

impl TokenFile {
    /// Errors are relative to the source.
    pub(super) fn parse(source: &ServiceAccountTokenProjection) -> Result<TokenFile, InvalidField> {
        let token = TokenKey::new(source.audience.clone(), source.expiration_seconds);
        let wrong = match token.expiration_seconds {
            ..SHORTEST_EXPIRATION => Some("may not specify a duration less than 10 minutes"),
            SHORTEST_EXPIRATION..=LONGEST_EXPIRATION => None,
            _ => Some("may not specify a duration larger than 2^32 seconds"),
        };
        if let Some(sentence) = wrong {
            return Err(InvalidField::new("expirationSeconds", sentence));
        }
        Ok(TokenFile {
            path: types::payload_path("path", &source.path)?,
            user: source.user.map(|user| types::numeric_id("user", user)).transpose()?,
            token,
        })
    }
}

/// The file that holds trust anchors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BundleFile {
    /// The path of the file in the volume.
    pub path: PayloadPath,
    /// Its owner; without it, that of the volume (KEP-5936).
    pub user: Option<u32>,
    /// The ClusterTrustBundles in the file.
    pub bundles: BundleKey,
    /// Whether the volume is mounted without any such ClusterTrustBundle; then the file is empty.
    pub optional: bool,
}

/// The selection of ClusterTrustBundles for a file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum BundleKey {
    /// The ClusterTrustBundle of this name.
    Named(String),
    /// All ClusterTrustBundles of a signer whose labels match the selector.
    OfSigner {
        /// The signer's name.
        signer: String,
        /// The label selector; without one, no ClusterTrustBundle is selected.
        selector: Option<Selector>,
    },
}

impl BundleFile {
    /// Errors are relative to the source.
    pub(super) fn parse(source: &ClusterTrustBundleProjection) -> Result<BundleFile, InvalidField> {
        let bundles = match (source.name.as_deref(), source.signer_name.as_deref()) {
            (Some(_), Some(_)) => return Err(InvalidField::new("", "only one of name and signerName may be used")),
            (None, None) => return Err(InvalidField::new("", "either name or signerName must be specified")),
            (Some(_), None) if source.label_selector.is_some() => {
                return Err(InvalidField::new("labelSelector", "must be unset if name is specified"));
            }
            (Some(name), None) => BundleKey::Named(types::required("name", Some(name))?.to_owned()),
            (None, Some(signer)) => BundleKey::OfSigner {
                signer: signer_name(signer)?.to_owned(),
                selector: source
                    .label_selector
                    .as_ref()
                    .map(Selector::parse)
                    .transpose()
                    .map_err(|error| error.under("labelSelector"))?,
            },
        };
        Ok(BundleFile {
            path: types::payload_path("path", &source.path)?,
            user: source.user.map(|user| types::numeric_id("user", user)).transpose()?,
            bundles,
            optional: source.optional.unwrap_or(false),
        })
    }
}
