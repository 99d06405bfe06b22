//! Mounting an export: the ports of the server's services, the root's handle, and the largest READ and WRITE of the server.
//!
//! All calls together have one time limit. After it, no thread, mount or open connection remains.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use tokio::runtime::Builder;
use tokio::task::LocalSet;
use tokio::time::timeout;

use crate::address::ExportAddress;
use crate::error::Error;
use crate::export::{CallOptions, Export, Limits};
use crate::mountd::{self, MountdError};
use crate::portmap;
use crate::rpc::{Credential, Policy, RpcConnection, RpcError};
use crate::server::{MAX_CONNECTIONS, Servers};
use crate::squash::takes_all_for_one;
use crate::v3::{self, Attributes, FsInfo, NfsFileHandle};

/// The most time for one call to a portmapper.
const PORTMAP_BUDGET: Duration = Duration::from_secs(5);

/// The export to mount, and the options.
#[derive(Clone, Debug)]
pub struct MountRequest {
    /// The export, as the volume names it.
    pub export: ExportAddress,
    /// The IP address of the server.
    pub address: IpAddr,
    /// The port of NFS. Without it, podfs asks the portmapper, and uses 2049 if the portmapper does not know the port.
    pub port: Option<u16>,
    /// The IP address of the mountd, if it is not the server's.
    pub mount_address: Option<IpAddr>,
    /// The port of the mountd. Without it, podfs asks the portmapper.
    pub mount_port: Option<u16>,
    /// The port of the portmapper.
    pub portmap_port: u16,
    /// Whether connections come from a port below 1024 (`resvport`).
    pub reserved_port: bool,
    /// The number of connections (`nconnect`), at most [`MAX_CONNECTIONS`].
    pub connections: usize,
    /// Most bytes of a READ; without it, the limit of the server.
    pub rsize: Option<u32>,
    /// Most bytes of a WRITE; without it, the limit of the server.
    pub wsize: Option<u32>,
    /// The timeout and retries of later calls.
    pub policy: Policy,
    /// The credential to mount with: [`Credential::root`], or AUTH_NONE (`sec=none`).
    pub credential: Credential,
    /// The most time for mounting.
    pub budget: Duration,
}

impl MountRequest {
    /// A request with the defaults of Linux, and with this budget.
    pub fn new(export: ExportAddress, address: IpAddr, budget: Duration) -> Self {
        Self {
            export,
            address,
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
pub enum NfsMountError {
    /// This process cannot make the runtime for the calls.
    #[error("cannot begin to mount: {0}")]
    Machine(#[source] std::io::Error),
    /// The path cannot be the path of an export.
    #[error("the path of an NFS export begins with a slash and has at most {} bytes", mountd::MAX_PATH)]
    BadPath,
    /// podfs does not reach a service of the server.
    #[error("{service} of NFS server {server} ({address}): {reason}")]
    Unreachable {
        /// The name of the service.
        service: &'static str,
        /// The volume's name for the server.
        server: String,
        /// The address at which podfs looked for the service.
        address: SocketAddr,
        /// The reason.
        reason: String,
    },
    /// The server's portmapper does not know the mountd.
    #[error(
        "NFS server {server} has no mountd for NFSv3; if it speaks only NFSv4, set `nfsvers=4`; otherwise name the port of its mountd with `mountport`"
    )]
    NoMountd {
        /// The volume's name for the server.
        server: String,
    },
    /// The server refuses to mount the export.
    #[error("NFS server {} refuses to mount {}: {refusal}", export.server, export.path)]
    Refused {
        /// The export.
        export: ExportAddress,
        /// The reason.
        refusal: MountdError,
    },
    /// The export requires other credentials.
    #[error(
        "{} of NFS server {} wants credentials of the kinds {flavors:?} (390003 and up: krb5), not {ours}",
        export.path,
        export.server
    )]
    OtherCredentials {
        /// The export.
        export: ExportAddress,
        /// The flavours that the server accepts.
        flavors: Vec<u32>,
        /// The flavour of this client.
        ours: u32,
    },
    /// The server does not return the attributes of the root.
    #[error("podfs cannot read the attributes of the root of {} of NFS server {}: {error}", export.path, export.server)]
    Root {
        /// The export.
        export: ExportAddress,
        /// The reason.
        #[source]
        error: Error,
    },
}

/// The result of mounting.
#[derive(Clone, Debug)]
pub struct MountedExport {
    /// The address of the server's NFS service.
    pub nfs: SocketAddr,
    /// The address of its MOUNT service.
    pub mountd: SocketAddr,
    /// The root of the export.
    pub root: NfsFileHandle,
    /// The attributes of the root.
    pub attributes: Attributes,
    /// The largest READ and WRITE of the server.
    pub limits: Limits,
    /// The server takes all users for one.
    pub one_user: bool,
}

/// Finds the addresses, the root and the limits that serving an export needs, and keeps no connection. Blocks the thread.
///
/// # Errors
/// [`NfsMountError`], within the budget.
pub fn reach(request: &MountRequest) -> Result<MountedExport, NfsMountError> {
    let runtime = Builder::new_current_thread().enable_all().build().map_err(NfsMountError::Machine)?;
    LocalSet::new().block_on(&runtime, async {
        let (export, mountd, attributes) = find(&Servers::default(), request).await?;
        let (nfs, root, limits) = (export.server().address(), export.root(), export.limits());
        let one_user = takes_all_for_one(&export, &attributes).await;
        Ok(MountedExport { nfs, mountd, root, attributes, limits, one_user })
    })
}

/// Mounts an export.
///
/// # Errors
/// [`NfsMountError`], within the budget.
pub async fn mount(servers: &Servers, request: &MountRequest) -> Result<Export, NfsMountError> {
    Ok(find(servers, request).await?.0)
}

/// Finds an export, the address of its mountd, and the attributes of its root.
async fn find(servers: &Servers, request: &MountRequest) -> Result<(Export, SocketAddr, Attributes), NfsMountError> {
    if !request.export.path.starts_with('/') || request.export.path.len() > mountd::MAX_PATH {
        return Err(NfsMountError::BadPath);
    }
    let mounting = MountAttempt { servers, request, end: Instant::now() + request.budget };
    let (root, mountd) = mounting.root().await?;
    let port = match request.port {
        Some(port) => port,
        // A host whose portmapper does not answer may still have NFS at its usual port.
        None => mounting.port_of(request.address, v3::PROGRAM).await.ok().flatten().unwrap_or(v3::PORT),
    };
    let address = SocketAddr::new(request.address, port);
    let server = servers.server(&request.export.server, address, request.reserved_port);
    let connections = request.connections.clamp(1, MAX_CONNECTIONS);
    let before_fsinfo = Limits { read: 4096, write: 4096, listing: 4096, file: u64::MAX };
    let export = Export::new(server.clone(), root, before_fsinfo, request.policy, connections);
    let options = CallOptions { policy: Some(mounting.policy()), ..CallOptions::new(&request.credential) };
    let failed = |error| match error {
        Error::RpcError(failure) => {
            let last_error = server.health().last_error;
            mounting.unreachable("NFS", address, last_error.filter(|_| is_silence(failure)), failure)
        }
        error => NfsMountError::Root { export: request.export.clone(), error },
    };
    let info: FsInfo = export.fsinfo(options, &root).await.map_err(failed)?;
    let attributes = match info.attributes {
        Some(attributes) => attributes,
        None => {
            let options = CallOptions { policy: Some(mounting.policy()), ..options };
            export.getattr(options, &root).await.map_err(failed)?
        }
    };
    let limits = Limits::new(&info, request.rsize, request.wsize);
    Ok((Export::new(server, root, limits, request.policy, connections), mountd, attributes))
}

/// Reports to the server's mountd that an export is not used any more. Waits at most `budget`, because nothing depends on the
/// report.
pub async fn unmount(servers: &Servers, request: &MountRequest, budget: Duration) {
    let mounting = MountAttempt { servers, request, end: Instant::now() + budget };
    let report = async {
        let Ok((connection, _)) = mounting.mountd().await else { return };
        let _ =
            mountd::unmount(&connection, request.export.path.as_bytes(), &request.credential, mounting.policy()).await;
    };
    let _ = timeout(budget, report).await;
}

/// A mount in progress.
struct MountAttempt<'a> {
    servers: &'a Servers,
    request: &'a MountRequest,
    end: Instant,
}

impl MountAttempt<'_> {
    /// Returns the policy of a call that may take what remains of the budget.
    fn policy(&self) -> Policy {
        Policy::within(self.end.saturating_duration_since(Instant::now()))
    }

    /// The root that the mountd returns for the export, and the mountd's address.
    async fn root(&self) -> Result<(NfsFileHandle, SocketAddr), NfsMountError> {
        let request = self.request;
        let (connection, address) = self.mountd().await?;
        let mounted =
            mountd::mount(&connection, request.export.path.as_bytes(), &request.credential, self.policy()).await;
        let mounted = mounted.map_err(|refusal| match refusal {
            MountdError::Rpc(failure) if !matches!(failure, RpcError::Denied(_)) => {
                let last_error = connection.peer().health().last_error;
                self.unreachable("the mountd", address, last_error.filter(|_| is_silence(failure)), failure)
            }
            refusal => NfsMountError::Refused { export: request.export.clone(), refusal },
        })?;
        let ours = request.credential.flavor();
        if !mounted.flavors.is_empty() && !mounted.flavors.contains(&ours) {
            return Err(NfsMountError::OtherCredentials {
                export: request.export.clone(),
                flavors: mounted.flavors,
                ours,
            });
        }
        Ok((mounted.root, address))
    }

    /// A connection to the mountd, and the mountd's address.
    async fn mountd(&self) -> Result<(RpcConnection, SocketAddr), NfsMountError> {
        let request = self.request;
        let host = request.mount_address.unwrap_or(request.address);
        let port = match request.mount_port {
            Some(port) => port,
            None => self
                .port_of(host, mountd::PROGRAM)
                .await?
                .ok_or_else(|| NfsMountError::NoMountd { server: request.export.server.clone() })?,
        };
        let address = SocketAddr::new(host, port);
        Ok((self.servers.passing_connection(&request.export.server, address, request.reserved_port), address))
    }

    /// Asks the portmapper at `host` for the port of a program.
    async fn port_of(&self, host: IpAddr, program: u32) -> Result<Option<u16>, NfsMountError> {
        let address = SocketAddr::new(host, self.request.portmap_port);
        let connection = self.servers.passing_connection(&self.request.export.server, address, false);
        let remaining = self.end.saturating_duration_since(Instant::now());
        let policy = Policy::within(remaining.min(PORTMAP_BUDGET));
        portmap::port_of(&connection, program, 3, policy).await.map_err(|failure| {
            let last_error = connection.peer().health().last_error;
            self.unreachable("the portmapper", address, last_error.filter(|_| is_silence(failure)), failure)
        })
    }

    fn unreachable(
        &self,
        service: &'static str,
        address: SocketAddr,
        last_error: Option<String>,
        failure: RpcError,
    ) -> NfsMountError {
        let reason = last_error.unwrap_or_else(|| failure.to_string());
        NfsMountError::Unreachable { service, server: self.request.export.server.clone(), address, reason }
    }
}

/// Whether the failure is only a missing answer. Then the last error of the connection may be the reason.
fn is_silence(failure: RpcError) -> bool {
    matches!(failure, RpcError::NoAnswer | RpcError::NoAnswerInTime)
}
