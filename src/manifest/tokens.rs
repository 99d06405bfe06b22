//! Tokens of the pod's service account and certificates of the pod, as a source has them at one moment.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use crate::volume::{CertificateKey, CredentialKey, TokenKey};

/// The tokens and certificates that volumes ask for. In place of a missing one is the reason, as text, because pushes transfer it.
/// A source that cannot issue tokens has neither tokens nor reasons. Cheap to clone.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Tokens {
    by_key: Arc<BTreeMap<CredentialKey, Result<Token, String>>>,
}

/// A token; or a private key followed by its certificate chain, both in PEM.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Token {
    pub(crate) bytes: Vec<u8>,
    /// The time at which it expires; none if the issuer did not give it.
    pub(crate) expires: Option<SystemTime>,
}

impl Tokens {
    /// The token for this key, or the reason why there is none; `None` if the source did not request it.
    pub fn get(&self, key: &TokenKey) -> Option<Result<&[u8], &str>> {
        self.of(&CredentialKey::Token(key.clone()))
    }

    /// The private key and its certificate chain, both in PEM, or the reason why there is none; `None` if the source did not
    /// request them.
    pub fn certificate(&self, key: &CertificateKey) -> Option<Result<&[u8], &str>> {
        self.of(&CredentialKey::Certificate(key.clone()))
    }

    fn of(&self, key: &CredentialKey) -> Option<Result<&[u8], &str>> {
        self.by_key.get(key).map(|token| token.as_ref().map(|token| &*token.bytes).map_err(String::as_str))
    }

    /// The tokens with a known expiration, and the time of it.
    pub fn expirations(&self) -> impl Iterator<Item = (&TokenKey, SystemTime)> {
        self.by_key.iter().filter_map(|(key, token)| match key {
            CredentialKey::Token(key) => Some((key, token.as_ref().ok()?.expires?)),
            CredentialKey::Certificate(_) => None,
        })
    }
}

/// A token whose expiration is unknown.
impl From<Vec<u8>> for Token {
    fn from(bytes: Vec<u8>) -> Token {
        Token { bytes, expires: None }
    }
}

impl<T: Into<Token>> FromIterator<(CredentialKey, Result<T, String>)> for Tokens {
    fn from_iter<I: IntoIterator<Item = (CredentialKey, Result<T, String>)>>(tokens: I) -> Self {
        let by_key = tokens.into_iter().map(|(key, token)| (key, token.map(Into::into))).collect();
        Tokens { by_key: Arc::new(by_key) }
    }
}

/// Shows the size; the bytes are secret.
impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.bytes.len())
    }
}

/// Shows the requests, and the size of each credential; the bytes are secret.
impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.by_key.iter()).finish()
    }
}
