//! Settings: the address of the API server, its certificate authority, and podfs's credentials.
//!
//! They come from a kubeconfig file ([`kubeconfig`]) or from the service account of a pod ([`in_cluster`]). This module keeps
//! nothing and reads the files at each call, because credentials in files change while podfs runs. An error is one sentence that
//! names the file and the field.

mod in_cluster;
mod kubeconfig;
mod pod_token;
#[cfg(test)]
mod tests;

use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use reqwest::Url;
use secrecy::SecretString;

use super::error::ConnectionError;
use super::exec::CredentialProgram;
use super::tls::{Authority, ClientCertificate};
use in_cluster::{HOST, PORT};

pub(crate) use in_cluster::{DIRECTORY as SERVICE_ACCOUNT, VARIABLE as SERVICE_ACCOUNT_VARIABLE};
pub use pod_token::PodToken;

/// The source of settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SettingsSource {
    /// The current context of this kubeconfig file.
    Kubeconfig(PathBuf),
    /// The service account of the pod that podfs runs in.
    InCluster,
    /// The same server, with the token of another pod's service account.
    AsPod(Box<SettingsSource>, PodToken),
}

impl SettingsSource {
    /// The namespace of pods whose manifests have none.
    ///
    /// # Errors
    /// When the kubeconfig cannot be used.
    pub fn namespace(&self) -> Result<Option<String>, SettingsError> {
        match self {
            SettingsSource::Kubeconfig(path) => kubeconfig::namespace(path),
            SettingsSource::InCluster | SettingsSource::AsPod(..) => Ok(None),
        }
    }
}

/// The settings with which podfs talks to an API server. The type has no debug output, because it holds secrets.
pub(super) struct ClientSettings {
    /// The server's address.
    pub(super) server: Url,
    /// The name in the server's certificate, if it is not that of the address.
    pub(super) server_name: Option<String>,
    /// The authority that has to sign the server's certificate.
    pub(super) authority: Authority,
    /// A proxy on the way to the server.
    pub(super) proxy: Option<Url>,
    /// podfs's credentials.
    pub(super) user: User,
}

/// podfs's credentials for the server.
#[derive(Default)]
pub(super) struct User {
    /// A client certificate.
    pub(super) certificate: Option<ClientCertificate>,
    /// The credentials in the header `Authorization`.
    pub(super) bearer: Option<Bearer>,
}

/// The credentials in the header of every request.
pub(super) enum Bearer {
    /// A token.
    Token(SecretString),
    /// A name and its password.
    Password(String, SecretString),
    /// The output of this program.
    Program(Box<CredentialProgram>),
}

impl ClientSettings {
    /// Reads the settings, and the files they name.
    ///
    /// # Errors
    /// When something is missing or wrong; the error names the file and the field.
    pub(super) fn read(access: &SettingsSource) -> Result<ClientSettings, SettingsError> {
        match access {
            SettingsSource::Kubeconfig(path) => kubeconfig::read(path),
            SettingsSource::InCluster => in_cluster::read(),
            SettingsSource::AsPod(server, token) => {
                let bearer = Some(Bearer::Token(token.read()?));
                Ok(ClientSettings { user: User { certificate: None, bearer }, ..ClientSettings::read(server)? })
            }
        }
    }
}

/// Settings that podfs cannot use. Its text is one sentence for the user; it never quotes a credential.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// A file that cannot be read.
    #[error("{}: {what} cannot be read: {reason}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The content of the file.
        what: &'static str,
        /// The kernel's reason.
        #[source]
        reason: io::Error,
    },
    /// A file with a setting that podfs cannot use.
    #[error("{}: {problem}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        #[source]
        problem: SettingProblem,
    },
    /// podfs runs in no pod.
    #[error("--in-cluster: {0} is not set: podfs runs in no pod of a cluster; give --kubeconfig instead")]
    NotInCluster(&'static str),
    /// The token of a pod has not arrived yet.
    #[error(
        "podfs has no token of the pod's service account yet; the kubelet sends it with its next NodePublishVolume"
    )]
    NoPodToken,
    /// The token of a pod cannot be used.
    #[error("the token of the pod's service account, which the kubelet has sent: {0}")]
    PodToken(#[source] SettingProblem),
    /// The service account of `--in-cluster` cannot be used.
    #[error("--in-cluster: {0}")]
    InCluster(#[source] SettingProblem),
}

/// What is wrong with a setting, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum SettingProblem {
    /// A setting is missing or wrong.
    #[error("{0}")]
    Sentence(String),
    /// The address of the server makes no URL.
    #[error("{HOST} and {PORT} make no address: {0}")]
    Address(#[source] <Url as FromStr>::Err),
    /// The settings are read, and make no connection.
    #[error(transparent)]
    Connection(#[from] ConnectionError),
}

impl SettingsError {
    fn invalid(path: &Path, problem: impl Into<String>) -> Self {
        Self::Invalid { path: path.to_owned(), problem: SettingProblem::Sentence(problem.into()) }
    }
}

fn read_file(path: &Path, what: &'static str) -> Result<Vec<u8>, SettingsError> {
    std::fs::read(path).map_err(|reason| SettingsError::Unreadable { path: path.to_owned(), what, reason })
}

/// A token is one line; the files it comes in often end with a line break.
fn read_token(path: &Path) -> Result<SecretString, SettingsError> {
    let bytes = read_file(path, "the token")?;
    let text = String::from_utf8(bytes).ok();
    let token = text.as_deref().map(str::trim).filter(|token| !token.is_empty());
    let token = token.ok_or_else(|| SettingsError::invalid(path, "holds no token"))?;
    if token.contains(|c: char| !c.is_ascii_graphic()) {
        return Err(SettingsError::invalid(path, "is not one token: it has spaces, line breaks or control characters"));
    }
    Ok(SecretString::from(token))
}
