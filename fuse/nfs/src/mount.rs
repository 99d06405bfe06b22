//! Mounting an export: where the server's services are, what the root is, and what the server takes at once.
//!
//! All of it has one budget, and leaves nothing behind when that is spent: no thread, no mount, no open connection.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use tokio::runtime::Builder;
use tokio::task::LocalSet;
use tokio::time::timeout;

use crate::error::Error;
use crate::export::{Export, How, Limits};
use crate::mountd::{self, Refusal};
use crate::portmap;
use crate::rpc::{Connection, Credential, Policy, RpcError};
use crate::server::{MAX_CONNECTIONS, Servers};
use crate::v3::{self, FileHandle, FsInfo};

/// How long a portmapper may take.
const PORTMAP_BUDGET: Duration = Duration::from_secs(5);

/// What to mount, and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// What the volume calls the server; for messages.
    pub server: String,
    /// Where the server is.
    pub address: IpAddr,
    /// The path of the export.
    pub path: Vec<u8>,
    /// The port of NFS; none asks the portmapper, and takes 2049 if there is no portmapper.
    pub port: Option<u16>,
    /// Where the mountd is, if not with the server.
    pub mount_address: Option<IpAddr>,
    /// The port of the mountd; none asks the portmapper.
    pub mount_port: Option<u16>,
    /// The port of the portmapper.
    pub portmap_port: u16,
    /// Whether connections are to come from a port below 1024 (`resvport`).
    pub reserved_port: bool,
    /// The number of connections (`nconnect`), at most [`MAX_CONNECTIONS`].
    pub connections: usize,
    /// Bytes of a READ, if not as many as can be.
    pub rsize: Option<u32>,
    /// Bytes of a WRITE, if not as many as can be.
    pub wsize: Option<u32>,
    /// How long later calls wait for the server.
    pub policy: Policy,
    /// The credential to mount with: [`Credential::root`], or AUTH_NONE (`sec=none`).
    pub credential: Credential,
    /// How long mounting may take.
    pub budget: Duration,
}

impl Options {
    /// As Linux does it where no option says otherwise, within `budget`.
    pub fn new(server: &str, address: IpAddr, path: &[u8], budget: Duration) -> Self {
        Self {
            server: server.to_owned(),
            address,
            path: path.to_vec(),
            port: None,
            mount_address: None,
            mount_port: None,
            portmap_port: portmap::PORT,
            reserved_port: true,
            connections: 1,
            rsize: None,
            wsize: None,
            policy: Policy::default(),
            credential: Credential::root(),
            budget,
        }
    }
}

/// Why an export cannot be mounted.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// This process has no room for it.
    #[error("cannot begin to mount: {0}")]
    Machine(#[source] std::io::Error),
    /// The path cannot be one.
    #[error("the path of an NFS export begins with a slash and has at most {} bytes", mountd::MAX_PATH)]
    BadPath,
    /// A service of the server is not reached.
    #[error("{service} of NFS server {server} ({address}): {reason}")]
    Unreachable {
        /// Which service.
        service: &'static str,
        /// What the volume calls the server.
        server: String,
        /// Where the service should be.
        address: SocketAddr,
        /// Why.
        reason: String,
    },
    /// The server's portmapper does not know the mountd.
    #[error("NFS server {server} has no mountd for NFSv3; it may speak only NFSv4, or name its port with `mountport`")]
    NoMountd {
        /// What the volume calls the server.
        server: String,
    },
    /// The server does not give the export.
    #[error("NFS server {server} refuses to mount {path}: {refusal}")]
    Refused {
        /// What the volume calls the server.
        server: String,
        /// The export.
        path: String,
        /// Why.
        refusal: Refusal,
    },
    /// The export wants other credentials.
    #[error(
        "{path} of NFS server {server} wants credentials of the kinds {flavors:?} (390003 and up: krb5), not {ours}"
    )]
    OtherCredentials {
        /// What the volume calls the server.
        server: String,
        /// The export.
        path: String,
        /// What it wants.
        flavors: Vec<u32>,
        /// What there is.
        ours: u32,
    },
    /// The root cannot be asked about.
    #[error("the root of {path} of NFS server {server} cannot be looked at: {error}")]
    Root {
        /// What the volume calls the server.
        server: String,
        /// The export.
        path: String,
        /// Why.
        #[source]
        error: Error,
    },
}

/// What mounting found out.
#[derive(Clone, Debug)]
pub struct Reached {
    /// Where the server's NFS service is.
    pub nfs: SocketAddr,
    /// Where its MOUNT service is.
    pub mountd: SocketAddr,
    /// The root of the export.
    pub root: FileHandle,
    /// What the server takes at once.
    pub limits: Limits,
}

/// Finds out all that is needed to serve an export, without a connection that stays. For threads that may wait.
///
/// # Errors
/// [`MountError`], within the budget.
pub fn reach(options: &Options) -> Result<Reached, MountError> {
    let runtime = Builder::new_current_thread().enable_all().build().map_err(MountError::Machine)?;
    LocalSet::new().block_on(&runtime, async {
        let (export, mountd) = find(&Servers::default(), options).await?;
        Ok(Reached { nfs: export.server().address(), mountd, root: export.root(), limits: export.limits() })
    })
}

/// Mounts an export.
///
/// # Errors
/// [`MountError`], within the budget.
pub async fn mount(servers: &Servers, options: &Options) -> Result<Export, MountError> {
    Ok(find(servers, options).await?.0)
}

/// An export, and where its mountd is.
async fn find(servers: &Servers, options: &Options) -> Result<(Export, SocketAddr), MountError> {
    if !options.path.starts_with(b"/") || options.path.len() > mountd::MAX_PATH {
        return Err(MountError::BadPath);
    }
    let mounting = Mounting { servers, options, end: Instant::now() + options.budget };
    let (root, mountd) = mounting.root().await?;
    let port = match options.port {
        Some(port) => port,
        // A host whose portmapper does not answer may still have NFS at its usual port.
        None => mounting.port_of(options.address, v3::PROGRAM).await.ok().flatten().unwrap_or(v3::PORT),
    };
    let address = SocketAddr::new(options.address, port);
    let server = servers.server(&options.server, address, options.reserved_port);
    let connections = options.connections.clamp(1, MAX_CONNECTIONS);
    let unknown = Limits { read: 4096, write: 4096, listing: 4096, file: u64::MAX };
    let export = Export::new(server.clone(), root, unknown, options.policy, connections);
    let how = How { policy: Some(mounting.policy()), ..How::new(&options.credential) };
    let info: FsInfo = export.fsinfo(how, &root).await.map_err(|error| match error {
        Error::RpcError(failure) => {
            let why = server.health().last_error;
            mounting.unreachable("NFS", address, why.filter(|_| is_silence(failure)), failure)
        }
        error => MountError::Root { server: options.server.clone(), path: options.printable_path(), error },
    })?;
    let limits = Limits::new(&info, options.rsize, options.wsize);
    Ok((Export::new(server, root, limits, options.policy, connections), mountd))
}

/// Tells the server's mountd that an export is not used any more. Nothing depends on it, so it waits `budget` at most.
pub async fn unmount(servers: &Servers, options: &Options, budget: Duration) {
    let mounting = Mounting { servers, options, end: Instant::now() + budget };
    let told = async {
        let Ok((connection, _)) = mounting.mountd().await else { return };
        let _ = mountd::unmount(&connection, &options.path, &options.credential, mounting.policy()).await;
    };
    let _ = timeout(budget, told).await;
}

impl Options {
    fn printable_path(&self) -> String {
        String::from_utf8_lossy(&self.path).into_owned()
    }
}

/// A mount in progress.
struct Mounting<'a> {
    servers: &'a Servers,
    options: &'a Options,
    end: Instant,
}

impl Mounting<'_> {
    /// For what is left of the budget.
    fn policy(&self) -> Policy {
        Policy::within(self.end.saturating_duration_since(Instant::now()))
    }

    /// The export's root, from the mountd, and where that is.
    async fn root(&self) -> Result<(FileHandle, SocketAddr), MountError> {
        let options = self.options;
        let (connection, address) = self.mountd().await?;
        let mounted = mountd::mount(&connection, &options.path, &options.credential, self.policy()).await;
        let mounted = mounted.map_err(|refusal| match refusal {
            Refusal::Rpc(failure) if !matches!(failure, RpcError::Denied(_)) => {
                let why = connection.peer().health().last_error;
                self.unreachable("the mountd", address, why.filter(|_| is_silence(failure)), failure)
            }
            refusal => MountError::Refused { server: options.server.clone(), path: options.printable_path(), refusal },
        })?;
        let ours = options.credential.flavor();
        if !mounted.flavors.is_empty() && !mounted.flavors.contains(&ours) {
            return Err(MountError::OtherCredentials {
                server: options.server.clone(),
                path: options.printable_path(),
                flavors: mounted.flavors,
                ours,
            });
        }
        Ok((mounted.root, address))
    }

    /// A connection to the mountd.
    async fn mountd(&self) -> Result<(Connection, SocketAddr), MountError> {
        let options = self.options;
        let host = options.mount_address.unwrap_or(options.address);
        let port = match options.mount_port {
            Some(port) => port,
            None => self
                .port_of(host, mountd::PROGRAM)
                .await?
                .ok_or_else(|| MountError::NoMountd { server: options.server.clone() })?,
        };
        let address = SocketAddr::new(host, port);
        Ok((self.servers.passing_connection(&options.server, address, options.reserved_port), address))
    }

    /// Asks the portmapper at `host`.
    async fn port_of(&self, host: IpAddr, program: u32) -> Result<Option<u16>, MountError> {
        let address = SocketAddr::new(host, self.options.portmap_port);
        let connection = self.servers.passing_connection(&self.options.server, address, false);
        let left = self.end.saturating_duration_since(Instant::now());
        let policy = Policy::within(left.min(PORTMAP_BUDGET));
        portmap::port_of(&connection, program, 3, policy).await.map_err(|failure| {
            let why = connection.peer().health().last_error;
            self.unreachable("the portmapper", address, why.filter(|_| is_silence(failure)), failure)
        })
    }

    fn unreachable(
        &self,
        service: &'static str,
        address: SocketAddr,
        why: Option<String>,
        failure: RpcError,
    ) -> MountError {
        let reason = why.unwrap_or_else(|| failure.to_string());
        MountError::Unreachable { service, server: self.options.server.clone(), address, reason }
    }
}

/// Whether only the connection knows why.
fn is_silence(failure: RpcError) -> bool {
    matches!(failure, RpcError::NoAnswer | RpcError::NoAnswerInTime)
}
