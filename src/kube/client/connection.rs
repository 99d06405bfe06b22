//! A connection with its credentials, from one reading of the settings.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

use reqwest::Url;
use reqwest::header::HeaderValue;
use secrecy::{ExposeSecret, SecretString};
use tokio::task::{JoinError, spawn_blocking};

use super::connection_pool::{ConnectionIdentity, ConnectionPool};
use crate::kube::error::ConnectionError;
use crate::kube::exec::{self, ProgramCredential};
use crate::kube::settings::{Bearer, ClientSettings, SettingsError, SettingsSource};

/// The connection and credentials of requests. Its debug output has no secret.
pub(super) struct ApiConnection {
    pub(super) pool: Arc<ConnectionPool>,
    /// The base URL of requests.
    pub(super) server: Url,
    pub(super) authorization: Option<HeaderValue>,
    /// When the credentials of the kubeconfig's program expire.
    pub(super) expires: Option<SystemTime>,
    issued: Option<ProgramCredential>,
    /// Whether the last request had an answer, so that the next one need not make a connection.
    made: AtomicBool,
}

impl ApiConnection {
    /// Reads the settings, on a thread for blocking calls. `before` is the present connection, and whether to keep the credentials
    /// that a program has issued for it. The TCP connections stay if the server and the certificates are the same.
    pub(super) async fn open(
        access: &SettingsSource,
        before: Option<(&ApiConnection, bool)>,
    ) -> Result<ApiConnection, SettingsError> {
        let to_read = access.clone();
        let settings = joined(spawn_blocking(move || ClientSettings::read(&to_read)).await)?;
        let failed = |problem: ConnectionError| match access {
            SettingsSource::Kubeconfig(path) => SettingsError::Invalid { path: path.clone(), problem: problem.into() },
            SettingsSource::InCluster => SettingsError::InCluster(problem.into()),
            SettingsSource::AsPod(..) => SettingsError::PodToken(problem.into()),
        };
        let issued = match (&settings.user.bearer, before) {
            (Some(Bearer::Program(_)), Some((ApiConnection { issued: Some(issued), .. }, true))) => {
                Some(issued.clone())
            }
            (Some(Bearer::Program(program)), _) => {
                Some(exec::issue(program).await.map_err(|error| failed(error.into()))?)
            }
            _ => None,
        };
        let token = issued.as_ref().and_then(|issued| issued.token.as_ref());
        let authorization = authorization(settings.user.bearer.as_ref(), token).map_err(&failed)?;
        let expires = issued.as_ref().and_then(|issued| issued.expires);
        let of_program = issued.as_ref().and_then(|issued| issued.certificate.clone());
        let certificate = of_program.or_else(|| settings.user.certificate.clone());
        let identity = ConnectionIdentity::new(settings, certificate);
        let server = identity.address().map_err(&failed)?;
        let (pool, made) = match before {
            Some((before, _)) if before.pool.are_of(&identity) => (Arc::clone(&before.pool), before.is_made()),
            _ => {
                // Reads the certificates that this machine trusts.
                let pool = joined(spawn_blocking(move || ConnectionPool::new(identity)).await);
                (Arc::new(pool.map_err(&failed)?), false)
            }
        };
        Ok(ApiConnection { pool, server, authorization, expires, issued, made: AtomicBool::new(made) })
    }

    /// Whether there is a connection, which the next request can use.
    pub(super) fn is_made(&self) -> bool {
        self.made.load(Ordering::Relaxed)
    }

    /// Notes whether a request had an answer. Returns whether the request before it had one.
    pub(super) fn note(&self, answered: bool) -> bool {
        self.made.swap(answered, Ordering::Relaxed)
    }

    /// Whether both have the same identity for the server.
    pub(super) fn same_credentials(&self, other: &ApiConnection) -> bool {
        Arc::ptr_eq(&self.pool, &other.pool) && self.authorization == other.authorization
    }
}

/// The result of a function that ran on a thread for blocking calls.
fn joined<T>(result: Result<T, JoinError>) -> T {
    result.expect("reading settings and certificates does not panic")
}

fn authorization(
    bearer: Option<&Bearer>,
    issued: Option<&SecretString>,
) -> Result<Option<HeaderValue>, ConnectionError> {
    let header = match (bearer, issued) {
        (_, Some(token)) | (Some(Bearer::Token(token)), None) => format!("Bearer {}", token.expose_secret().trim()),
        (Some(Bearer::Password(name, password)), None) => {
            format!("Basic {}", base64(format!("{name}:{}", password.expose_secret()).as_bytes()))
        }
        (Some(Bearer::Program(_)) | None, None) => return Ok(None),
    };
    let header = HeaderValue::try_from(header);
    let mut header = header.map_err(ConnectionError::Token)?;
    header.set_sensitive(true);
    Ok(Some(header))
}

/// Base64, as Kubernetes encodes bytes.
fn base64(bytes: &[u8]) -> String {
    match serde_json::to_value(k8s_openapi::ByteString(bytes.to_vec())) {
        Ok(serde_json::Value::String(text)) => text,
        _ => String::new(),
    }
}
