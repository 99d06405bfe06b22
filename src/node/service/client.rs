//! The client of the daemon of a run directory, for commands.

use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Status, Streaming};
use tower::service_fn;

use super::convert;
use super::proto::volume_manager_client::VolumeManagerClient;
use super::proto::*;
use super::socket::{SOCKET, is_absent};
use crate::node::NodeState;
use crate::supervisor::control::{connect, peer_user};

/// How many bytes an answer may have: more than the state of any node takes.
const LONGEST_ANSWER: usize = 256 << 20;
/// How long a daemon may take for an answer that waits for nothing, and the connection to it.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// The pauses between the pings to a daemon whose answer may take long. It answers a ping within [`ANSWER_TIMEOUT`], unless
/// it hangs.
const PING_INTERVAL: Duration = Duration::from_secs(10);

/// Why a request to the daemon failed.
#[derive(Debug, thiserror::Error)]
pub enum DaemonClientError {
    /// No daemon listens.
    #[error("podfs node does not run here: {} does not answer; start it, for instance by: systemctl start podfs-node", .0.display())]
    Absent(PathBuf),
    /// The daemon has ended, or is about to.
    #[error("podfs node at {} has ended before it answered; ask again when it has started", .0.display())]
    Ends(PathBuf),
    /// The daemon listens, and does not answer.
    #[error("podfs node at {} has not answered for {} s: it hangs, or its process is stopped; see systemctl status podfs-node", .0.display(), ANSWER_TIMEOUT.as_secs())]
    Silent(PathBuf),
    /// The daemon answers only root.
    #[error("podfs node answers only root; run this as root")]
    NotRoot,
    /// The socket belongs to another user's process.
    #[error("{} is served by a process of uid {uid}, not by root's podfs node; remove it", .path.display())]
    OtherUser {
        /// The socket.
        path: PathBuf,
        /// The user.
        uid: u32,
    },
    /// The daemon cannot be asked.
    #[error("cannot ask podfs node at {}: {cause}", .path.display())]
    Failed {
        /// The socket.
        path: PathBuf,
        /// Why.
        #[source]
        cause: AskFailure,
    },
    /// The text in the request cannot be the name of a pod.
    #[error("{0}")]
    NoPod(String),
    /// The daemon refuses the request.
    #[error("{0}")]
    Refused(String),
}

/// Why a daemon that listens cannot be asked.
#[derive(Debug, thiserror::Error)]
pub enum AskFailure {
    /// The socket cannot be used.
    #[error(transparent)]
    Socket(#[from] io::Error),
    /// The connection fails.
    #[error("{}", sentence(.0))]
    Connection(#[from] tonic::transport::Error),
    /// The daemon does not know the request.
    #[error("it is of another version and does not know the question; use the podfs of that version")]
    OtherVersion,
    /// The daemon, or this side of the connection, reports an error.
    #[error("{}", sentence(.0.as_ref()))]
    Status(#[source] Box<Status>),
}

/// A connection to the daemon of a run directory.
#[derive(Debug)]
pub struct DaemonClient {
    path: PathBuf,
    service: VolumeManagerClient<Channel>,
}

impl DaemonClient {
    /// Connects to the daemon of this run directory.
    ///
    /// # Errors
    /// When no daemon listens, and when this user may not connect to it.
    pub async fn connect(run_directory: &Path) -> Result<DaemonClient, DaemonClientError> {
        let path = run_directory.join(SOCKET);
        if !rustix::process::geteuid().is_root() {
            return Err(DaemonClientError::NotRoot);
        }
        let stream = match connect(run_directory, SOCKET) {
            Err(error) if is_absent(&error) => return Err(DaemonClientError::Absent(path)),
            Err(error) => return Err(DaemonClientError::Failed { path, cause: error.into() }),
            Ok(stream) => stream,
        };
        if let Some(uid) = peer_user(&stream).filter(|uid| *uid != 0 && *uid != rustix::process::geteuid().as_raw()) {
            return Err(DaemonClientError::OtherUser { path, uid });
        }
        let failed = |cause: AskFailure| DaemonClientError::Failed { path: path.clone(), cause };
        let adopted = stream.set_nonblocking(true).and_then(|()| UnixStream::from_std(stream));
        let mut stream = Some(adopted.map_err(|error| failed(error.into()))?);
        // The client does not connect again: it sends one request.
        let connector = service_fn(move |_: Uri| {
            let stream = stream.take().map(TokioIo::new);
            async move { stream.ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected)) }
        });
        let endpoint = Endpoint::from_static("http://podfs.node").connect_timeout(ANSWER_TIMEOUT);
        let endpoint = endpoint.http2_keep_alive_interval(PING_INTERVAL).keep_alive_timeout(ANSWER_TIMEOUT);
        let connected = endpoint.connect_with_connector(connector).await;
        let channel = connected.map_err(|error| failed(error.into()))?;
        let service = VolumeManagerClient::new(channel).max_decoding_message_size(LONGEST_ANSWER);
        Ok(DaemonClient { path, service })
    }

    /// Waits until the pod's volumes are mounted.
    ///
    /// # Errors
    /// When they are not mounted in time.
    pub async fn wait_for_volumes(&mut self, pod: String, timeout: Option<u32>) -> Result<(), DaemonClientError> {
        let answer = self.service.wait_for_volumes(WaitForVolumesRequest { pod, timeout_seconds: timeout }).await;
        self.received(answer).map(drop)
    }

    /// Waits until none of the pod's volumes is mounted.
    ///
    /// # Errors
    /// When one is still mounted after that time.
    pub async fn wait_for_unmount(&mut self, pod: String, timeout: Option<u32>) -> Result<(), DaemonClientError> {
        let answer = self.service.wait_for_unmount(WaitForUnmountRequest { pod, timeout_seconds: timeout }).await;
        self.received(answer).map(drop)
    }

    /// The pod's volumes that are mounted.
    ///
    /// # Errors
    /// When the node does not have the pod.
    pub async fn mounted_volumes(&mut self, pod: String) -> Result<Vec<MountedVolume>, DaemonClientError> {
        let answer = at_once(&self.path, self.service.get_mounted_volumes(GetMountedVolumesRequest { pod })).await?;
        Ok(self.received(answer)?.volumes)
    }

    /// Asks for a refresh of the pod's volumes.
    ///
    /// # Errors
    /// When the node does not have the pod.
    pub async fn mark_remount_required(&mut self, pod: String) -> Result<(), DaemonClientError> {
        let answer =
            at_once(&self.path, self.service.mark_remount_required(MarkRemountRequiredRequest { pod })).await?;
        self.received(answer).map(drop)
    }

    /// Releases the pod's volumes.
    ///
    /// # Errors
    /// When the pod should run, or the node does not have it.
    pub async fn release(&mut self, pod: String) -> Result<(), DaemonClientError> {
        let answer = self.service.release(ReleaseRequest { pod }).await;
        self.received(answer).map(drop)
    }

    /// The mounts of a container of the pod that is about to start.
    ///
    /// # Errors
    /// When it cannot be mounted, or not yet.
    pub async fn prepare_container(
        &mut self,
        request: PrepareContainerRequest,
    ) -> Result<Vec<ContainerMount>, DaemonClientError> {
        let answer = self.service.prepare_container(request).await;
        Ok(self.received(answer)?.mounts)
    }

    /// Removes what was made for a container of the pod, or, if `container` is `None`, for all of its containers.
    ///
    /// # Errors
    /// When something is still in use.
    pub async fn release_container(&mut self, pod: String, container: Option<String>) -> Result<(), DaemonClientError> {
        let answer = self.service.release_container(ReleaseContainerRequest { pod, container }).await;
        self.received(answer).map(drop)
    }

    /// The state of the node.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn state(&mut self) -> Result<NodeState, DaemonClientError> {
        let answer = at_once(&self.path, self.service.get_state(GetStateRequest {})).await?;
        Ok(convert::state(self.received(answer)?))
    }

    /// A stream of later changes.
    ///
    /// # Errors
    /// When the daemon does not answer.
    pub async fn watch(&mut self, pod: String) -> Result<Streaming<WatchResponse>, DaemonClientError> {
        let answer = at_once(&self.path, self.service.watch(WatchRequest { pod })).await?;
        self.received(answer)
    }

    fn received<T>(&self, answer: Result<tonic::Response<T>, Status>) -> Result<T, DaemonClientError> {
        let failed = |cause| DaemonClientError::Failed { path: self.path.clone(), cause };
        answer.map(tonic::Response::into_inner).map_err(|status| match status.code() {
            Code::InvalidArgument => DaemonClientError::NoPod(status.message().to_owned()),
            Code::NotFound | Code::DeadlineExceeded | Code::FailedPrecondition => {
                DaemonClientError::Refused(status.message().to_owned())
            }
            Code::Unimplemented => failed(AskFailure::OtherVersion),
            Code::Unavailable if is_unanswered_ping(&status) => DaemonClientError::Silent(self.path.clone()),
            // From the daemon, or from this side of a broken connection.
            Code::Unavailable => DaemonClientError::Ends(self.path.clone()),
            _ => failed(AskFailure::Status(Box::new(status))),
        })
    }
}

/// The answer to a request that waits for nothing.
async fn at_once<T>(
    path: &Path,
    request: impl Future<Output = Result<T, Status>>,
) -> Result<Result<T, Status>, DaemonClientError> {
    timeout(ANSWER_TIMEOUT, request).await.map_err(|_| DaemonClientError::Silent(path.to_owned()))
}

/// Whether the daemon has not answered a ping in time.
fn is_unanswered_ping(status: &Status) -> bool {
    let mut cause = status.source();
    while let Some(error) = cause {
        if error.downcast_ref::<hyper::Error>().is_some_and(hyper::Error::is_timeout) {
            return true;
        }
        cause = error.source();
    }
    false
}

/// The innermost cause, which is the most specific.
fn sentence(error: &dyn Error) -> String {
    let mut innermost = error;
    while let Some(cause) = innermost.source() {
        innermost = cause;
    }
    innermost.to_string()
}
