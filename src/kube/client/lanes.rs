//! Lanes: the HTTP/2 connections to one server with one identity. A server limits the concurrent requests of a connection (100
//! by default), and a watch lasts for minutes, so a pod with more objects needs another connection. Any other pod has one.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::redirect::Policy;
use reqwest::{Proxy, Url};
use secrecy::ExposeSecret;

use crate::kube::error::ConnectionError;
use crate::kube::settings::Settings;
use crate::kube::tls;
use crate::kube::tls::{Authority, Certificate};

/// The name of podfs in the server's logs.
const USER_AGENT: &str = concat!("podfs/", env!("CARGO_PKG_VERSION"));
const CONNECT: Duration = Duration::from_secs(10);
/// How often podfs pings the server during a request, and how long it waits for the answer.
const PING: Duration = Duration::from_secs(15);
const PONG: Duration = Duration::from_secs(10);
/// Most watches on a connection; the rest is for other requests.
const WATCHES: usize = 80;

/// The connections. The first is for all requests, the others only for watches.
pub(super) struct Lanes {
    party: Party,
    lanes: Mutex<Vec<Lane>>,
}

#[derive(Clone)]
struct Lane {
    http: reqwest::Client,
    watches: Arc<AtomicUsize>,
}

/// The place of a watch on a connection, until it is dropped.
pub(super) struct Room(Arc<AtomicUsize>);

impl Drop for Room {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The server and the identity of a connection: if they differ, it is another connection.
#[derive(Clone)]
pub(super) struct Party {
    pub(super) server: Url,
    server_name: Option<String>,
    authority: Authority,
    proxy: Option<Url>,
    certificate: Option<Certificate>,
}

impl Party {
    pub(super) fn new(settings: Settings, certificate: Option<Certificate>) -> Party {
        let Settings { server, server_name, authority, proxy, .. } = settings;
        Party { server, server_name, authority, proxy, certificate }
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

    fn http(&self) -> Result<reqwest::Client, ConnectionError> {
        let mut builder = reqwest::Client::builder()
            .tls_backend_preconfigured(tls::config(&self.authority, self.certificate.as_ref())?)
            .https_only(self.server.scheme() == "https")
            .redirect(Policy::none())
            .no_proxy()
            .user_agent(USER_AGENT)
            .connect_timeout(CONNECT)
            .http2_keep_alive_interval(PING)
            .http2_keep_alive_timeout(PONG)
            .tcp_nodelay(true)
            .tcp_keepalive(PING)
            .tcp_user_timeout(PING + PONG);
        if let Some(proxy) = &self.proxy {
            let proxy = Proxy::all(proxy.clone()).map_err(ConnectionError::Proxy)?;
            builder = builder.proxy(proxy);
        }
        if self.server_name.is_some() {
            let host = self.server.host_str().unwrap_or_default();
            builder = builder.dns_resolver(Arc::new(InItsPlace(host.trim_matches(['[', ']']).to_owned())));
        }
        builder.build().map_err(ConnectionError::Http)
    }
}

impl PartialEq for Party {
    fn eq(&self, other: &Party) -> bool {
        let certificate = |party: &Party| {
            let certificate = party.certificate.as_ref();
            certificate.map(|it| (it.chain.clone(), it.key.expose_secret().to_owned()))
        };
        (&self.server, &self.server_name, &self.authority, &self.proxy)
            == (&other.server, &other.server_name, &other.authority, &other.proxy)
            && certificate(self) == certificate(other)
    }
}

impl Lanes {
    /// Without any connection yet.
    ///
    /// # Errors
    /// When the certificates cannot be used.
    pub(super) fn new(party: Party) -> Result<Lanes, ConnectionError> {
        let first = Lane { http: party.http()?, watches: Arc::default() };
        Ok(Lanes { party, lanes: Mutex::new(vec![first]) })
    }

    pub(super) fn are_of(&self, party: &Party) -> bool {
        self.party == *party
    }

    /// The connection for a request that ends soon.
    pub(super) fn first(&self) -> reqwest::Client {
        self.lock()[0].http.clone()
    }

    /// A connection for a watch, with a place on it.
    pub(super) fn for_watch(&self) -> (reqwest::Client, Room) {
        let mut lanes = self.lock();
        let free = lanes.iter().find(|lane| lane.watches.load(Ordering::Relaxed) < WATCHES).cloned();
        let lane = free.unwrap_or_else(|| {
            // The settings worked for the first connection.
            let http = self.party.http().unwrap_or_else(|_| lanes[0].http.clone());
            let lane = Lane { http, watches: Arc::default() };
            lanes.push(lane.clone());
            lane
        });
        lane.watches.fetch_add(1, Ordering::Relaxed);
        (lane.http, Room(lane.watches))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Lane>> {
        self.lanes.lock().expect("no code panics while lanes are locked")
    }
}

/// Resolves every name to this host.
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
