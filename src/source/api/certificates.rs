//! Certificates of the pod: podfs makes a private key, asks a signer of the cluster for a certificate with a PodCertificateRequest
//! (KEP-4317), and asks for the next one, for another key, long before the certificate ends.
//!
//! 1. A key exists in the memory of this process and in volumes, and nowhere else. The next process of podfs for the pod requests
//!    another certificate.
//! 2. The task sends key and chain together, so a volume never shows one without the other (PC-01).
//! 3. After a signer has denied or failed a request, podfs does not ask it again for this pod (PC-02). An earlier certificate stays
//!    until it ends, also while a signer does not answer. Then the task withdraws it.
//! 4. The task asks for the next certificate at the signer's `beginRefreshAt`, or up to five minutes later, so that not all pods
//!    ask at once (PC-03). If a request was deleted without an answer, the task makes another one.

use std::future::pending;
use std::time::{Duration, Instant, SystemTime};

use k8s_openapi::ByteString;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use pem::{EncodeConfig, LineEnding, Pem};
use rcgen::{
    CertificateParams, DistinguishedName, KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_ECDSA_P384_SHA384, PKCS_ED25519,
};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::mpsc::Sender;

use super::contacts::Contacts;
use super::credential::{CredentialLifetime, TokenOwner};
use super::single::ObjectUpdate;
use crate::kube::address::{Collection, Resource};
use crate::kube::client::ApiClient;
use crate::kube::error::{ApiError, ErrorClass};
use crate::kube::follower::FollowerEvent;
use crate::kube::poller::Poller;
use crate::kube::retry::Retry;
use crate::manifest::tokens::Token;
use crate::volume::{CertificateKey, CredentialKey, KeyType};

/// The longest time after the signer's `beginRefreshAt` until podfs replaces a certificate.
const LONGEST_DELAY: Duration = Duration::from_secs(5 * 60);
/// The shortest use of a certificate, unless it is valid for less: a clock may be wrong.
const SHORTEST_USE: Duration = Duration::from_secs(60);
/// How long the server's authorizer may take to allow a node to read a request that the node has made.
const AUTHORIZER_DELAY: Duration = Duration::from_secs(30);
/// The reason of a waiting volume while a signer has not answered.
const NOT_ISSUED: &str = "credential bundle is not issued yet";

/// Sends a certificate with its key, and the next one in time, until the receiver is dropped.
pub(super) async fn keep_certified(
    client: ApiClient,
    owner: TokenOwner,
    key: CertificateKey,
    contacts: Contacts,
    sender: Sender<(CredentialKey, ObjectUpdate<Token>)>,
) {
    let credential = CredentialKey::Certificate(key.clone());
    let reporter = CertificateReporter { title: owner.title(&credential), credential, contacts, sender };
    let mut request =
        CertificateRequest { client: client.clone(), owner, key, resource: Resource::POD_CERTIFICATE_REQUEST };
    let mut retry = Retry::new(client);
    let mut life: Option<CredentialLifetime> = None;
    loop {
        let answer = tokio::select! {
            answer = request.certificate(&reporter) => answer,
            () = reporter.withdraw(life.as_ref()) => return,
        };
        match answer {
            Ok(IssuedCertificate { token, life: granted }) => {
                retry.reset();
                if !reporter.issued(token).await {
                    return;
                }
                granted.until_due().await;
                life = Some(granted);
            }
            Err(MissingCertificate::Unneeded) => return,
            Err(MissingCertificate::Refused(refusal)) => {
                if reporter.waits(ApiError::new(ErrorClass::Refused, refusal.to_string())).await {
                    reporter.withdraw(life.as_ref()).await;
                }
                return;
            }
            Err(MissingCertificate::Failed(mut error)) => {
                let pause = retry.failed(&error);
                let is_over = life.as_ref().is_some_and(CredentialLifetime::is_over);
                if is_over {
                    error.sentence = format!("the certificate has expired and refresh failed: {}", error.sentence);
                }
                // The task sends the reason first, so that a missing certificate always has one.
                if !reporter.waits(error).await || is_over && !reporter.send(ObjectUpdate::Absent).await {
                    return;
                }
                retry.wait(&pause).await;
            }
        }
    }
}

/// Sends updates of a certificate. Each call returns whether there is a receiver.
struct CertificateReporter {
    credential: CredentialKey,
    title: String,
    contacts: Contacts,
    sender: Sender<(CredentialKey, ObjectUpdate<Token>)>,
}

impl CertificateReporter {
    async fn issued(&self, token: Token) -> bool {
        self.contacts.answered(&self.title, "issued", None);
        self.send(ObjectUpdate::Is(token.into())).await
    }

    async fn waits(&self, error: ApiError) -> bool {
        self.contacts.trouble(&self.title, "waiting", &error);
        self.send(ObjectUpdate::Failure(error)).await
    }

    /// Withdraws the certificate when it ends. Returns if there is no receiver then.
    async fn withdraw(&self, life: Option<&CredentialLifetime>) {
        if let Some(life) = life {
            life.until_over().await;
            if !self.send(ObjectUpdate::Absent).await {
                return;
            }
        }
        pending().await
    }

    async fn send(&self, update: ObjectUpdate<Token>) -> bool {
        self.sender.send((self.credential.clone(), update)).await.is_ok()
    }
}

/// Why there is no certificate.
enum MissingCertificate {
    /// No task needs it any more.
    Unneeded,
    /// The pod will get none.
    Refused(CertificateRefusal),
    /// Another request may succeed.
    Failed(ApiError),
}

/// Why the pod will get no certificate.
#[derive(Debug, thiserror::Error)]
enum CertificateRefusal {
    #[error("podfs makes no keys of type {0}; write keyType: ECDSAP256, ECDSAP384 or ED25519")]
    KeyType(KeyType),
    #[error("cannot make a private key: {0}")]
    Key(#[source] rcgen::Error),
    #[error("the pod is not on a node")]
    NoNode,
    #[error(transparent)]
    SigningRequest(rcgen::Error),
    #[error("PodCertificateRequest was permanently {end}: reason={reason:?} message={message:?}")]
    BySigner { end: &'static str, reason: String, message: String },
}

impl From<CertificateRefusal> for MissingCertificate {
    fn from(refusal: CertificateRefusal) -> MissingCertificate {
        MissingCertificate::Refused(refusal)
    }
}

impl From<ApiError> for MissingCertificate {
    fn from(error: ApiError) -> MissingCertificate {
        MissingCertificate::Failed(error)
    }
}

/// A request for a certificate of a pod.
struct CertificateRequest {
    client: ApiClient,
    owner: TokenOwner,
    key: CertificateKey,
    resource: Resource,
}

impl CertificateRequest {
    /// Makes a key, requests a certificate for it, and waits for the answer. Reports meanwhile why it waits.
    async fn certificate(&mut self, reporter: &CertificateReporter) -> Result<IssuedCertificate, MissingCertificate> {
        let pair = self.generate()?;
        let body = self.body(&pair).await?;
        let name = self.create(&body).await?;
        let namespace = self.owner.pod.namespace.clone();
        let mut poller = Poller::new(self.client.clone(), Collection::only(self.resource, Some(&namespace), &name));
        let (created, mut is_reported) = (Instant::now(), false);
        loop {
            match poller.next().await {
                FollowerEvent::Put(request) => match RequestStatus::parse(request)? {
                    Some(answer) => return answer.into_certificate(&pair, SystemTime::now()),
                    None if is_reported => {}
                    None => {
                        is_reported = true;
                        // The reason may be the pod's signer, so podfs does not report a problem of the server.
                        if !reporter.waits(ApiError::new(ErrorClass::Busy, NOT_ISSUED)).await {
                            return Err(MissingCertificate::Unneeded);
                        }
                    }
                },
                FollowerEvent::Listed(_) | FollowerEvent::Deleted(_) => {
                    let sentence = format!("PodCertificateRequest {namespace}/{name} was deleted without an answer");
                    return Err(ApiError::new(ErrorClass::Gone, sentence).into());
                }
                FollowerEvent::Alive => {}
                // A node gets 403 for a deleted object: the server decides from existing objects what a node may read.
                FollowerEvent::Failure(error)
                    if error.class == ErrorClass::Forbidden
                        && (is_reported || created.elapsed() >= AUTHORIZER_DELAY) =>
                {
                    return Err(ApiError { class: ErrorClass::Gone, ..error }.into());
                }
                FollowerEvent::Failure(error) => {
                    if !reporter.waits(error).await {
                        return Err(MissingCertificate::Unneeded);
                    }
                }
            }
        }
    }

    fn generate(&self) -> Result<KeyPair, MissingCertificate> {
        let algorithm = match self.key.key_type {
            KeyType::EcdsaP256 => &PKCS_ECDSA_P256_SHA256,
            KeyType::EcdsaP384 => &PKCS_ECDSA_P384_SHA384,
            KeyType::Ed25519 => &PKCS_ED25519,
            other @ (KeyType::Rsa3072 | KeyType::Rsa4096 | KeyType::EcdsaP521) => {
                return Err(CertificateRefusal::KeyType(other).into());
            }
        };
        Ok(KeyPair::generate_for(algorithm).map_err(CertificateRefusal::Key)?)
    }

    /// The request object. Its signing request has only the public key, as the kubelet's has.
    async fn body(&self, pair: &KeyPair) -> Result<Value, MissingCertificate> {
        let TokenOwner { pod, service_account, node } = &self.owner;
        let node = node.as_deref().ok_or(CertificateRefusal::NoNode)?;
        let mut parameters = CertificateParams::default();
        parameters.distinguished_name = DistinguishedName::new();
        let csr = parameters.serialize_request(pair).map_err(CertificateRefusal::SigningRequest)?;
        let account = Collection::only(Resource::SERVICE_ACCOUNT, Some(&pod.namespace), service_account);
        let node_uid = self.uid(&Collection::only(Resource::NODE, None, node)).await?;
        Ok(json!({
            "apiVersion": self.resource.api_version,
            "kind": self.resource.kind,
            "metadata": {"generateName": "podfs-", "namespace": pod.namespace},
            "spec": {
                "signerName": self.key.signer,
                "podName": pod.name,
                "podUID": pod.uid.as_str(),
                "serviceAccountName": service_account,
                "serviceAccountUID": self.uid(&account).await?,
                "nodeName": node,
                "nodeUID": node_uid,
                "maxExpirationSeconds": self.key.max_expiration_seconds,
                "stubPKCS10Request": ByteString(csr.der().to_vec()),
                "unverifiedUserAnnotations": self.key.annotations,
            },
        }))
    }

    /// The uid of an object.
    async fn uid(&self, object: &Collection) -> Result<String, MissingCertificate> {
        let found = self.client.get(object).await?;
        let uid = found.as_ref().and_then(|object| object.pointer("/metadata/uid")).and_then(Value::as_str);
        uid.map(str::to_owned).ok_or_else(|| {
            ApiError::new(
                ErrorClass::NotFound,
                format!("{}: there is no such object, or it has no uid", object.title()),
            )
            .into()
        })
    }

    /// Creates the object, and returns its name.
    async fn create(&mut self, body: &Value) -> Result<String, MissingCertificate> {
        let created = self.client.create(self.resource, Some(&self.owner.pod.namespace), &[], body).await;
        let created = created.inspect_err(|error| {
            // The server may have the resource in the other version.
            if error.class == ErrorClass::NotFound
                && let Some(other) = self.resource.other_version()
            {
                self.resource = other;
            }
        })?;
        let name = created.pointer("/metadata/name").and_then(Value::as_str);
        name.map(str::to_owned).ok_or_else(|| {
            ApiError::new(ErrorClass::InvalidAnswer, "the server made a PodCertificateRequest without a name").into()
        })
    }
}

/// A certificate after its private key, as PEM.
struct IssuedCertificate {
    token: Token,
    life: CredentialLifetime,
}

#[derive(Deserialize)]
struct RequestObject {
    #[serde(default)]
    status: RequestStatus,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct RequestStatus {
    conditions: Vec<Condition>,
    certificate_chain: Option<String>,
    begin_refresh_at: Option<Time>,
    not_after: Option<Time>,
}

impl RequestStatus {
    /// The signer's answer; `None` before it answers.
    fn parse(request: Value) -> Result<Option<RequestStatus>, MissingCertificate> {
        let answered: RequestObject =
            serde_json::from_value(request).map_err(|error| invalid_answer(&error.to_string()))?;
        let condition = |kind: &str| {
            answered.status.conditions.iter().find(|condition| condition.type_ == kind && condition.status == "True")
        };
        for (kind, end) in [("Denied", "denied"), ("Failed", "failed")] {
            if let Some(Condition { reason, message, .. }) = condition(kind) {
                let (reason, message) = (reason.clone(), message.clone());
                return Err(CertificateRefusal::BySigner { end, reason, message }.into());
            }
        }
        Ok(condition("Issued").is_some().then_some(answered.status))
    }

    fn into_certificate(self, pair: &KeyPair, now: SystemTime) -> Result<IssuedCertificate, MissingCertificate> {
        let chain = self.certificate_chain.unwrap_or_default();
        let blocks = pem::parse_many(&chain).map_err(|error| invalid_answer(&error.to_string()))?;
        if blocks.is_empty() || blocks.iter().any(|block| block.tag() != "CERTIFICATE") {
            return Err(invalid_answer("its chain is not one of certificates in PEM"));
        }
        let left =
            |time: Option<Time>| time.map(|time| SystemTime::from(time.0).duration_since(now).unwrap_or_default());
        let Some(end) = left(self.not_after.clone()).filter(|left| !left.is_zero()) else {
            return Err(invalid_answer(
                "it has expired already, or does not say when; the clock here, or there, is wrong",
            ));
        };
        let begin = left(self.begin_refresh_at).unwrap_or(end / 2);
        let spread = LONGEST_DELAY.min(end.saturating_sub(begin) / 2).mul_f64(fastrand::f64());
        let due = (begin + spread).max(SHORTEST_USE.min(end / 2));
        let bytes = [private_key(pair), chain].concat().into_bytes();
        let token = Token { bytes, expires: self.not_after.map(|time| SystemTime::from(time.0)) };
        Ok(IssuedCertificate { token, life: CredentialLifetime::of(due, end) })
    }
}

/// The key in PEM, as PKCS #8 in version 1: OpenSSL 3.0 reads no Ed25519 keys in version 2 (RFC 5958), which has the public key
/// after the private key.
fn private_key(pair: &KeyPair) -> String {
    const IN_VERSION_2: [u8; 5] = [0x30, 0x51, 0x02, 0x01, 0x01];
    const IN_VERSION_1: [u8; 5] = [0x30, 0x2e, 0x02, 0x01, 0x00];
    /// The length of a key in version 1, without the prefix.
    const FIELDS: usize = 43;
    let der = pair.serialized_der();
    let der = match der.strip_prefix(&IN_VERSION_2) {
        Some(fields) => [&IN_VERSION_1, &fields[..FIELDS.min(fields.len())]].concat(),
        None => der.to_vec(),
    };
    pem::encode_config(&Pem::new("PRIVATE KEY", der), EncodeConfig::new().set_line_ending(LineEnding::LF))
}

fn invalid_answer(what: &str) -> MissingCertificate {
    ApiError::new(ErrorClass::InvalidAnswer, format!("the signer's answer is no certificate: {what}")).into()
}
