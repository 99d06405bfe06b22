//! The service account of a pod: the server's address in the environment, and a directory with the token and the
//! certificate authority.

use std::path::PathBuf;

use reqwest::Url;

use super::{Authority, Bearer, ClientSettings, SettingProblem, SettingsError, User, read_file, read_token};

pub(super) const HOST: &str = "KUBERNETES_SERVICE_HOST";
pub(super) const PORT: &str = "KUBERNETES_SERVICE_PORT";

/// The directory of the service account in a container.
pub(crate) const DIRECTORY: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// The environment variable with another path of that directory, for a podfs that has left its container.
pub(crate) const VARIABLE: &str = "PODFS_SERVICE_ACCOUNT";

pub(super) fn read() -> Result<ClientSettings, SettingsError> {
    let server = address(&variable(HOST)?, &variable(PORT)?)?;
    let directory = std::env::var_os(VARIABLE).map_or_else(|| PathBuf::from(DIRECTORY), PathBuf::from);
    let authority = Authority::Pem(read_file(&directory.join("ca.crt"), "the certificate authority")?);
    let bearer = Some(Bearer::Token(read_token(&directory.join("token"))?));
    Ok(ClientSettings { server, server_name: None, authority, proxy: None, user: User { certificate: None, bearer } })
}

fn variable(name: &'static str) -> Result<String, SettingsError> {
    std::env::var(name).ok().filter(|value| !value.is_empty()).ok_or(SettingsError::NotInCluster(name))
}

/// IPv6 addresses have brackets in a URL, and none in the environment.
pub(super) fn address(host: &str, port: &str) -> Result<Url, SettingsError> {
    let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
    Url::parse(&format!("https://{host}:{port}"))
        .map_err(|error| SettingsError::InCluster(SettingProblem::Address(error)))
}
