//! The current context of a kubeconfig file. Relative paths in it are relative to its directory.
//!
//! If two fields give the same setting, such as a certificate in a file and one in the text, kubectl silently takes one of
//! them; here it is an error. Authentication that needs another program's library is an error, too.

use std::net::IpAddr;
use std::path::Path;

use k8s_openapi::ByteString;
use kube_client::config::{AuthInfo, Cluster, Context, Kubeconfig, KubeconfigError};
use reqwest::Url;
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::{Error as ValueError, StrDeserializer};

use crate::kube::exec::{CredentialProgram, ProgramCluster};

use super::{Authority, Bearer, ClientCertificate, ClientSettings, SettingsError, User, read_file, read_token};

/// The namespace of the current context.
pub(super) fn namespace(path: &Path) -> Result<Option<String>, SettingsError> {
    let file = Kubeconfig::read_from(path).map_err(|error| unreadable(path, error))?;
    let (_, context) = current_context(path, &file)?;
    Ok(context.namespace.clone().filter(|namespace| !namespace.is_empty()))
}

pub(super) fn read(path: &Path) -> Result<ClientSettings, SettingsError> {
    let file = Kubeconfig::read_from(path).map_err(|error| unreadable(path, error))?;
    let invalid = |problem: String| SettingsError::invalid(path, problem);
    let (current, context) = current_context(path, &file)?;
    let cluster = file.clusters.iter().find(|cluster| cluster.name == context.cluster);
    let cluster = cluster.and_then(|cluster| cluster.cluster.as_ref());
    let cluster = cluster.ok_or_else(|| {
        invalid(format!("context {current:?} is of cluster {:?}, which is not among its clusters", context.cluster))
    })?;
    let user = match context.user.as_deref().filter(|user| !user.is_empty()) {
        None => User::default(),
        Some(name) => {
            let found = file.auth_infos.iter().find(|user| user.name == name);
            let found = found.ok_or_else(|| {
                invalid(format!("context {current:?} is of user {name:?}, which is not among its users"))
            })?;
            let reader = KubeconfigReader { path, of: format!("user {name:?}") };
            found.auth_info.as_ref().map_or(Ok(User::default()), |user| reader.user(user))?
        }
    };
    KubeconfigReader { path, of: format!("cluster {:?}", context.cluster) }.settings(cluster, user)
}

/// The current context and its name.
fn current_context<'a>(path: &Path, file: &'a Kubeconfig) -> Result<(&'a str, &'a Context), SettingsError> {
    let invalid = |problem: String| SettingsError::invalid(path, problem);
    let current = file.current_context.as_deref().filter(|name| !name.is_empty());
    let current = current
        .ok_or_else(|| invalid("has no current-context; set one with `kubectl config use-context`".to_owned()))?;
    let context = file.contexts.iter().find(|context| context.name == current);
    let context = context.and_then(|context| context.context.as_ref());
    let context =
        context.ok_or_else(|| invalid(format!("the current-context {current:?} is not among its contexts")))?;
    Ok((current, context))
}

/// The error of a kubeconfig that podfs cannot read. It does not have the parser's text, which may quote a credential.
fn unreadable(path: &Path, error: KubeconfigError) -> SettingsError {
    match error {
        KubeconfigError::ReadConfig(reason, path) => SettingsError::Unreadable { path, what: "the kubeconfig", reason },
        KubeconfigError::Parse(error) => {
            let place = error.location().map_or(String::new(), |place| format!(" (line {})", place.line()));
            SettingsError::invalid(path, format!("is no kubeconfig: it is not YAML of that form{place}"))
        }
        other => SettingsError::invalid(path, format!("is no kubeconfig: {other}")),
    }
}

/// Reads a part of the file.
struct KubeconfigReader<'a> {
    path: &'a Path,
    of: String,
}

impl KubeconfigReader<'_> {
    fn settings(&self, cluster: &Cluster, mut user: User) -> Result<ClientSettings, SettingsError> {
        let server = cluster.server.as_deref().filter(|server| !server.is_empty());
        let server = server.ok_or_else(|| self.invalid("has no server"))?;
        let server = Url::parse(server).map_err(|error| self.invalid(format!("its server is no address: {error}")))?;
        match server.scheme() {
            "https" => {}
            // As `kubectl proxy` offers it.
            "http" if is_loopback(&server) => {}
            "http" => {
                return Err(self.invalid(
                    "its server is reached by http, and podfs sends no credentials in the clear, unless it is at a loopback \
                     address; use https",
                ));
            }
            other => return Err(self.invalid(format!("its server begins with {other}; podfs knows https and http"))),
        }
        let server_name = cluster.tls_server_name.clone().filter(|name| !name.is_empty());
        let proxy = cluster.proxy_url.as_deref().filter(|proxy| !proxy.is_empty());
        let proxy = proxy.map(|proxy| self.proxy(proxy)).transpose()?;
        if proxy.is_some() && server_name.is_some() {
            return Err(self.invalid("has proxy-url and tls-server-name; podfs knows no way to have both"));
        }
        if proxy.is_some() && server.scheme() == "http" {
            return Err(self.invalid("has a proxy-url and a server that is reached by http; use https"));
        }
        let authority = self.one_of(
            "certificate-authority",
            cluster.certificate_authority.as_deref(),
            cluster.certificate_authority_data.as_deref(),
        )?;
        let authority = match (authority, cluster.insecure_skip_tls_verify.unwrap_or(false)) {
            (None, true) => Authority::Unchecked,
            (None, false) => Authority::System,
            (Some(pem), false) => Authority::Pem(pem),
            (Some(_), true) => {
                return Err(
                    self.invalid("has a certificate authority and insecure-skip-tls-verify; remove one of them")
                );
            }
        };
        if let Some(Bearer::Program(program)) = &mut user.bearer
            && program.exec.provide_cluster_info
        {
            program.cluster = Some(ProgramCluster::of(cluster, &authority));
        }
        Ok(ClientSettings { server, server_name, authority, proxy, user })
    }

    fn proxy(&self, proxy: &str) -> Result<Url, SettingsError> {
        let proxy = Url::parse(proxy).map_err(|error| self.invalid(format!("its proxy-url is no address: {error}")))?;
        match proxy.scheme() {
            "http" | "https" => Ok(proxy),
            other => Err(self.invalid(format!("its proxy-url begins with {other}; podfs knows http and https"))),
        }
    }

    fn user(&self, user: &AuthInfo) -> Result<User, SettingsError> {
        if user.auth_provider.is_some() {
            return Err(
                self.invalid("has an auth-provider, which is no longer in use; give exec, a token or a certificate")
            );
        }
        if user.impersonate.is_some() || user.impersonate_groups.is_some() || user.impersonate_uid.is_some() {
            return Err(self.invalid("impersonates another user (`as`), which podfs does not"));
        }
        Ok(User { certificate: self.certificate(user)?, bearer: self.bearer(user)? })
    }

    fn certificate(&self, user: &AuthInfo) -> Result<Option<ClientCertificate>, SettingsError> {
        let chain = self.one_of(
            "client-certificate",
            user.client_certificate.as_deref(),
            user.client_certificate_data.as_deref(),
        )?;
        let key = self.one_of(
            "client-key",
            user.client_key.as_deref(),
            user.client_key_data.as_ref().map(|data| data.expose_secret()),
        )?;
        match (chain, key) {
            (None, None) => Ok(None),
            (Some(chain), Some(key)) => {
                let key = String::from_utf8(key).map_err(|_| self.invalid("its client-key is not PEM"))?;
                Ok(Some(ClientCertificate { chain, key: SecretString::from(key) }))
            }
            (Some(_), None) => Err(self.invalid("has a client-certificate and no client-key")),
            (None, Some(_)) => Err(self.invalid("has a client-key and no client-certificate")),
        }
    }

    /// As in client-go, a token file takes precedence over a token in the kubeconfig: other programs keep the file up to date.
    fn bearer(&self, user: &AuthInfo) -> Result<Option<Bearer>, SettingsError> {
        let file = user.token_file.as_deref().filter(|file| !file.is_empty());
        let text = user.token.as_ref().filter(|token| !token.expose_secret().is_empty());
        let token = match (file, text) {
            (Some(file), _) => Some(Bearer::Token(read_token(Path::new(file))?)),
            (None, Some(token)) => Some(Bearer::Token(token.clone())),
            (None, None) => None,
        };
        let password = user.username.clone().filter(|name| !name.is_empty());
        let password = password.map(|name| Bearer::Password(name, user.password.clone().unwrap_or_default()));
        let program =
            user.exec.clone().map(|exec| Bearer::Program(Box::new(CredentialProgram { exec, cluster: None })));
        let mut ways = [token, password, program].into_iter().flatten();
        match (ways.next(), ways.next()) {
            (way, None) => Ok(way),
            (_, Some(_)) => Err(self.invalid("has more than one of token, username and exec; keep one")),
        }
    }

    /// The content of a setting that the kubeconfig gives as a file or in base64, but not both.
    fn one_of(
        &self,
        field: &'static str,
        file: Option<&str>,
        data: Option<&str>,
    ) -> Result<Option<Vec<u8>>, SettingsError> {
        let given = |text: &&str| !text.is_empty();
        match (file.filter(given), data.filter(given)) {
            (None, None) => Ok(None),
            (Some(file), None) => read_file(Path::new(file), field).map(Some),
            (None, Some(data)) => {
                let data = decode(data).ok_or_else(|| self.invalid(format!("its {field}-data is not base64")))?;
                Ok(Some(data))
            }
            (Some(_), Some(_)) => Err(self.invalid(format!("has {field} and {field}-data; remove one of them"))),
        }
    }

    fn invalid(&self, problem: impl AsRef<str>) -> SettingsError {
        SettingsError::invalid(self.path, format!("{}: {}", self.of, problem.as_ref()))
    }
}

/// Whether an address cannot lead to another host.
fn is_loopback(server: &Url) -> bool {
    let host = server.host_str().unwrap_or_default();
    let address = host.trim_matches(['[', ']']).parse::<IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

fn decode(text: &str) -> Option<Vec<u8>> {
    let joined: String = text.split_ascii_whitespace().collect();
    let deserializer: StrDeserializer<'_, ValueError> = joined.as_str().into_deserializer();
    ByteString::deserialize(deserializer).ok().map(|bytes| bytes.0)
}
