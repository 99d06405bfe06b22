//! The sockets for the kubelet: the driver's socket, for its calls, and the registration socket in its `plugins_registry`, at
//! which it asks for the path of the driver's socket.
//!
//! A kubelet calls the registration socket with the percent-encoded path as `:authority`, which HTTP libraries refuse. With an `@`
//! in the name of the socket, the path is the userinfo of an authority, which may be encoded. Nothing else of the name matters.
//!
//! The sockets stay when the daemon ends: without them, the kubelet would unregister the driver while its volumes are mounted. The
//! next daemon replaces them, which makes the kubelet register the driver again.

use std::fs::DirBuilder;
use std::io::{self, ErrorKind};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use nix::sys::socket::{Backlog, listen};
use tonic::transport::Server;
use tonic::{Request, Response, Status};
use tracing::{info, warn};

use super::CsiSettings;
use super::target::{KubeletRoot, NoKubelet};
use crate::csi::registration::registration_server::{Registration, RegistrationServer};
use crate::csi::registration::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use crate::node::publication::DRIVER;
use crate::node::service::clients;
use crate::supervisor::run_dir::socket;

/// The directory below the kubelet's directory in which it looks for registration sockets.
const REGISTRY: &str = "plugins_registry";
/// The name of podfs's registration socket in it.
const NAME: &str = "podfs.io@reg.sock";

/// Why the driver cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum CsiError {
    /// The directory does not belong to a kubelet.
    #[error(transparent)]
    KubeletRoot(NoKubelet),
    /// Another process listens on the socket.
    #[error("another process serves the CSI driver at {}; two podfs on one node cannot both be {DRIVER}: stop that one first", .0.display())]
    InUse(PathBuf),
    /// A socket or a file cannot be used.
    #[error("cannot use {}: {cause}", .path.display())]
    File {
        /// The path.
        path: PathBuf,
        /// The error of the system call.
        #[source]
        cause: io::Error,
    },
    /// The services cannot be served.
    #[error("cannot serve the kubelet: {0}")]
    Service(#[source] io::Error),
    /// A connection of the kubelet cannot be served.
    #[error("cannot serve the kubelet: {0}")]
    Connection(#[source] tonic::transport::Error),
}

/// The sockets, on which podfs listens already.
#[derive(Debug)]
pub struct CsiSockets {
    pub(super) driver: UnixListener,
    pub(super) registration: Option<UnixListener>,
    pub(super) endpoint: PathBuf,
    pub(super) root: KubeletRoot,
}

impl CsiSockets {
    /// Listens for the kubelet. If podfs does not see its `plugins_registry`, a node-driver-registrar has to register podfs.
    ///
    /// # Errors
    /// When the kubelet's directory is not valid, another process listens, or a socket cannot be made.
    pub fn open(settings: &CsiSettings) -> Result<CsiSockets, CsiError> {
        let root = KubeletRoot::open(&settings.kubelet_root).map_err(CsiError::KubeletRoot)?;
        let endpoint = std::path::absolute(&settings.socket)
            .map_err(|cause| CsiError::File { path: settings.socket.clone(), cause })?;
        let driver = open(&endpoint)?;
        let registry = root.path().join(REGISTRY);
        let registration = match registry.is_dir() {
            true => Some(open(&registry.join(NAME))?),
            false => {
                info!("there is no {}; a node-driver-registrar has to register podfs", registry.display());
                None
            }
        };
        Ok(CsiSockets { driver, registration, endpoint, root })
    }
}

/// Makes a socket for root alone. Replaces a socket on which no process listens any more.
fn open(path: &Path) -> Result<UnixListener, CsiError> {
    let failed = |cause| CsiError::File { path: path.to_owned(), cause };
    let (Some(directory), Some(name)) = (path.parent(), path.file_name().and_then(|name| name.to_str())) else {
        return Err(failed(io::Error::from(ErrorKind::InvalidInput)));
    };
    DirBuilder::new().recursive(true).mode(0o755).create(directory).map_err(failed)?;
    let probe = socket::stream().map_err(failed)?;
    if socket::connect_to(&probe, directory, name).is_ok() {
        return Err(CsiError::InUse(path.to_owned()));
    }
    let listening = || {
        let made = socket::make(directory, name)?;
        listen(&made, Backlog::MAXALLOWABLE)?;
        let listener = UnixListener::from(made);
        listener.set_nonblocking(true)?;
        Ok(listener)
    };
    listening().map_err(failed)
}

/// Answers the kubelet's calls at the registration socket, until the future is dropped.
pub(super) async fn register(listener: UnixListener, endpoint: &Path) -> Result<(), CsiError> {
    let clients = clients(listener).map_err(CsiError::Service)?;
    let service = RegistrationServer::new(RegistrationAnswers { endpoint: endpoint.to_string_lossy().into_owned() });
    let served = Server::builder().add_service(service).serve_with_incoming(clients).await;
    served.map_err(CsiError::Connection)
}

struct RegistrationAnswers {
    endpoint: String,
}

#[tonic::async_trait]
impl Registration for RegistrationAnswers {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: "CSIPlugin".to_owned(),
            name: DRIVER.to_owned(),
            endpoint: self.endpoint.clone(),
            supported_versions: vec!["1.0.0".to_owned()],
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        match request.into_inner() {
            RegistrationStatus { plugin_registered: true, .. } => info!("the kubelet has registered {DRIVER}"),
            RegistrationStatus { error, .. } => {
                warn!("the kubelet does not register {DRIVER}: {error}; it asks again when podfs node starts again");
            }
        }
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}
