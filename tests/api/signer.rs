//! A signer of pod certificates, in the role of a cluster's controller, and a volume that shows a certificate.

use std::sync::atomic::{AtomicUsize, Ordering};

use k8s_openapi::ByteString;
use k8s_openapi::jiff::{Span, Timestamp};
use rcgen::{CertificateParams, CertificateSigningRequestParams, Issuer, KeyPair};
use serde_json::{Value, json};

use crate::api_server::ApiServer;
use crate::common::eventually;

pub const REQUESTS: &str = "podcertificaterequests";
pub const REQUEST: &str = "PodCertificateRequest";

/// The volume `identity` with a certificate for a key of this type.
pub fn volume(key_type: &str) -> String {
    format!(
        "[{{name: identity, projected: {{sources: [{{podCertificate: {{signerName: example.com/server, keyType: {key_type}, \
         maxExpirationSeconds: 7200, credentialBundlePath: both.pem, keyPath: key.pem, certificateChainPath: chain.pem, \
         userAnnotations: {{example.com/role: web}}}}}}]}}}}]"
    )
}

/// Issues certificates.
pub struct Signer {
    issuer: Issuer<'static, KeyPair>,
    answered: AtomicUsize,
}

impl Signer {
    pub fn new() -> Signer {
        let issuer = Issuer::new(CertificateParams::default(), KeyPair::generate().expect("a key"));
        Signer { issuer, answered: AtomicUsize::new(0) }
    }

    /// Waits for the next request.
    pub fn next(&self, server: &ApiServer) -> Value {
        let answered = self.answered.fetch_add(1, Ordering::Relaxed);
        eventually("the next request is there", || server.objects(REQUEST).len() > answered);
        let is_open = |request: &Value| request["status"]["conditions"].is_null();
        server.objects(REQUEST).into_iter().find(is_open).expect("a request that is open")
    }

    /// Issues a certificate that expires in `end` seconds and should be renewed from `refresh` seconds on.
    pub fn issue(&self, server: &ApiServer, mut request: Value, refresh: i64, end: i64) {
        let ByteString(der) = serde_json::from_value(request["spec"]["stubPKCS10Request"].clone()).expect("base64");
        let csr =
            CertificateSigningRequestParams::from_der(&der.into()).expect("a signing request that is signed right");
        let certificate = csr.signed_by(&self.issuer).expect("a certificate");
        let at = |seconds: i64| json!((Timestamp::now() + Span::new().seconds(seconds)).to_string());
        request["status"] = json!({
            "conditions": [condition("Issued", "Good", "fine")],
            "certificateChain": certificate.pem(), "notBefore": at(-60), "beginRefreshAt": at(refresh), "notAfter": at(end),
        });
        server.put_value(request);
    }
}

fn condition(kind: &str, reason: &str, message: &str) -> Value {
    json!({"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": "2026-01-01T00:00:00Z"})
}

/// Refuses a request as a signer, by a condition of this type: `Denied` or `Failed`.
pub fn refuse(server: &ApiServer, mut request: Value, kind: &str) {
    request["status"] = json!({"conditions": [condition(kind, "UnsupportedKeyType", "use ED25519")]});
    server.put_value(request);
}
