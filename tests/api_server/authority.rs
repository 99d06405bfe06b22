//! Certificates: the certificate authority of a cluster, and the certificates of the cluster's server and users.

use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

const DAY: Duration = Duration::from_secs(86_400);

/// A certificate authority.
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate with its key, in PEM.
#[derive(Clone)]
pub struct Pair {
    pub certificate: String,
    pub key: String,
}

/// The certificate that the server presents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presents {
    /// A valid certificate.
    Good,
    /// A certificate that expired yesterday.
    Expired,
    /// A certificate for another host.
    OtherName,
    /// A certificate of an unknown authority.
    OtherAuthority,
}

impl Authority {
    pub fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let key = KeyPair::generate().expect("a key");
        Self(CertifiedIssuer::self_signed(params, key).expect("a certificate"))
    }

    pub fn pem(&self) -> String {
        self.0.pem()
    }

    pub fn der(&self) -> CertificateDer<'static> {
        self.0.der().clone()
    }

    /// A certificate for a server at 127.0.0.1.
    pub fn server(&self, presents: Presents) -> Pair {
        let names: &[&str] = match presents {
            Presents::OtherName => &["elsewhere.example"],
            _ => &["127.0.0.1", "localhost", "kubernetes.default.svc"],
        };
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names).expect("names");
        params.distinguished_name.push(DnType::CommonName, "kube-apiserver");
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let until = if presents == Presents::Expired { SystemTime::now() - DAY } else { SystemTime::now() + DAY };
        self.sign(params, until)
    }

    /// A client certificate of a user, valid until `until`.
    pub fn client(&self, user: &str, group: &str, until: SystemTime) -> Pair {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, user);
        params.distinguished_name.push(DnType::OrganizationName, group);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.sign(params, until)
    }

    /// A self-signed certificate for a server at 127.0.0.1, which is also a certificate authority.
    pub fn self_signed() -> Pair {
        let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).expect("names");
        params.distinguished_name.push(DnType::CommonName, "kube-apiserver");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        let certificate = params.self_signed(&key).expect("a certificate");
        Pair { certificate: certificate.pem(), key: key.serialize_pem() }
    }

    fn sign(&self, mut params: CertificateParams, until: SystemTime) -> Pair {
        params.not_before = (SystemTime::now() - 2 * DAY).into();
        params.not_after = until.into();
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.0).expect("a certificate");
        Pair { certificate: certificate.pem(), key: key.serialize_pem() }
    }
}

impl Pair {
    pub fn certificate(&self) -> CertificateDer<'static> {
        CertificateDer::from_pem_slice(self.certificate.as_bytes()).expect("a certificate")
    }

    pub fn key(&self) -> PrivateKeyDer<'static> {
        PrivateKeyDer::from_pem_slice(self.key.as_bytes()).expect("a key")
    }
}
