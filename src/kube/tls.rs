//! TLS according to the settings: how podfs checks the server's certificate, and podfs's own certificate.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{VerifierBuilderError, WebPkiServerVerifier, verify_server_name};
use rustls::crypto::{WebPkiSupportedAlgorithms, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, OtherError, RootCertStore, SignatureScheme,
};
use secrecy::{ExposeSecret, SecretString};

/// The authorities that may have signed the server's certificate.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) enum Authority {
    /// These, in PEM.
    Pem(Vec<u8>),
    /// Those that this machine trusts.
    System,
    /// Any, or none: podfs does not check it.
    Unchecked,
}

/// A client certificate and its key, in PEM.
#[derive(Clone)]
pub(super) struct ClientCertificate {
    pub(super) chain: Vec<u8>,
    pub(super) key: SecretString,
}

/// Why podfs cannot use the settings' certificates. Each text follows the name of the settings.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error(transparent)]
    Versions(Error),
    #[error("the certificate authority {0}")]
    Authority(#[source] PemError),
    #[error("the certificate authority holds no valid certificate")]
    NoAuthority,
    #[error("the certificate authority cannot be used: {0}")]
    Verifier(#[source] VerifierBuilderError),
    #[error("the certificates this machine trusts cannot be used: {0}")]
    Machine(#[source] Error),
    #[error("the client certificate {0}")]
    Client(#[source] PemError),
    /// The parser's own text could quote the key.
    #[error("the client key is not a private key in PEM")]
    Key,
    #[error("the client certificate and its key cannot be used: {0}")]
    ClientKey(#[source] Error),
}

/// What is wrong with a file of certificates.
#[derive(Debug, thiserror::Error)]
pub enum PemError {
    #[error("is not PEM")]
    NotPem(#[source] pem::Error),
    #[error("holds no certificate in PEM")]
    Empty,
}

/// The TLS settings for reqwest.
///
/// # Errors
/// When one of the certificates cannot be used.
pub(crate) fn config(authority: &Authority, certificate: Option<&ClientCertificate>) -> Result<ClientConfig, TlsError> {
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(TlsError::Versions)?;
    let verifier: Arc<dyn ServerCertVerifier> = match authority {
        Authority::Pem(pem) => {
            let certificates = certificates(pem).map_err(TlsError::Authority)?;
            let roots = Arc::new(roots(certificates.clone())?);
            let verifier = WebPkiServerVerifier::builder_with_provider(roots, provider).build();
            Arc::new(ListedOrSignedVerifier { verifier: verifier.map_err(TlsError::Verifier)?, certificates })
        }
        Authority::System => Arc::new(rustls_platform_verifier::Verifier::new(provider).map_err(TlsError::Machine)?),
        Authority::Unchecked => Arc::new(AcceptsAnyCertificate(provider.signature_verification_algorithms)),
    };
    let builder = builder.dangerous().with_custom_certificate_verifier(verifier);
    let mut config = match certificate {
        None => builder.with_no_client_auth(),
        Some(ClientCertificate { chain, key }) => {
            let chain = certificates(chain).map_err(TlsError::Client)?;
            let key = PrivateKeyDer::from_pem_slice(key.expose_secret().as_bytes()).map_err(|_| TlsError::Key)?;
            builder.with_client_auth_cert(chain, key).map_err(TlsError::ClientKey)?
        }
    };
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

fn roots(certificates: Vec<CertificateDer<'static>>) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    let (added, _) = roots.add_parsable_certificates(certificates);
    if added == 0 { Err(TlsError::NoAuthority) } else { Ok(roots) }
}

fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, PemError> {
    let certificates = CertificateDer::pem_slice_iter(pem).collect::<Result<Vec<_>, _>>();
    let certificates = certificates.map_err(PemError::NotPem)?;
    if certificates.is_empty() { Err(PemError::Empty) } else { Ok(certificates) }
}

/// Accepts certificates signed by the authorities, and a certificate that is itself one of them, as Go does: a server
/// may have made its own certificate.
#[derive(Debug)]
struct ListedOrSignedVerifier {
    verifier: Arc<WebPkiServerVerifier>,
    certificates: Vec<CertificateDer<'static>>,
}

impl ServerCertVerifier for ListedOrSignedVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        match self.verifier.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now) {
            // The verifier checks the certificate's time before it reports this.
            Err(error) if is_authority_itself(&error) && self.certificates.contains(end_entity) => {
                verify_server_name(&ParsedCertificate::try_from(end_entity)?, server_name)?;
                Ok(ServerCertVerified::assertion())
            }
            outcome => outcome,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifier.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifier.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.verifier.supported_verify_schemes()
    }
}

/// Whether the verifier refused a certificate only because it is one of an authority, which may sign others.
pub(crate) fn is_authority_itself(error: &Error) -> bool {
    let Error::InvalidCertificate(CertificateError::Other(OtherError(cause))) = error else { return false };
    matches!(cause.downcast_ref(), Some(webpki::Error::CaUsedAsEndEntity))
}

/// Accepts any certificate (`insecure-skip-tls-verify`). Still checks that the server has the key of the certificate.
#[derive(Debug)]
struct AcceptsAnyCertificate(WebPkiSupportedAlgorithms);

impl ServerCertVerifier for AcceptsAnyCertificate {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, cert, dss, &self.0)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &self.0)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_schemes()
    }
}
