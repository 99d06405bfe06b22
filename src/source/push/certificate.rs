//! Certificates of a pod in pushes. The Kubernetes API has no object with a private key, so podfs defines this one.

use std::collections::BTreeMap;
use std::fmt;
use std::time::SystemTime;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::manifest::tokens::Token;
use crate::manifest::{ManifestError, Origin};
use crate::types::InvalidField;
use crate::volume::CertificateKey;

pub(super) const API_VERSION: &str = "podfs.io/v1";
pub(super) const KIND: &str = "PodCertificate";

/// The requirements of a volume for a certificate, with the names of the fields of a podCertificate source.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Certificate {
    /// The name of the signer.
    pub signer_name: String,
    /// The type of the private key, such as `ED25519`.
    pub key_type: String,
    /// The longest validity in seconds; without it, a day.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_expiration_seconds: Option<i32>,
    /// The pod's annotations for the signer.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub user_annotations: BTreeMap<String, String>,
}

/// An issued certificate, with its private key.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodCertificate {
    spec: Certificate,
    status: PushedCertificate,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PushedCertificate {
    /// The private key and the chain behind it, in PEM.
    credential_bundle: String,
    #[serde(default)]
    not_after: Option<Time>,
}

impl Certificate {
    pub(super) fn of(key: &CertificateKey) -> Certificate {
        Certificate {
            signer_name: key.signer.clone(),
            key_type: key.key_type.to_string(),
            max_expiration_seconds: Some(key.max_expiration_seconds),
            user_annotations: key.annotations.clone(),
        }
    }

    pub(super) fn key(self) -> Result<CertificateKey, InvalidField> {
        CertificateKey::parse(&self.signer_name, &self.key_type, self.max_expiration_seconds, self.user_annotations)
    }
}

impl PodCertificate {
    /// The certificate in the form of a push.
    pub(crate) fn of(key: &CertificateKey, credential: &Token) -> PodCertificate {
        let credential_bundle = String::from_utf8_lossy(&credential.bytes).into_owned();
        let not_after = credential.expires.and_then(|at| Timestamp::try_from(at).ok()).map(Time);
        PodCertificate { spec: Certificate::of(key), status: PushedCertificate { credential_bundle, not_after } }
    }

    /// As JSON.
    pub(crate) fn to_value(&self) -> Value {
        json!({"apiVersion": API_VERSION, "kind": KIND, "spec": self.spec, "status": self.status})
    }

    pub(super) fn into_credential(self, origin: &Origin) -> Result<(CertificateKey, Token), ManifestError> {
        let bundle = self.status.credential_bundle;
        if !bundle.contains("PRIVATE KEY-----") || !bundle.contains("-----BEGIN CERTIFICATE-----") {
            let sentence = "must be a private key and a certificate in PEM, in this order";
            return Err(ManifestError::invalid(origin, "status.credentialBundle", sentence));
        }
        let key = self.spec.key().map_err(|error| {
            let error = error.under("spec");
            ManifestError::invalid(origin, &error.field, error.sentence)
        })?;
        let expires = self.status.not_after.map(|time| SystemTime::from(time.0));
        Ok((key, Token { bytes: bundle.into_bytes(), expires }))
    }
}

/// Shows the request; the rest is secret.
impl fmt::Debug for PodCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.spec.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::super::message::{ParsedPush, Push, UnknownObject};
    use super::*;
    use crate::manifest::pod::PodIdentity;
    use crate::volume::CredentialKey;

    fn key() -> CertificateKey {
        let annotations = BTreeMap::from([("x.io/role".to_owned(), "web".to_owned())]);
        CertificateKey::parse("x.io/y", "ED25519", Some(7200), annotations).expect("a key")
    }

    fn parse(bundle: &str) -> Result<ParsedPush, String> {
        let credential = Token { bytes: bundle.into(), expires: Some(SystemTime::UNIX_EPOCH) };
        let objects = vec![PodCertificate::of(&key(), &credential).to_value()];
        let unknown = vec![UnknownObject::credential(&CredentialKey::Certificate(key()), "why".to_owned())];
        let push = Push { objects, unknown, ..Push::default() };
        ParsedPush::parse(push, &PodIdentity::placeholder()).map_err(|error| error.to_string())
    }

    #[test]
    fn pc_01_a_certificate_that_is_pushed_arrives_as_it_was() {
        let bundle = "-----BEGIN PRIVATE KEY-----\nMA==\n-----END PRIVATE KEY-----\n-----BEGIN CERTIFICATE-----\nMA==\n-----END CERTIFICATE-----\n";
        let parsed = parse(bundle).expect("it is taken");
        let credential = Token { bytes: bundle.into(), expires: Some(SystemTime::UNIX_EPOCH) };
        assert_eq!(parsed.tokens, [(CredentialKey::Certificate(key()), credential)]);
        assert_eq!(parsed.missing_tokens, [(CredentialKey::Certificate(key()), "why".to_owned())]);
    }

    #[test]
    fn pc_01_a_certificate_without_its_key_is_refused() {
        let error = parse("-----BEGIN CERTIFICATE-----").err().expect("it is refused");
        assert!(
            error.ends_with("status.credentialBundle: must be a private key and a certificate in PEM, in this order"),
            "{error}"
        );
    }
}
