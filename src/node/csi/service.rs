//! The services Identity and Node, as a kubelet calls them.

use std::sync::Arc;

use tokio::sync::mpsc::unbounded_channel;
use tokio::time::Instant;
use tonic::transport::Server;
use tonic::{Code, Request, Response, Status};
use tracing::{Instrument, debug, info, warn};

use super::CsiSettings;
use super::operations::{CsiOperations, Stats};
use super::request::{parse, required, target, token};
use super::sockets::{CsiError, CsiSockets, register};
use super::target::TargetUsage;
use crate::csi::v1::identity_server::{Identity, IdentityServer};
use crate::csi::v1::node_server::{Node, NodeServer};
use crate::csi::v1::node_service_capability::{Rpc, Type, rpc};
use crate::csi::v1::volume_usage::Unit;
use crate::csi::v1::*;
use crate::node::NodeHandle;
use crate::node::feed::Feed;
use crate::node::metrics::Recorder;
use crate::node::publication::{DRIVER, Publications};
use crate::node::service::clients;
use crate::node::spans;

/// The capabilities of the driver besides publishing.
const CAPABILITIES: [rpc::Type; 3] =
    [rpc::Type::GetVolumeStats, rpc::Type::VolumeCondition, rpc::Type::VolumeMountGroup];

/// The driver, ready to be served.
pub struct CsiDriverServer {
    operations: CsiOperations,
    sockets: CsiSockets,
    service: CsiAnswers,
}

/// The implementation of both services. Cheap to clone.
#[derive(Clone)]
struct CsiAnswers {
    operations: CsiOperations,
    settings: Arc<CsiSettings>,
    node: NodeHandle,
    recorder: Recorder,
}

impl CsiDriverServer {
    /// Reads the records of earlier daemons. From now on, the kubelet's publications decide which pods the feed has.
    ///
    /// # Errors
    /// When the records cannot be read.
    pub fn take_over(
        settings: CsiSettings,
        sockets: CsiSockets,
        records: Publications,
        feed: &mut Feed,
        node: NodeHandle,
        recorder: Recorder,
    ) -> Result<CsiDriverServer, CsiError> {
        let (known, trouble) = records.read_all().map_err(CsiError::Service)?;
        trouble.iter().for_each(|sentence| warn!("a CSI volume of an earlier podfs node is lost: {sentence}"));
        if !known.is_empty() {
            info!("{} CSI volumes of an earlier podfs node are known", known.len());
        }
        let report_change = feed.follow_kubelet(known.clone());
        let (changes, mut changed) = unbounded_channel();
        tokio::spawn(async move {
            while let Some(change) = changed.recv().await {
                if !report_change(change) {
                    return;
                }
            }
        });
        let operations =
            CsiOperations::new(sockets.root.clone(), records, known, node.clone(), changes, feed.readers());
        let service = CsiAnswers { operations: operations.clone(), settings: Arc::new(settings), node, recorder };
        Ok(CsiDriverServer { operations, sockets, service })
    }
}

/// Answers the kubelet's calls until the future is dropped.
///
/// # Errors
/// When a socket cannot be served.
pub async fn serve(driver: CsiDriverServer) -> Result<(), CsiError> {
    let CsiDriverServer { operations, sockets: CsiSockets { driver, registration, endpoint, .. }, service } = driver;
    let clients = clients(driver).map_err(CsiError::Service)?;
    let services =
        Server::builder().add_service(IdentityServer::new(service.clone())).add_service(NodeServer::new(service));
    info!("the kubelet finds the CSI driver {DRIVER} at {}", endpoint.display());
    let registering = async {
        match registration {
            Some(listener) => register(listener, &endpoint).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        served = services.serve_with_incoming(clients) => served.map_err(CsiError::Connection),
        registered = registering => registered,
        () = operations.retire_gone_pods() => Ok(()),
    }
}

impl CsiAnswers {
    /// Answers a call, and counts it.
    async fn answer<T>(
        &self,
        method: &'static str,
        answer: impl Future<Output = Result<T, Status>>,
    ) -> Result<Response<T>, Status> {
        let started = Instant::now();
        let span = spans::of_call();
        let answer = answer.instrument(span.clone()).await;
        let _span = span.entered();
        let code = answer.as_ref().map_or_else(Status::code, |_| Code::Ok);
        self.recorder.csi(method, &code_name(code), started);
        if let Err(status) = &answer {
            debug!("{method}: {}: {}", code_name(code), status.message());
        }
        answer.map(Response::new)
    }

    async fn publish(&self, request: NodePublishVolumeRequest) -> Result<NodePublishVolumeResponse, Status> {
        let (root, settings) = (self.operations.root().path().to_owned(), Arc::clone(&self.settings));
        let token = token(&request)?;
        // Parsing looks up the real path of a directory of the node.
        let parsed = tokio::task::spawn_blocking(move || parse(&request, &root, &settings.allow));
        let publication = parsed.await.map_err(|error| Status::internal(error.to_string()))??;
        self.operations.publish(publication, token).await?;
        Ok(NodePublishVolumeResponse {})
    }

    async fn unpublish(&self, request: NodeUnpublishVolumeRequest) -> Result<NodeUnpublishVolumeResponse, Status> {
        required("volume_id", &request.volume_id)?;
        required("target_path", &request.target_path)?;
        // podfs mounts only below the kubelet's directory, so there is nothing to unmount at another path.
        if let Ok(target) = target(&request.target_path, self.operations.root().path()) {
            self.operations.unpublish(&request.volume_id, target).await?;
        }
        Ok(NodeUnpublishVolumeResponse {})
    }

    async fn stats(&self, request: NodeGetVolumeStatsRequest) -> Result<NodeGetVolumeStatsResponse, Status> {
        required("volume_id", &request.volume_id)?;
        required("volume_path", &request.volume_path)?;
        let path: std::path::PathBuf = std::path::Path::new(&request.volume_path).components().collect();
        let Stats { usage, abnormal, message } = self.operations.stats(&request.volume_id, &path).await?;
        let usage = usage
            .map(|TargetUsage { bytes, inodes }| vec![usage_in(Unit::Bytes, bytes), usage_in(Unit::Inodes, inodes)]);
        Ok(NodeGetVolumeStatsResponse {
            usage: usage.unwrap_or_else(|| vec![usage_in(Unit::Bytes, [0; 3])]),
            volume_condition: Some(VolumeCondition { abnormal, message }),
        })
    }
}

fn usage_in(unit: Unit, [available, total, used]: [i64; 3]) -> VolumeUsage {
    VolumeUsage { available, total, used, unit: unit.into() }
}

/// The name of a status code, as the CSI drivers of the Kubernetes project write it.
fn code_name(code: Code) -> String {
    match code {
        Code::Ok => "OK".to_owned(),
        Code::Cancelled => "Canceled".to_owned(),
        code => format!("{code:?}"),
    }
}

#[tonic::async_trait]
impl Identity for CsiAnswers {
    async fn get_plugin_info(
        &self,
        _: Request<GetPluginInfoRequest>,
    ) -> Result<Response<GetPluginInfoResponse>, Status> {
        let (name, vendor_version) = (DRIVER.to_owned(), env!("CARGO_PKG_VERSION").to_owned());
        let info = GetPluginInfoResponse { name, vendor_version, ..GetPluginInfoResponse::default() };
        self.answer("/csi.v1.Identity/GetPluginInfo", async { Ok(info) }).await
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<GetPluginCapabilitiesRequest>,
    ) -> Result<Response<GetPluginCapabilitiesResponse>, Status> {
        let none = GetPluginCapabilitiesResponse::default();
        self.answer("/csi.v1.Identity/GetPluginCapabilities", async { Ok(none) }).await
    }

    async fn probe(&self, _: Request<ProbeRequest>) -> Result<Response<ProbeResponse>, Status> {
        let ready = Some(self.node.state().sources_ready);
        self.answer("/csi.v1.Identity/Probe", async { Ok(ProbeResponse { ready }) }).await
    }
}

#[tonic::async_trait]
impl Node for CsiAnswers {
    async fn node_publish_volume(
        &self,
        request: Request<NodePublishVolumeRequest>,
    ) -> Result<Response<NodePublishVolumeResponse>, Status> {
        self.answer("/csi.v1.Node/NodePublishVolume", self.publish(request.into_inner())).await
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<NodeUnpublishVolumeRequest>,
    ) -> Result<Response<NodeUnpublishVolumeResponse>, Status> {
        self.answer("/csi.v1.Node/NodeUnpublishVolume", self.unpublish(request.into_inner())).await
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<NodeGetVolumeStatsRequest>,
    ) -> Result<Response<NodeGetVolumeStatsResponse>, Status> {
        self.answer("/csi.v1.Node/NodeGetVolumeStats", self.stats(request.into_inner())).await
    }

    async fn node_get_capabilities(
        &self,
        _: Request<NodeGetCapabilitiesRequest>,
    ) -> Result<Response<NodeGetCapabilitiesResponse>, Status> {
        let capability =
            |kind: rpc::Type| NodeServiceCapability { r#type: Some(Type::Rpc(Rpc { r#type: kind.into() })) };
        let capabilities = CAPABILITIES.into_iter().map(capability).collect();
        let answer = async { Ok(NodeGetCapabilitiesResponse { capabilities }) };
        self.answer("/csi.v1.Node/NodeGetCapabilities", answer).await
    }

    async fn node_get_info(&self, _: Request<NodeGetInfoRequest>) -> Result<Response<NodeGetInfoResponse>, Status> {
        let info = NodeGetInfoResponse { node_id: self.settings.node.clone(), ..NodeGetInfoResponse::default() };
        self.answer("/csi.v1.Node/NodeGetInfo", async { Ok(info) }).await
    }

    async fn node_stage_volume(
        &self,
        _: Request<NodeStageVolumeRequest>,
    ) -> Result<Response<NodeStageVolumeResponse>, Status> {
        self.answer("/csi.v1.Node/NodeStageVolume", async { Err(unimplemented("stages no volumes")) }).await
    }

    async fn node_unstage_volume(
        &self,
        _: Request<NodeUnstageVolumeRequest>,
    ) -> Result<Response<NodeUnstageVolumeResponse>, Status> {
        self.answer("/csi.v1.Node/NodeUnstageVolume", async { Err(unimplemented("stages no volumes")) }).await
    }

    async fn node_expand_volume(
        &self,
        _: Request<NodeExpandVolumeRequest>,
    ) -> Result<Response<NodeExpandVolumeResponse>, Status> {
        self.answer("/csi.v1.Node/NodeExpandVolume", async { Err(unimplemented("expands no volumes")) }).await
    }
}

fn unimplemented(sentence: &str) -> Status {
    Status::unimplemented(format!("podfs {sentence}; NodeGetCapabilities says what it does"))
}
