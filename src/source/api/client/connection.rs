//! A connection with its credentials: one set of settings, made into what requests need.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::header::HeaderValue;
use reqwest::redirect::Policy;
use reqwest::{Proxy, Url};
use secrecy::{ExposeSecret, SecretString};

use crate::source::api::exec::{self, Issued};
use crate::source::api::settings::{Access, Authority, Bearer, Certificate, Settings, SettingsError};
use crate::source::api::tls;

/// How the server sees podfs in its logs.
const USER_AGENT: &str = concat!("podfs/", env!("CARGO_PKG_VERSION"));
const CONNECT: Duration = Duration::from_secs(10);
/// How often the other end is asked whether it is there, while something is awaited from it, and for how long.
const PING: Duration = Duration::from_secs(15);
const PONG: Duration = Duration::from_secs(10);

/// What requests are made with. Nothing in it shows a secret.
pub(super) struct Connection {
    pub(super) http: reqwest::Client,
    /// The address that requests begin with.
    pub(super) server: Url,
    pub(super) authorization: Option<HeaderValue>,
    /// When a program has to be asked for other credentials.
    pub(super) expires: Option<SystemTime>,
    tls: Tls,
    issued: Option<Issued>,
    /// Whether the last request had an answer, so that the next one will find a connection.
    made: AtomicBool,
}

/// What makes a connection another one.
#[derive(PartialEq, Eq)]
struct Tls {
    server: Url,
    server_name: Option<String>,
    authority: Authority,
    proxy: Option<Url>,
    chain: Vec<u8>,
    key: Vec<u8>,
}

impl Connection {
    /// Reads the settings. Of the connection before, what is still good is kept: the TCP connection, and what a program has
    /// issued if so wished.
    pub(super) async fn open(
        access: &Access,
        before: Option<(&Connection, bool)>,
    ) -> Result<Connection, SettingsError> {
        let settings = Settings::read(access)?;
        let failed = |problem: String| match access {
            Access::Kubeconfig(path) => SettingsError::Invalid { path: path.clone(), problem },
            Access::InCluster => SettingsError::InCluster(problem),
        };
        let issued = match (&settings.user.bearer, before) {
            (Some(Bearer::Program(_)), Some((Connection { issued: Some(issued), .. }, true))) => Some(issued.clone()),
            (Some(Bearer::Program(program)), _) => Some(exec::issue(program).await.map_err(&failed)?),
            _ => None,
        };
        let of_program = issued.as_ref().and_then(|issued| issued.certificate.as_ref());
        let certificate = of_program.or(settings.user.certificate.as_ref());
        let token = issued.as_ref().and_then(|issued| issued.token.as_ref());
        let authorization = authorization(settings.user.bearer.as_ref(), token).map_err(&failed)?;
        let expires = issued.as_ref().and_then(|issued| issued.expires);
        let (chain, key) = certificate.map_or((Vec::new(), Vec::new()), |Certificate { chain, key }| {
            (chain.clone(), key.expose_secret().as_bytes().to_vec())
        });
        let Settings { server, server_name, authority, proxy, .. } = &settings;
        let tls = Tls {
            server: server.clone(),
            server_name: server_name.clone(),
            authority: authority.clone(),
            proxy: proxy.clone(),
            chain,
            key,
        };
        let (http, made) = match before {
            Some((before, _)) if before.tls == tls => (before.http.clone(), before.is_made()),
            _ => (http(&settings, certificate).map_err(&failed)?, false),
        };
        let server = address(&settings).map_err(&failed)?;
        Ok(Connection { http, server, authorization, expires, tls, issued, made: AtomicBool::new(made) })
    }

    /// Whether a request finds a connection to make use of.
    pub(super) fn is_made(&self) -> bool {
        self.made.load(Ordering::Relaxed)
    }

    /// Whether a request had an answer. Tells whether the one before had.
    pub(super) fn note(&self, answered: bool) -> bool {
        self.made.swap(answered, Ordering::Relaxed)
    }

    /// Whether the server would take podfs for the same one.
    pub(super) fn same_credentials(&self, other: &Connection) -> bool {
        self.tls == other.tls && self.authorization == other.authorization
    }
}

fn http(settings: &Settings, certificate: Option<&Certificate>) -> Result<reqwest::Client, String> {
    let mut builder = reqwest::Client::builder()
        .tls_backend_preconfigured(tls::config(&settings.authority, certificate)?)
        .https_only(true)
        .redirect(Policy::none())
        .no_proxy()
        .user_agent(USER_AGENT)
        .connect_timeout(CONNECT)
        .http2_keep_alive_interval(PING)
        .http2_keep_alive_timeout(PONG)
        .tcp_nodelay(true)
        .tcp_keepalive(PING)
        .tcp_user_timeout(PING + PONG);
    if let Some(proxy) = &settings.proxy {
        let proxy = Proxy::all(proxy.clone()).map_err(|error| format!("its proxy-url cannot be used: {error}"))?;
        builder = builder.proxy(proxy);
    }
    if settings.server_name.is_some() {
        let host = settings.server.host_str().unwrap_or_default();
        builder = builder.dns_resolver(std::sync::Arc::new(InItsPlace(host.trim_matches(['[', ']']).to_owned())));
    }
    builder.build().map_err(|error| format!("no connection can be made with it: {error}"))
}

/// Requests go by the name that the server's certificate has; connections go where the settings say.
fn address(settings: &Settings) -> Result<Url, String> {
    let mut server = settings.server.clone();
    if let Some(name) = &settings.server_name {
        let is_address = name.trim_matches(['[', ']']).parse::<std::net::IpAddr>().is_ok();
        if is_address || server.set_host(Some(name)).is_err() {
            return Err(format!("its tls-server-name {name:?} is not the name of a host"));
        }
    }
    Ok(server)
}

/// Finds this host whatever name is looked for.
struct InItsPlace(String);

impl Resolve for InItsPlace {
    fn resolve(&self, _: Name) -> Resolving {
        let host = self.0.clone();
        Box::pin(async move {
            let found: Vec<SocketAddr> = tokio::net::lookup_host((host, 0)).await?.collect();
            let addresses: Addrs = Box::new(found.into_iter());
            Ok(addresses)
        })
    }
}

fn authorization(bearer: Option<&Bearer>, issued: Option<&SecretString>) -> Result<Option<HeaderValue>, String> {
    let header = match (bearer, issued) {
        (_, Some(token)) | (Some(Bearer::Token(token)), None) => format!("Bearer {}", token.expose_secret().trim()),
        (Some(Bearer::Password(name, password)), None) => {
            format!("Basic {}", base64(format!("{name}:{}", password.expose_secret()).as_bytes()))
        }
        (Some(Bearer::Program(_)) | None, None) => return Ok(None),
    };
    let header = HeaderValue::try_from(header);
    let mut header = header.map_err(|_| "its token has characters that no token has".to_owned())?;
    header.set_sensitive(true);
    Ok(Some(header))
}

/// As Kubernetes itself spells bytes.
fn base64(bytes: &[u8]) -> String {
    match serde_json::to_value(k8s_openapi::ByteString(bytes.to_vec())) {
        Ok(serde_json::Value::String(text)) => text,
        _ => String::new(),
    }
}
