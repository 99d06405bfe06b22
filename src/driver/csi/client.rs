//! Calls the node service of a CSI driver, one call at a time, with a time limit.
//!
//! The thread of a volume makes the call and waits for the answer. The answer is final, unless its code says that the
//! driver may still execute the call or that a retry may succeed. Such an answer, and a missing answer, are
//! [uncertain](DriverError::is_uncertain).

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::runtime::Runtime;
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Response, Status};
use tower::service_fn;

use crate::csi::v1::node_client::NodeClient;
use crate::csi::v1::node_service_capability::rpc::Type;
use crate::csi::v1::node_service_capability::{Rpc, Type as Kind};
use crate::csi::v1::{
    NodeExpandVolumeRequest, NodeGetCapabilitiesRequest, NodeGetVolumeStatsRequest, NodeGetVolumeStatsResponse,
    NodePublishVolumeRequest, NodeStageVolumeRequest, NodeUnpublishVolumeRequest, NodeUnstageVolumeRequest,
};
use crate::driver::{DriverError, quoted};

/// Longest duration of a call, as in the kubelet.
pub(super) const DEADLINE: Duration = Duration::from_secs(120);
/// Longest wait for a connection to a driver.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection to a CSI driver.
pub(super) struct CsiClient {
    runtime: Runtime,
    node: NodeClient<Channel>,
    driver: String,
}

/// The capabilities of a driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CsiCapabilities {
    /// The driver stages a volume once for the node (`STAGE_UNSTAGE_VOLUME`).
    pub(super) stage: bool,
    /// The driver itself changes the group of a volume to the pod's (`VOLUME_MOUNT_GROUP`).
    pub(super) mount_group: bool,
    /// The driver distinguishes volumes with one writing pod and with several on a node (`SINGLE_NODE_MULTI_WRITER`).
    pub(super) multi_writer: bool,
    /// A volume has to grow on the node, too (`EXPAND_VOLUME`).
    pub(super) expand: bool,
    /// The driver reports the usage of a volume (`GET_VOLUME_STATS`).
    pub(super) stats: bool,
}

impl CsiClient {
    /// Connects to a driver at `socket`.
    ///
    /// # Errors
    /// When it does not listen there.
    pub(super) fn connect(driver: &str, socket: &Path) -> Result<CsiClient, DriverError> {
        let runtime = runtime()?;
        let connected = runtime.block_on(async { timeout(CONNECT_TIMEOUT, channel(socket)).await });
        let channel = match connected {
            Ok(Ok(channel)) => channel,
            Ok(Err(error)) => {
                return Err(DriverError::refused(format!(
                    "CSI driver {driver} does not listen at {}: {}",
                    socket.display(),
                    root_cause(&error)
                )));
            }
            Err(_) => {
                return Err(DriverError::refused(format!(
                    "CSI driver {driver} accepts no connection at {}",
                    socket.display()
                )));
            }
        };
        Ok(CsiClient { runtime, node: NodeClient::new(channel), driver: driver.to_owned() })
    }

    pub(super) fn capabilities(&self) -> Result<CsiCapabilities, DriverError> {
        let mut node = self.node.clone();
        let answer = self.call("NodeGetCapabilities", node.node_get_capabilities(NodeGetCapabilitiesRequest {}))?;
        let mut can = CsiCapabilities::default();
        for capability in answer.capabilities {
            let Some(Kind::Rpc(Rpc { r#type })) = capability.r#type else { continue };
            match Type::try_from(r#type) {
                Ok(Type::StageUnstageVolume) => can.stage = true,
                Ok(Type::VolumeMountGroup) => can.mount_group = true,
                Ok(Type::SingleNodeMultiWriter) => can.multi_writer = true,
                Ok(Type::ExpandVolume) => can.expand = true,
                Ok(Type::GetVolumeStats) => can.stats = true,
                _ => {}
            }
        }
        Ok(can)
    }

    pub(super) fn stage(&self, request: NodeStageVolumeRequest) -> Result<(), DriverError> {
        let mut node = self.node.clone();
        self.call("NodeStageVolume", node.node_stage_volume(request)).map(drop)
    }

    pub(super) fn publish(&self, request: NodePublishVolumeRequest) -> Result<(), DriverError> {
        let mut node = self.node.clone();
        self.call("NodePublishVolume", node.node_publish_volume(request)).map(drop)
    }

    pub(super) fn unpublish(&self, volume_id: &str, target: &str) -> Result<(), DriverError> {
        let request = NodeUnpublishVolumeRequest { volume_id: volume_id.to_owned(), target_path: target.to_owned() };
        let mut node = self.node.clone();
        self.call("NodeUnpublishVolume", node.node_unpublish_volume(request)).map(drop)
    }

    pub(super) fn unstage(&self, volume_id: &str, staging: &str) -> Result<(), DriverError> {
        let request =
            NodeUnstageVolumeRequest { volume_id: volume_id.to_owned(), staging_target_path: staging.to_owned() };
        let mut node = self.node.clone();
        self.call("NodeUnstageVolume", node.node_unstage_volume(request)).map(drop)
    }

    pub(super) fn expand(&self, request: NodeExpandVolumeRequest) -> Result<(), DriverError> {
        let mut node = self.node.clone();
        self.call("NodeExpandVolume", node.node_expand_volume(request)).map(drop)
    }

    pub(super) fn stats(&self, request: NodeGetVolumeStatsRequest) -> Result<NodeGetVolumeStatsResponse, DriverError> {
        let mut node = self.node.clone();
        self.call("NodeGetVolumeStats", node.node_get_volume_stats(request))
    }

    fn call<T>(
        &self,
        method: &str,
        answer: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, DriverError> {
        let at = |what: &str| format!("CSI driver {}: {method} {what}", self.driver);
        match self.runtime.block_on(async { timeout(DEADLINE, answer).await }) {
            Ok(Ok(answer)) => Ok(answer.into_inner()),
            Ok(Err(status)) => {
                let sentence = at(&format!("failed ({:?}): {}", status.code(), quoted(status.message())));
                let (is_uncertain, is_infeasible) = (is_uncertain(&status), is_infeasible(status.code()));
                Err(DriverError { is_uncertain, is_infeasible, ..DriverError::because(sentence, status) })
            }
            Err(_) => {
                let seconds = DEADLINE.as_secs();
                Err(DriverError::uncertain(at(&format!("has not answered for {seconds} s; see the driver's log"))))
            }
        }
    }
}

/// Whether the driver may have executed the call, or may still do so. If the driver ends before it answers, tonic makes
/// the status, and only a status of tonic has a source.
fn is_uncertain(status: &Status) -> bool {
    let is_from_driver = status.source().is_none();
    let code = status.code();
    !is_from_driver
        || matches!(
            code,
            Code::Cancelled | Code::DeadlineExceeded | Code::Unavailable | Code::ResourceExhausted | Code::Aborted
        )
}

/// Whether a retry of the call cannot succeed.
fn is_infeasible(code: Code) -> bool {
    matches!(code, Code::InvalidArgument | Code::OutOfRange | Code::NotFound)
}

/// The innermost cause, which is the kernel's error.
fn root_cause(error: &dyn Error) -> &dyn Error {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause
}

/// A connection to a socket of the node.
pub(super) async fn channel(socket: &Path) -> Result<Channel, tonic::transport::Error> {
    let socket: PathBuf = socket.to_owned();
    let connect = move |_: Uri| {
        let socket = socket.clone();
        async move { Ok::<_, std::io::Error>(TokioIo::new(UnixStream::connect(socket).await?)) }
    };
    // The address is a placeholder, because the connector has the socket.
    Endpoint::from_static("http://localhost").connect_with_connector(service_fn(connect)).await
}

/// The runtime for the calls of one volume.
pub(super) fn runtime() -> Result<Runtime, DriverError> {
    let built = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build();
    built.map_err(|error| DriverError::because(format!("cannot call a driver: {error}"), error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vm_04_codes_after_which_the_work_may_continue_are_uncertain() {
        for (code, uncertain) in [
            (Code::Cancelled, true),
            (Code::DeadlineExceeded, true),
            (Code::Unavailable, true),
            (Code::ResourceExhausted, true),
            (Code::Aborted, true),
            (Code::InvalidArgument, false),
            (Code::NotFound, false),
            (Code::Internal, false),
            (Code::FailedPrecondition, false),
            (Code::Unknown, false),
        ] {
            assert_eq!(is_uncertain(&Status::new(code, "")), uncertain, "{code:?}");
        }
    }
}
