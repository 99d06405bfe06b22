//! The HTTP/2 connections to one server with one identity. A server limits the concurrent requests of a connection (100
//! by default), and a watch lasts for minutes, so a pod with more objects needs another connection. For any other pod, one
//! suffices.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::redirect::Policy;
use reqwest::{Proxy, Url};
use rustls::ClientConfig;
use secrecy::ExposeSecret;

use crate::kube::error::ConnectionError;
use crate::kube::settings::ClientSettings;
use crate::kube::tls;
use crate::kube::tls::{Authority, ClientCertificate};

/// The name of podfs in the server's logs.
const USER_AGENT: &str = concat!("podfs/", env!("CARGO_PKG_VERSION"));
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How often podfs pings the server during a request, and how long it waits for the answer.
const PING_INTERVAL: Duration = Duration::from_secs(15);
const PING_TIMEOUT: Duration = Duration::from_secs(10);
/// Most watches on a connection, so that the server also accepts other requests on it.
const WATCHES: usize = 80;

/// The connections. The first is for all requests, the others only for watches.
pub(super) struct ConnectionPool {
    identity: ConnectionIdentity,
    /// The TLS settings of all connections. To make them may read files of this machine, to clone them does not.
    tls: ClientConfig,
    connections: Mutex<Vec<PooledConnection>>,
}

#[derive(Clone)]
struct PooledConnection {
    http: reqwest::Client,
    watches: Arc<AtomicUsize>,
}

/// The place of a watch on a connection, until it is dropped.
pub(super) struct WatchSlot(Arc<AtomicUsize>);

impl Drop for WatchSlot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The server and podfs's identity for it. Each pair has its own connections.
#[derive(Clone)]
pub(super) struct ConnectionIdentity {
    pub(super) server: Url,
    server_name: Option<String>,
    authority: Authority,
    proxy: Option<Url>,
    certificate: Option<ClientCertificate>,
}

impl ConnectionIdentity {
    pub(super) fn new(settings: ClientSettings, certificate: Option<ClientCertificate>) -> ConnectionIdentity {
        let ClientSettings { server, server_name, authority, proxy, .. } = settings;
        ConnectionIdentity { server, server_name, authority, proxy, certificate }
    }

    /// The URL of requests has the name in the server's certificate; connections go to the address in the settings.
    pub(super) fn address(&self) -> Result<Url, ConnectionError> {
        let mut server = self.server.clone();
        if let Some(name) = &self.server_name {
            let is_address = name.trim_matches(['[', ']']).parse::<std::net::IpAddr>().is_ok();
            if is_address || server.set_host(Some(name)).is_err() {
                return Err(ConnectionError::ServerName(name.clone()));
            }
        }
        Ok(server)
    }

    fn http(&self, tls: ClientConfig) -> Result<reqwest::Client, ConnectionError> {
        let mut builder = reqwest::Client::builder()
            .tls_backend_preconfigured(tls)
            .https_only(self.server.scheme() == "https")
            .redirect(Policy::none())
            .no_proxy()
            .user_agent(USER_AGENT)
            .connect_timeout(CONNECT_TIMEOUT)
            .http2_keep_alive_interval(PING_INTERVAL)
            .http2_keep_alive_timeout(PING_TIMEOUT)
            .tcp_nodelay(true)
            .tcp_keepalive(PING_INTERVAL)
            .tcp_user_timeout(PING_INTERVAL + PING_TIMEOUT);
        if let Some(proxy) = &self.proxy {
            let proxy = Proxy::all(proxy.clone()).map_err(ConnectionError::Proxy)?;
            builder = builder.proxy(proxy);
        }
        if self.server_name.is_some() {
            let host = self.server.host_str().unwrap_or_default();
            builder = builder.dns_resolver(Arc::new(FixedHostResolver(host.trim_matches(['[', ']']).to_owned())));
        }
        builder.build().map_err(ConnectionError::Http)
    }
}

impl PartialEq for ConnectionIdentity {
    fn eq(&self, other: &ConnectionIdentity) -> bool {
        let certificate = |identity: &ConnectionIdentity| {
            let certificate = identity.certificate.as_ref();
            certificate.map(|it| (it.chain.clone(), it.key.expose_secret().to_owned()))
        };
        (&self.server, &self.server_name, &self.authority, &self.proxy)
            == (&other.server, &other.server_name, &other.authority, &other.proxy)
            && certificate(self) == certificate(other)
    }
}

impl ConnectionPool {
    /// Without any connection yet. Reads the certificates that this machine trusts, if the server has one of these.
    ///
    /// # Errors
    /// When the certificates cannot be used.
    pub(super) fn new(identity: ConnectionIdentity) -> Result<ConnectionPool, ConnectionError> {
        let tls = tls::config(&identity.authority, identity.certificate.as_ref())?;
        let first = PooledConnection { http: identity.http(tls.clone())?, watches: Arc::default() };
        Ok(ConnectionPool { identity, tls, connections: Mutex::new(vec![first]) })
    }

    pub(super) fn are_of(&self, identity: &ConnectionIdentity) -> bool {
        self.identity == *identity
    }

    /// The connection for a request that ends soon.
    pub(super) fn first(&self) -> reqwest::Client {
        self.lock()[0].http.clone()
    }

    /// A connection for a watch, with a place on it.
    pub(super) fn for_watch(&self) -> (reqwest::Client, WatchSlot) {
        let mut connections = self.lock();
        let free = connections.iter().find(|connection| connection.watches.load(Ordering::Relaxed) < WATCHES).cloned();
        let connection = free.unwrap_or_else(|| {
            // This cannot fail: the settings worked for the first connection.
            let http = self.identity.http(self.tls.clone()).unwrap_or_else(|_| connections[0].http.clone());
            let connection = PooledConnection { http, watches: Arc::default() };
            connections.push(connection.clone());
            connection
        });
        connection.watches.fetch_add(1, Ordering::Relaxed);
        (connection.http, WatchSlot(connection.watches))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<PooledConnection>> {
        self.connections.lock().expect("no code panics while the connections are locked")
    }
}

/// Resolves every name to this host.
struct FixedHostResolver(String);

impl Resolve for FixedHostResolver {
    fn resolve(&self, _: Name) -> Resolving {
        let host = self.0.clone();
        Box::pin(async move {
            let found: Vec<SocketAddr> = tokio::net::lookup_host((host, 0)).await?.collect();
            let addresses: Addrs = Box::new(found.into_iter());
            Ok(addresses)
        })
    }
}
