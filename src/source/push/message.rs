//! One push: objects as the API server writes them, parsed and checked.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::certificate::{self, Certificate, KIND as CERTIFICATE, PodCertificate};
use crate::manifest::objects::{Missing, NamedObject, ObjectKey, ObjectKind, parse_object};
use crate::manifest::pod::{Pod, PodIdentity};
use crate::manifest::tokens::Token;
use crate::manifest::{Document, ManifestError, Origin};
use crate::volume::{CredentialKey, TokenKey};

/// A push of an agent, which podfs takes as a whole. A pushed object replaces an earlier one.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Push {
    /// Objects; the pod itself for its labels and annotations; TokenRequests with the API server's answer.
    #[serde(default)]
    pub objects: Vec<Value>,
    /// Objects that do not exist any more.
    #[serde(default)]
    pub delete: Vec<DeletedObject>,
    /// Whether podfs forgets everything that was pushed before.
    #[serde(default)]
    pub replace: bool,
    /// All references of volumes whose objects the agent does not know at present. podfs keeps such an object if the
    /// agent has pushed it before, and drops such a token. All other objects that were not pushed do not exist.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unknown: Vec<UnknownObject>,
    /// Whether the agent requested the object only seconds ago, so that its absence is no problem yet.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub settling: bool,
}

/// Shows only the number of objects, because they may be secret.
impl fmt::Debug for Push {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Push { objects, delete, replace, unknown, settling } = self;
        let objects = objects.len();
        write!(f, "{objects} objects, {delete:?}, replace: {replace}, unknown: {unknown:?}, settling: {settling}")
    }
}

/// An object that does not exist any more. It was in the pod's namespace, unless its kind has none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeletedObject {
    /// Its kind.
    pub kind: String,
    /// Its name.
    pub name: String,
}

/// A reference of a volume, and the reason why the agent does not know the object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct UnknownObject {
    /// The kind of an object, `TokenRequest` or `PodCertificate`.
    pub kind: String,
    /// The object's name; absent for a token, and for all ClusterTrustBundles of a signer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The signer of the ClusterTrustBundles.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signer: Option<String>,
    /// The audience of a token, as in the volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub audience: Option<String>,
    /// The validity of a token in seconds, as in the volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expiration_seconds: Option<i64>,
    /// The requirements of a volume for a certificate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<Certificate>,
    /// The reason, one sentence.
    pub reason: String,
}

/// The kind of a token among objects.
const TOKEN: &str = "TokenRequest";

impl UnknownObject {
    /// An unknown object, or unknown ClusterTrustBundles of a signer.
    pub fn missing(what: &Missing, reason: String) -> UnknownObject {
        let (kind, name, signer) = match what {
            Missing::Object(key) => (key.kind, Some(key.name.clone()), None),
            Missing::BundlesOf(signer) => (ObjectKind::ClusterTrustBundle, None, Some(signer.clone())),
        };
        UnknownObject {
            kind: kind.to_string(),
            name,
            signer,
            audience: None,
            expiration_seconds: None,
            certificate: None,
            reason,
        }
    }

    /// An unknown token or certificate.
    pub fn credential(key: &CredentialKey, reason: String) -> UnknownObject {
        let (kind, name, signer) = (TOKEN.to_owned(), None, None);
        match key.clone() {
            CredentialKey::Token(TokenKey { audience, expiration_seconds }) => {
                let expiration_seconds = Some(expiration_seconds);
                UnknownObject { kind, name, signer, audience, expiration_seconds, certificate: None, reason }
            }
            CredentialKey::Certificate(key) => {
                let (kind, certificate) = (CERTIFICATE.to_owned(), Some(Certificate::of(&key)));
                UnknownObject { kind, name, signer, audience: None, expiration_seconds: None, certificate, reason }
            }
        }
    }
}

/// How many pushed objects and tokens a pod has after a push.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PushCounts {
    /// How many objects.
    pub objects: usize,
    /// How many tokens.
    pub tokens: usize,
}

/// Why podfs refuses a push.
#[derive(Debug, thiserror::Error)]
pub enum PushError {
    /// An object the API would refuse.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// An object of a kind that volumes do not show.
    #[error(
        "{origin}: no volume shows a {kind}; podfs takes ConfigMaps, Secrets, PersistentVolumeClaims, \
         PersistentVolumes, ClusterTrustBundles, Nodes, CSIDrivers, VolumeAttachments, TokenRequests, PodCertificates and the pod"
    )]
    Kind {
        /// The object.
        origin: Origin,
        /// Its kind.
        kind: String,
    },
    /// An object of another namespace than the pod's (SE-03).
    #[error("{origin}: {object} is not of the pod's namespace {namespace}; push it to pods of its own")]
    Namespace {
        /// The object.
        origin: Origin,
        /// Its key.
        object: ObjectKey,
        /// The pod's namespace.
        namespace: String,
    },
    /// A pod that podfs does not serve.
    #[error("{origin}: it is pod {pushed}, and podfs serves {served}; push it to the podfs of that pod")]
    OtherPod {
        /// The pod's place.
        origin: Origin,
        /// The pushed pod.
        pushed: String,
        /// The pod that podfs serves.
        served: String,
    },
    /// An object is in the push twice.
    #[error("the push has {0} twice; remove one of them")]
    Twice(ObjectKey),
    /// A deletion of a kind that volumes do not show.
    #[error(
        "no volume shows a {0}, so there is nothing to delete; a kind is written as in manifests, such as ConfigMap"
    )]
    DeletedKind(String),
    /// An unknown reference of a kind that volumes do not show.
    #[error(
        "no volume shows a {0}, so it cannot be unknown; a kind is written as in manifests, such as ConfigMap, TokenRequest or \
         PodCertificate"
    )]
    UnknownKind(String),
    /// An unknown object without a name.
    #[error("an unknown {0} has no name; give its name, or the signer of ClusterTrustBundles")]
    Nameless(String),
    /// An unknown object with a signer that it cannot have.
    #[error("an unknown {0} has a signer; only ClusterTrustBundles without a name have one")]
    Signer(String),
    /// An unknown token or certificate with a name or a signer.
    #[error("an unknown {0} has a name or a signer; podfs knows it by what the volume asks for, so remove them")]
    NamedCredential(String),
    /// An unknown certificate without the requirements of a volume.
    #[error("an unknown PodCertificate has no certificate; give the signerName and keyType that the volume asks for")]
    NoCertificate,
    /// More objects than podfs keeps.
    #[error(
        "there would be {objects} objects, and podfs keeps at most {limit} for a pod; push only what its volumes show"
    )]
    TooMany {
        /// How many there would be.
        objects: usize,
        /// The most objects.
        limit: usize,
    },
}

/// A valid push.
#[derive(Default)]
pub(super) struct ParsedPush {
    pub(super) pod: Option<Arc<Pod>>,
    pub(super) objects: Vec<Arc<NamedObject>>,
    pub(super) tokens: Vec<(CredentialKey, Token)>,
    pub(super) deleted: Vec<ObjectKey>,
    pub(super) replace: bool,
    pub(super) missing: Vec<(Missing, String)>,
    pub(super) missing_tokens: Vec<(CredentialKey, String)>,
    pub(super) settling: bool,
}

impl ParsedPush {
    /// Checks all of a push for this pod.
    pub(super) fn parse(push: Push, pod: &PodIdentity) -> Result<ParsedPush, PushError> {
        let Push { objects, delete, replace, unknown, settling } = push;
        let mut parsed = ParsedPush { replace, settling, ..ParsedPush::default() };
        let whole = Origin::file(Path::new("the push"));
        for (number, value) in (1..).zip(objects) {
            parsed.add(Document::of_server(whole.item(number), value)?, pod)?;
        }
        for DeletedObject { kind, name } in delete {
            let kind = ObjectKind::parse(&kind).ok_or(PushError::DeletedKind(kind))?;
            parsed.deleted.push(key(kind, name, pod));
        }
        for unknown in unknown {
            parsed.add_unknown(unknown, pod)?;
        }
        Ok(parsed)
    }

    fn add_unknown(&mut self, unknown: UnknownObject, pod: &PodIdentity) -> Result<(), PushError> {
        let UnknownObject { kind, name, signer, audience, expiration_seconds, certificate, reason } = unknown;
        match (ObjectKind::parse(&kind), name, signer) {
            (Some(kind), Some(name), None) => self.missing.push((Missing::Object(key(kind, name, pod)), reason)),
            (Some(ObjectKind::ClusterTrustBundle), None, Some(signer)) => {
                self.missing.push((Missing::BundlesOf(signer), reason));
            }
            (None, None, None) if kind == TOKEN => {
                self.missing_tokens.push((CredentialKey::Token(TokenKey::new(audience, expiration_seconds)), reason));
            }
            (None, None, None) if kind == CERTIFICATE => {
                let certificate = certificate.ok_or(PushError::NoCertificate)?;
                let key = certificate.key().map_err(|error| {
                    let error = error.under("unknown.certificate");
                    ManifestError::invalid(&Origin::file(Path::new("the push")), &error.field, error.sentence)
                })?;
                self.missing_tokens.push((CredentialKey::Certificate(key), reason));
            }
            (Some(_), None, None) => return Err(PushError::Nameless(kind)),
            (Some(_), _, Some(_)) => return Err(PushError::Signer(kind)),
            (None, ..) if kind == TOKEN || kind == CERTIFICATE => return Err(PushError::NamedCredential(kind)),
            (None, ..) => return Err(PushError::UnknownKind(kind)),
        }
        Ok(())
    }

    fn add(&mut self, document: Document, pod: &PodIdentity) -> Result<(), PushError> {
        let origin = document.origin.clone();
        match (document.api_version.as_str(), document.kind.as_str()) {
            ("v1", "Pod") => {
                let pushed = Pod::parse(document)?;
                if pushed.identity != *pod {
                    let described = |pod: &PodIdentity| format!("{pod} (uid {})", pod.uid);
                    let (pushed, served) = (described(&pushed.identity), described(pod));
                    return Err(PushError::OtherPod { origin, pushed, served });
                }
                self.pod = Some(Arc::new(pushed));
            }
            ("authentication.k8s.io/v1", TOKEN) => {
                let request: TokenRequest = document.into_typed()?;
                self.tokens.push(request.into_token(&origin)?);
            }
            (certificate::API_VERSION, CERTIFICATE) => {
                let certificate: PodCertificate = document.into_typed()?;
                let (key, credential) = certificate.into_credential(&origin)?;
                self.tokens.push((CredentialKey::Certificate(key), credential));
            }
            _ => {
                let kind = document.kind.clone();
                let object = parse_object(document)?.ok_or_else(|| PushError::Kind { origin: origin.clone(), kind })?;
                let key = &object.key;
                // Other objects decide whether a driver needs a Secret of another namespace.
                if !key.kind.is_of_cluster() && key.kind != ObjectKind::Secret && key.namespace != pod.namespace {
                    let (object, namespace) = (key.clone(), pod.namespace.clone());
                    return Err(PushError::Namespace { origin, object, namespace });
                }
                if self.objects.iter().any(|other| other.key == *key) {
                    return Err(PushError::Twice(key.clone()));
                }
                self.objects.push(Arc::new(object));
            }
        }
        Ok(())
    }
}

/// The key of an object: in the pod's namespace, unless its kind has none.
fn key(kind: ObjectKind, name: String, pod: &PodIdentity) -> ObjectKey {
    let namespace = if kind.is_of_cluster() { String::new() } else { pod.namespace.clone() };
    ObjectKey { kind, namespace, name }
}

/// The requirements of a volume for a token, and the API server's answer.
#[derive(Deserialize)]
struct TokenRequest {
    spec: TokenRequestSpec,
    status: TokenRequestStatus,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct TokenRequestSpec {
    audiences: Option<Vec<String>>,
    expiration_seconds: Option<i64>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct TokenRequestStatus {
    token: String,
    expiration_timestamp: Option<Time>,
}

impl TokenRequest {
    fn into_token(self, origin: &Origin) -> Result<(CredentialKey, Token), ManifestError> {
        let mut audiences = self.spec.audiences.unwrap_or_default();
        let audience = audiences.pop().filter(|audience| !audience.is_empty());
        if !audiences.is_empty() {
            let sentence = "a volume asks for one audience, or for none; write what it asks for";
            return Err(ManifestError::invalid(origin, "spec.audiences", sentence));
        }
        if self.status.token.is_empty() {
            return Err(ManifestError::invalid(origin, "status.token", "is required"));
        }
        let key = CredentialKey::Token(TokenKey::new(audience, self.spec.expiration_seconds));
        let expires = self.status.expiration_timestamp.map(|time| SystemTime::from(time.0));
        Ok((key, Token { bytes: self.status.token.into_bytes(), expires }))
    }
}
