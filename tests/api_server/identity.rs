//! The user of a request, by a client certificate or a bearer token. There are no anonymous users.
//!
//! As with a real server, the TLS handshake accepts any certificate of which the client has the key. The server checks with
//! each request whether the cluster's authority signed the certificate and whether the certificate is still valid. If not, the
//! server answers 401 and keeps the connection.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{DigitallySignedStruct, DistinguishedName, Error, RootCertStore, SignatureScheme};
use x509_parser::prelude::{FromDer, X509Certificate};

use super::status::Failure;

/// The group of nodes; below, the group of users with all permissions.
pub const NODES: &str = "system:nodes";
pub const MASTERS: &str = "system:masters";

/// The user of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    pub name: String,
    pub groups: Vec<String>,
}

impl User {
    pub fn new(name: &str, group: &str) -> Self {
        Self { name: name.to_owned(), groups: vec![group.to_owned()] }
    }

    pub fn node(name: &str) -> Self {
        Self::new(&format!("system:node:{name}"), NODES)
    }

    pub fn is_in(&self, group: &str) -> bool {
        self.groups.iter().any(|member_of| member_of == group)
    }

    /// The name of the node, if the user is one.
    pub fn as_node(&self) -> Option<&str> {
        self.name.strip_prefix("system:node:").filter(|_| self.is_in(NODES))
    }
}

/// The known users.
pub struct Users {
    tokens: Mutex<HashMap<String, User>>,
    verifier: Arc<dyn ClientCertVerifier>,
}

impl Users {
    pub fn new(authority: CertificateDer<'static>, provider: Arc<CryptoProvider>) -> Self {
        let mut roots = RootCertStore::empty();
        roots.add(authority).expect("an authority");
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
        Self { tokens: Mutex::default(), verifier: verifier.expect("there is an authority") }
    }

    pub fn accept_token(&self, token: &str, user: User) {
        self.tokens().insert(token.to_owned(), user);
    }

    /// Forgets the tokens of the user.
    pub fn refuse_tokens_of(&self, user: &str) {
        self.tokens().retain(|_, known| known.name != user);
    }

    pub fn identify(&self, certificates: &[CertificateDer<'static>], headers: &HeaderMap) -> Result<User, Failure> {
        if let Some((certificate, chain)) = certificates.split_first() {
            let verified = self.verifier.verify_client_cert(certificate, chain, UnixTime::now());
            return match (verified, subject(certificate)) {
                (Ok(_), Some(user)) => Ok(user),
                _ => Err(Failure::unauthorized()),
            };
        }
        let header = headers.get(AUTHORIZATION).and_then(|header| header.to_str().ok());
        let token = header.and_then(|header| header.strip_prefix("Bearer "));
        token.and_then(|token| self.tokens().get(token).cloned()).ok_or_else(Failure::unauthorized)
    }

    fn tokens(&self) -> std::sync::MutexGuard<'_, HashMap<String, User>> {
        self.tokens.lock().expect("no panic")
    }
}

fn subject(certificate: &CertificateDer<'_>) -> Option<User> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    let subject = certificate.subject();
    let name = subject.iter_common_name().next()?.as_str().ok()?.to_owned();
    let groups = subject.iter_organization().filter_map(|group| group.as_str().ok()).map(str::to_owned).collect();
    Some(User { name, groups })
}

/// Accepts any certificate, or none, in the handshake.
#[derive(Debug)]
pub struct AnyCertificate(pub Arc<CryptoProvider>);

impl ClientCertVerifier for AnyCertificate {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
