//! The part of the Container Runtime Interface (runtime.v1) that tests call as a kubelet does: messages with the interface's
//! field numbers, and a client.
#![allow(dead_code, reason = "each test program uses its part")]

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::runtime::Runtime;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};
use tonic_prost::ProstCodec;
use tower::service_fn;

macro_rules! message {
    ($name:ident { $($(#[$attribute:meta])* $field:ident: $type:ty,)* }) => {
        #[derive(Clone, PartialEq, prost::Message)]
        pub struct $name { $($(#[$attribute])* pub $field: $type,)* }
    };
}

message!(Nothing {});
message!(PodSandboxMetadata {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    uid: String,
    #[prost(string, tag = "3")]
    namespace: String,
});
message!(PodSandboxConfig {
    #[prost(message, optional, tag = "1")]
    metadata: Option<PodSandboxMetadata>,
    #[prost(string, tag = "3")]
    log_directory: String,
    #[prost(map = "string, string", tag = "6")]
    labels: HashMap<String, String>,
    #[prost(message, optional, tag = "8")]
    linux: Option<LinuxPodSandboxConfig>,
});
message!(LinuxPodSandboxConfig {
    #[prost(string, tag = "1")]
    cgroup_parent: String,
    #[prost(message, optional, tag = "2")]
    security_context: Option<SecurityContext>,
});
message!(SecurityContext {
    #[prost(message, optional, tag = "1")]
    namespace_options: Option<NamespaceOption>,
});
message!(NamespaceOption {
    #[prost(int32, tag = "1")]
    network: i32,
});
message!(RunPodSandboxRequest {
    #[prost(message, optional, tag = "1")]
    config: Option<PodSandboxConfig>,
});
/// An answer with an id, or a request with one alone.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Id {
    #[prost(string, tag = "1")]
    pub id: String,
}
message!(Named {
    #[prost(string, tag = "1")]
    name: String,
});
message!(KeyValue {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(string, tag = "2")]
    value: String,
});
message!(Mount {
    #[prost(string, tag = "1")]
    container_path: String,
    #[prost(string, tag = "2")]
    host_path: String,
    #[prost(bool, tag = "3")]
    readonly: bool,
    #[prost(int32, tag = "5")]
    propagation: i32,
});
message!(ContainerConfig {
    #[prost(message, optional, tag = "1")]
    metadata: Option<Named>,
    #[prost(message, optional, tag = "2")]
    image: Option<Named>,
    #[prost(string, repeated, tag = "3")]
    command: Vec<String>,
    #[prost(message, repeated, tag = "6")]
    envs: Vec<KeyValue>,
    #[prost(message, repeated, tag = "7")]
    mounts: Vec<Mount>,
    #[prost(string, tag = "11")]
    log_path: String,
    #[prost(message, optional, tag = "15")]
    linux: Option<LinuxContainerConfig>,
});
message!(LinuxContainerConfig {
    #[prost(message, optional, tag = "2")]
    security_context: Option<ContainerSecurityContext>,
});
message!(ContainerSecurityContext {
    #[prost(message, optional, tag = "3")]
    namespace_options: Option<NamespaceOption>,
});
message!(CreateContainerRequest {
    #[prost(string, tag = "1")]
    pod_sandbox_id: String,
    #[prost(message, optional, tag = "2")]
    config: Option<ContainerConfig>,
    #[prost(message, optional, tag = "3")]
    sandbox_config: Option<PodSandboxConfig>,
});
message!(ExecSyncRequest {
    #[prost(string, tag = "1")]
    container_id: String,
    #[prost(string, repeated, tag = "2")]
    cmd: Vec<String>,
    #[prost(int64, tag = "3")]
    timeout: i64,
});
message!(ExecSyncResponse {
    #[prost(bytes = "vec", tag = "1")]
    stdout: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    stderr: Vec<u8>,
    #[prost(int32, tag = "3")]
    exit_code: i32,
});

message!(ImageStatusRequest {
    #[prost(message, optional, tag = "1")]
    image: Option<Named>,
});
message!(ImageStatusResponse {
    #[prost(message, optional, tag = "1")]
    image: Option<Image>,
});
message!(Image {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(string, repeated, tag = "2")]
    repo_tags: Vec<String>,
});

/// The network namespace of the node.
pub const NODE: i32 = 2;

/// A client of a container runtime.
pub struct Cri {
    runtime: Runtime,
    socket: PathBuf,
}

impl Cri {
    pub fn new(socket: &Path) -> Cri {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        Cri { runtime, socket: socket.to_owned() }
    }

    /// Calls a method of the RuntimeService.
    pub fn call<Q, A>(&self, method: &str, request: Q) -> Result<A, Status>
    where
        Q: prost::Message + Send + Sync + 'static,
        A: prost::Message + Default + Send + Sync + 'static,
    {
        self.call_service("RuntimeService", method, request)
    }

    /// The image to which a pod's name of an image leads, if the runtime has it.
    pub fn image(&self, name: &str) -> Result<Option<Image>, Status> {
        let request = ImageStatusRequest { image: Some(Named { name: name.to_owned() }) };
        self.call_service::<_, ImageStatusResponse>("ImageService", "ImageStatus", request).map(|answer| answer.image)
    }

    fn call_service<Q, A>(&self, service: &str, method: &str, request: Q) -> Result<A, Status>
    where
        Q: prost::Message + Send + Sync + 'static,
        A: prost::Message + Default + Send + Sync + 'static,
    {
        let path = format!("/runtime.v1.{service}/{method}").parse::<PathAndQuery>().expect("a path");
        self.runtime.block_on(async {
            let mut client = Grpc::new(channel(&self.socket));
            client.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
            client
                .unary(Request::new(request), path, ProstCodec::<Q, A>::default())
                .await
                .map(tonic::Response::into_inner)
        })
    }
}

fn channel(socket: &Path) -> Channel {
    let socket = socket.to_owned();
    Endpoint::from_static("http://localhost").connect_with_connector_lazy(service_fn(move |_| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    }))
}
