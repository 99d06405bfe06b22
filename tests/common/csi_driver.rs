//! A CSI driver under the control of a test. It mounts directories and devices by bind mounts and records each call. It fails,
//! delays or falsifies answers as the test orders. It listens and registers as drivers do.
//!
//! It stands for a driver of another vendor, which this machine does not have. It shows the calls of podfs and the effect of
//! each answer. It does not show that a certain vendor's driver understands podfs.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use podfs::csi::registration::registration_server::{Registration, RegistrationServer};
use podfs::csi::registration::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use podfs::csi::v1::node_server::{Node, NodeServer};
use podfs::csi::v1::node_service_capability::rpc::Type;
use podfs::csi::v1::node_service_capability::{Rpc, Type as Kind};
use podfs::csi::v1::*;
use tokio::net::UnixListener;
use tokio::runtime::Runtime;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Code, Request, Response, Status};

/// The name that the driver registers with.
pub const DRIVER: &str = "disk.csi.acme.com";

/// The name of a block volume in its staging directory.
const DEVICE: &str = "device";

/// A fault of the driver in a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The call has no effect and fails.
    Fails(Code),
    /// The call takes effect and fails.
    FailsAfterTheWork(Code),
    /// The call takes effect, and the driver answers after this time.
    Late(Duration),
    /// The call has no effect, and the driver never answers.
    Hangs,
    /// The call takes effect, and the driver never answers.
    HangsAfterTheWork,
    /// The call takes effect when the test calls [`CsiDriver::release`], even if the caller is gone by then.
    WaitsForRelease,
    /// The driver reports success, and the call has no effect.
    Lies,
    /// The call takes effect, the driver kills the process with this id, and never answers.
    Kills(i32),
}

/// The orders of the test, and what the driver has done.
#[derive(Default)]
pub struct Script {
    capabilities: Vec<Type>,
    /// The faults of the next calls of a method, in order. A call without a fault succeeds.
    faults: HashMap<&'static str, Vec<Fault>>,
    /// Faults of all calls of a method.
    always: HashMap<&'static str, Fault>,
    calls: Vec<String>,
    is_released: bool,
    published: Vec<NodePublishVolumeRequest>,
    staged: Vec<NodeStageVolumeRequest>,
    expanded: Vec<NodeExpandVolumeRequest>,
    /// The NodeGetVolumeStats requests that the driver got, and its answer to them.
    stats_requests: Vec<NodeGetVolumeStatsRequest>,
    stats: NodeGetVolumeStatsResponse,
    /// The driver's answer to NodeGetInfo.
    info: NodeGetInfoResponse,
    /// The answers of podfs to the registrations of the driver.
    answers: Vec<RegistrationStatus>,
    /// The time that all calls spent on mounts and unmounts.
    spent: Duration,
}

/// A driver that listens until it is dropped.
pub struct CsiDriver {
    script: Arc<Mutex<Script>>,
    source: PathBuf,
    runtime: Option<Runtime>,
}

impl CsiDriver {
    /// A driver with these capabilities, which registers below `root` and mounts `source`.
    pub fn start(root: &Path, source: &Path, capabilities: &[Type]) -> CsiDriver {
        let info = NodeGetInfoResponse { node_id: "worker-1".to_owned(), ..NodeGetInfoResponse::default() };
        let script = Script { capabilities: capabilities.to_vec(), info, ..Script::default() };
        let mut driver = CsiDriver { script: Arc::new(Mutex::new(script)), source: source.to_owned(), runtime: None };
        driver.listen(root);
        driver
    }

    /// Listens at the driver's socket, and at a registration socket, at which podfs learns the path of the driver's socket.
    pub fn listen(&mut self, root: &Path) {
        let own = root.join("plugins").join(DRIVER);
        let registry = root.join("plugins_registry");
        fs::create_dir_all(&own).expect("a directory");
        fs::create_dir_all(&registry).expect("a directory");
        // The driver's socket is not at the usual path, so podfs has to call GetInfo at the registration socket.
        let (socket, registration) = (own.join("own.sock"), registry.join("acme-reg.sock"));
        for path in [&socket, &registration] {
            let _ = fs::remove_file(path);
        }
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
        let node = NodeService { script: Arc::clone(&self.script), source: self.source.clone() };
        let register = RegistrationService { script: Arc::clone(&self.script), endpoint: socket.display().to_string() };
        runtime.block_on(async {
            let (node_socket, registration) =
                (UnixListener::bind(&socket).expect("bound"), UnixListener::bind(&registration).expect("bound"));
            let nodes = Server::builder().add_service(NodeServer::new(node));
            tokio::spawn(nodes.serve_with_incoming(UnixListenerStream::new(node_socket)));
            let registrations = Server::builder().add_service(RegistrationServer::new(register));
            tokio::spawn(registrations.serve_with_incoming(UnixListenerStream::new(registration)));
        });
        self.runtime = Some(runtime);
    }

    /// The driver crashes: calls in progress get no answer, and its mounts stay.
    pub fn crash(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }

    /// Removes the registration socket, as a driver does that is removed from the node.
    pub fn unregister(&self, root: &Path) {
        fs::remove_file(root.join("plugins_registry/acme-reg.sock")).expect("it is registered");
    }

    /// Sets the answer of NodeGetInfo from now on.
    pub fn answer_info(&self, info: NodeGetInfoResponse) {
        self.script().info = info;
    }

    /// The answers of podfs to the registrations of the driver: the error, or an empty text.
    pub fn answers(&self) -> Vec<String> {
        let answers = self.script().answers.clone();
        let text = |answer: RegistrationStatus| {
            assert_eq!(answer.plugin_registered, answer.error.is_empty(), "{answer:?}");
            answer.error
        };
        answers.into_iter().map(text).collect()
    }

    /// Adds a fault for the next call of a method that has none yet.
    pub fn fail(&self, method: &'static str, fault: Fault) {
        self.script().faults.entry(method).or_default().push(fault);
    }

    /// Sets the fault of all calls of a method from now on; `None` ends it.
    pub fn fail_always(&self, method: &'static str, fault: Option<Fault>) {
        match fault {
            Some(fault) => drop(self.script().always.insert(method, fault)),
            None => drop(self.script().always.remove(method)),
        }
    }

    /// Lets the calls that wait for it take effect.
    pub fn release(&self) {
        self.script().is_released = true;
    }

    /// The time that all calls have spent on mounts and unmounts so far.
    pub fn spent(&self) -> Duration {
        self.script().spent
    }

    /// The methods that podfs has called, in order, without NodeGetVolumeStats and NodeGetCapabilities.
    pub fn calls(&self) -> Vec<String> {
        self.script().calls.clone()
    }

    /// The number of calls of a method.
    pub fn count(&self, method: &str) -> usize {
        self.calls().iter().filter(|call| *call == method).count()
    }

    /// The last NodePublishVolume request.
    pub fn published(&self) -> NodePublishVolumeRequest {
        self.script().published.last().expect("NodePublishVolume was called").clone()
    }

    /// The last NodeStageVolume request.
    pub fn staged(&self) -> NodeStageVolumeRequest {
        self.script().staged.last().expect("NodeStageVolume was called").clone()
    }

    /// The last NodeExpandVolume request.
    pub fn expanded(&self) -> NodeExpandVolumeRequest {
        self.script().expanded.last().expect("NodeExpandVolume was called").clone()
    }

    /// The last NodeGetVolumeStats request, if there was one.
    pub fn stats_request(&self) -> Option<NodeGetVolumeStatsRequest> {
        self.script().stats_requests.last().cloned()
    }

    /// Sets the answer of NodeGetVolumeStats from now on.
    pub fn answer_stats(&self, stats: NodeGetVolumeStatsResponse) {
        self.script().stats = stats;
    }

    fn script(&self) -> std::sync::MutexGuard<'_, Script> {
        self.script.lock().expect("no test panics with it")
    }
}

impl Drop for CsiDriver {
    fn drop(&mut self) {
        self.crash();
    }
}

struct RegistrationService {
    script: Arc<Mutex<Script>>,
    endpoint: String,
}

#[tonic::async_trait]
impl Registration for RegistrationService {
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
        self.script.lock().expect("no test panics with it").answers.push(request.into_inner());
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

struct NodeService {
    script: Arc<Mutex<Script>>,
    source: PathBuf,
}

impl NodeService {
    /// Records a call, does `work`, and succeeds unless the test has ordered a fault.
    async fn call<T: Default>(
        &self,
        method: &'static str,
        work: impl FnOnce() -> Result<(), Status>,
    ) -> Result<Response<T>, Status> {
        let fault = {
            let mut script = self.script.lock().expect("no test panics with it");
            script.calls.push(method.to_owned());
            let next = script.faults.get_mut(method).filter(|faults| !faults.is_empty()).map(|faults| faults.remove(0));
            next.or_else(|| script.always.get(method).copied())
        };
        match fault {
            Some(Fault::Fails(code)) => return Err(Status::new(code, "as the test says")),
            Some(Fault::Hangs) => std::future::pending::<()>().await,
            Some(Fault::WaitsForRelease) => tokio::task::block_in_place(|| {
                while !self.script.lock().expect("no test panics with it").is_released {
                    std::thread::sleep(Duration::from_millis(5));
                }
            }),
            Some(Fault::Lies) => return Ok(Response::new(T::default())),
            _ => {}
        }
        let begun = Instant::now();
        let worked = work();
        self.script.lock().expect("no test panics with it").spent += begun.elapsed();
        worked?;
        match fault {
            Some(Fault::Late(pause)) => tokio::time::sleep(pause).await,
            Some(Fault::HangsAfterTheWork) => std::future::pending::<()>().await,
            Some(Fault::FailsAfterTheWork(code)) => return Err(Status::new(code, "as the test says")),
            Some(Fault::Kills(pid)) => {
                let killed = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL);
                killed.expect("it is there");
                std::future::pending::<()>().await;
            }
            _ => {}
        }
        Ok(Response::new(T::default()))
    }
}

/// Whether the caller requests a block device.
fn is_block(capability: Option<&VolumeCapability>) -> bool {
    matches!(capability.and_then(|can| can.access_type.as_ref()), Some(volume_capability::AccessType::Block(_)))
}

/// Bind-mounts `source` at `target`. Keeps an existing mount, because a driver has to be idempotent.
fn bind(source: &Path, target: &Path) -> Result<(), Status> {
    match source.is_dir() {
        true => drop(fs::create_dir(target)),
        false => drop(fs::File::options().create(true).append(true).open(target)),
    }
    if is_mounted(target) {
        return Ok(());
    }
    let none: Option<&str> = None;
    mount(Some(source), target, none, MsFlags::MS_BIND, none).map_err(|errno| Status::internal(errno.to_string()))
}

fn unbind(target: &Path) -> Result<(), Status> {
    if is_mounted(target) {
        umount2(target, MntFlags::empty()).map_err(|errno| Status::internal(format!("umount: {errno}")))?;
    }
    Ok(())
}

fn is_mounted(path: &Path) -> bool {
    let table = fs::read_to_string("/proc/self/mounts").expect("a table");
    table.lines().any(|line| line.split(' ').nth(1) == path.to_str())
}

#[tonic::async_trait]
impl Node for NodeService {
    async fn node_stage_volume(
        &self,
        request: Request<NodeStageVolumeRequest>,
    ) -> Result<Response<NodeStageVolumeResponse>, Status> {
        let request = request.into_inner();
        let mut staging = PathBuf::from(&request.staging_target_path);
        if is_block(request.volume_capability.as_ref()) {
            staging.push(DEVICE);
        }
        self.script.lock().expect("no test panics with it").staged.push(request);
        self.call("NodeStageVolume", || bind(&self.source, &staging)).await
    }

    async fn node_unstage_volume(
        &self,
        request: Request<NodeUnstageVolumeRequest>,
    ) -> Result<Response<NodeUnstageVolumeResponse>, Status> {
        let staging = PathBuf::from(request.into_inner().staging_target_path);
        self.call("NodeUnstageVolume", || {
            unbind(&staging.join(DEVICE))?;
            let _ = fs::remove_file(staging.join(DEVICE));
            unbind(&staging)
        })
        .await
    }

    async fn node_publish_volume(
        &self,
        request: Request<NodePublishVolumeRequest>,
    ) -> Result<Response<NodePublishVolumeResponse>, Status> {
        let request = request.into_inner();
        let target = PathBuf::from(&request.target_path);
        let source = match request.staging_target_path.as_str() {
            "" => self.source.clone(),
            staging if is_block(request.volume_capability.as_ref()) => Path::new(staging).join(DEVICE),
            staging => PathBuf::from(staging),
        };
        let is_staged = request.staging_target_path.is_empty() || is_mounted(&source);
        self.script.lock().expect("no test panics with it").published.push(request);
        self.call("NodePublishVolume", || {
            let staged = is_staged.then_some(()).ok_or_else(|| Status::failed_precondition("it is not staged"));
            staged.and_then(|()| bind(&source, &target))
        })
        .await
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<NodeUnpublishVolumeRequest>,
    ) -> Result<Response<NodeUnpublishVolumeResponse>, Status> {
        let target = PathBuf::from(request.into_inner().target_path);
        self.call("NodeUnpublishVolume", || {
            unbind(&target)?;
            let _ = fs::remove_dir(&target).or_else(|_| fs::remove_file(&target));
            Ok(())
        })
        .await
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<NodeGetVolumeStatsRequest>,
    ) -> Result<Response<NodeGetVolumeStatsResponse>, Status> {
        let mut script = self.script.lock().expect("no test panics with it");
        script.stats_requests.push(request.into_inner());
        Ok(Response::new(script.stats.clone()))
    }

    async fn node_expand_volume(
        &self,
        request: Request<NodeExpandVolumeRequest>,
    ) -> Result<Response<NodeExpandVolumeResponse>, Status> {
        self.script.lock().expect("no test panics with it").expanded.push(request.into_inner());
        self.call("NodeExpandVolume", || Ok(())).await
    }

    async fn node_get_capabilities(
        &self,
        _: Request<NodeGetCapabilitiesRequest>,
    ) -> Result<Response<NodeGetCapabilitiesResponse>, Status> {
        let capabilities = self.script.lock().expect("no test panics with it").capabilities.clone();
        let capability = |kind: Type| NodeServiceCapability { r#type: Some(Kind::Rpc(Rpc { r#type: kind.into() })) };
        Ok(Response::new(NodeGetCapabilitiesResponse {
            capabilities: capabilities.into_iter().map(capability).collect(),
        }))
    }

    async fn node_get_info(&self, _: Request<NodeGetInfoRequest>) -> Result<Response<NodeGetInfoResponse>, Status> {
        self.call::<()>("NodeGetInfo", || Ok(())).await?;
        Ok(Response::new(self.script.lock().expect("no test panics with it").info.clone()))
    }
}
