//! What every pod of a cluster is given: the server's address in the environment, and a directory with the token and the
//! certificate authority.

use std::path::Path;

use reqwest::Url;

use super::{Authority, Bearer, Settings, SettingsError, User, read_file, read_token};

const HOST: &str = "KUBERNETES_SERVICE_HOST";
const PORT: &str = "KUBERNETES_SERVICE_PORT";
const TOKEN: &str = "/var/run/secrets/kubernetes.io/serviceaccount/token";
const AUTHORITY: &str = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt";

pub(super) fn read() -> Result<Settings, SettingsError> {
    let server = address(&variable(HOST)?, &variable(PORT)?)?;
    let authority = Authority::Pem(read_file(Path::new(AUTHORITY), "the certificate authority")?);
    let bearer = Some(Bearer::Token(read_token(Path::new(TOKEN))?));
    Ok(Settings { server, server_name: None, authority, proxy: None, user: User { certificate: None, bearer } })
}

fn variable(name: &'static str) -> Result<String, SettingsError> {
    std::env::var(name).ok().filter(|value| !value.is_empty()).ok_or(SettingsError::NotInCluster(name))
}

/// IPv6 addresses stand in brackets in an URL, and without them in the environment.
pub(super) fn address(host: &str, port: &str) -> Result<Url, SettingsError> {
    let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
    Url::parse(&format!("https://{host}:{port}"))
        .map_err(|error| SettingsError::InCluster(format!("{HOST} and {PORT} make no address: {error}")))
}
