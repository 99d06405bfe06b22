//! A kubelet as the CSI driver sees it: it dials the registration socket, and publishes, republishes and unpublishes volumes of
//! pods. It makes and removes the directories of these pods. It stands for the kubelet's plugin manager and csi volume plugin,
//! and makes the calls of a real kubelet: one call at a time for a volume, `NodeGetCapabilities` before each publish. It does
//! not show how a kubelet reacts to the answers: its back-off, its checkpoints, and the containers that it starts.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use hyper_util::rt::TokioIo;
use podfs::csi::registration::registration_client::RegistrationClient;
use podfs::csi::registration::{InfoRequest, PluginInfo, RegistrationStatus};
use podfs::csi::v1::identity_client::IdentityClient;
use podfs::csi::v1::node_client::NodeClient;
use podfs::csi::v1::volume_capability::{AccessMode, AccessType, MountVolume, access_mode::Mode};
use podfs::csi::v1::*;
use tokio::net::UnixStream;
use tokio::runtime::Runtime;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};
use tower::service_fn;

/// The kubelet of a machine.
pub struct KubeletCalls {
    runtime: Runtime,
    /// The directory of the kubelet, at the path at which podfs sees it.
    root: PathBuf,
    /// The same directory, at the path at which the test sees it.
    seen: PathBuf,
}

/// A volume of a pod that the kubelet has.
#[derive(Clone)]
pub struct Volume {
    pub id: String,
    /// The target path, as the test sees it.
    pub target: PathBuf,
    pub request: NodePublishVolumeRequest,
}

impl KubeletCalls {
    /// A kubelet with the directory `root`. The test sees it at the path `seen`, which differs if podfs runs on a virtual
    /// machine.
    pub fn new(root: &Path, seen: &Path) -> KubeletCalls {
        for directory in ["pods", "plugins_registry"] {
            fs::create_dir_all(seen.join(directory)).expect("a directory");
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        KubeletCalls { runtime, root: root.to_owned(), seen: seen.to_owned() }
    }

    /// The directory of the kubelet, as the test sees it.
    pub fn root(&self) -> PathBuf {
        self.seen.clone()
    }

    pub fn socket(&self) -> PathBuf {
        self.seen.join("plugins/podfs.io/csi.sock")
    }

    /// Dials the registration socket as a kubelet does. A kubelet sets no authority, so its gRPC library uses the encoded path
    /// of the socket.
    pub fn register(&self, name: &str) -> Result<PluginInfo, Status> {
        let path = self.root.join("plugins_registry").join(name);
        let seen = self.seen.join("plugins_registry").join(name);
        let encoded = path.to_str().expect("text").replace('/', "%2F");
        let endpoint =
            Endpoint::from_shared(format!("http://{encoded}")).map_err(|error| Status::internal(error.to_string()))?;
        self.runtime.block_on(async {
            let mut client = RegistrationClient::new(channel(endpoint, &seen));
            let info = client.get_info(InfoRequest {}).await?.into_inner();
            let taken = RegistrationStatus { plugin_registered: true, error: String::new() };
            client.notify_registration_status(taken).await?;
            Ok(info)
        })
    }

    /// Calls the driver with a client.
    pub fn call<T>(&self, call: impl AsyncFnOnce(NodeClient<Channel>) -> Result<T, Status>) -> Result<T, Status> {
        self.runtime.block_on(async { call(NodeClient::new(channel(local(), &self.socket()))).await })
    }

    pub fn identity<T>(
        &self,
        call: impl AsyncFnOnce(IdentityClient<Channel>) -> Result<T, Status>,
    ) -> Result<T, Status> {
        self.runtime.block_on(async { call(IdentityClient::new(channel(local(), &self.socket()))).await })
    }

    /// A volume of a pod, with the directory that the kubelet makes for it.
    pub fn volume(&self, pod: &str, name: &str, attributes: &[(&str, &str)]) -> Volume {
        let uid = format!("uid-{pod}");
        let below = format!("pods/{uid}/volumes/kubernetes.io~csi/{name}/mount");
        let (target, path) = (self.seen.join(&below), self.root.join(&below));
        fs::create_dir_all(target.parent().expect("a parent")).expect("a directory");
        let id = format!("csi-{pod}-{name}");
        let request = NodePublishVolumeRequest {
            volume_id: id.clone(),
            target_path: path.to_str().expect("text").to_owned(),
            volume_capability: Some(capability("")),
            readonly: true,
            volume_context: context(pod, &uid, attributes),
            ..NodePublishVolumeRequest::default()
        };
        Volume { id, target, request }
    }

    /// Publishes a volume. Like a kubelet, calls again if podfs still waits for what the volume needs.
    pub fn publish(&self, volume: &Volume) -> Result<(), Status> {
        match self.publish_request(volume.request.clone()) {
            Err(status) if status.code() == Code::DeadlineExceeded => self.publish_request(volume.request.clone()),
            published => published,
        }
    }

    pub fn publish_request(&self, request: NodePublishVolumeRequest) -> Result<(), Status> {
        self.call(async |mut node| {
            node.node_get_capabilities(NodeGetCapabilitiesRequest {}).await?;
            node.node_publish_volume(request).await.map(drop)
        })
    }

    pub fn unpublish(&self, volume: &Volume) -> Result<(), Status> {
        let target_path = volume.request.target_path.clone();
        let request = NodeUnpublishVolumeRequest { volume_id: volume.id.clone(), target_path };
        self.call(async |mut node| node.node_unpublish_volume(request).await.map(drop))
    }

    /// Ends a pod: unpublishes its volumes, and removes their directories, which must be empty, and the pod's.
    #[track_caller]
    pub fn end_pod(&self, pod: &str, volumes: &[Volume]) {
        for volume in volumes {
            self.unpublish(volume).expect("unpublished");
            assert!(!volume.target.exists(), "the driver removes the target");
        }
        for volume in volumes {
            fs::remove_dir(volume.target.parent().expect("a parent")).expect("it is empty");
        }
        fs::remove_dir_all(self.seen.join(format!("pods/uid-{pod}"))).expect("removed");
    }

    pub fn stats(&self, id: &str, path: &Path) -> Result<NodeGetVolumeStatsResponse, Status> {
        let volume_path = path.to_str().expect("text").to_owned();
        let request = NodeGetVolumeStatsRequest { volume_id: id.to_owned(), volume_path, ..Default::default() };
        self.call(async |mut node| {
            node.node_get_volume_stats(Request::new(request)).await.map(|stats| stats.into_inner())
        })
    }
}

/// The endpoint with the authority that a kubelet uses for its calls of a driver.
fn local() -> Endpoint {
    Endpoint::from_static("http://localhost")
}

fn channel(endpoint: Endpoint, socket: &Path) -> Channel {
    let socket = socket.to_owned();
    endpoint.connect_with_connector_lazy(service_fn(move |_| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    }))
}

/// The capability that a kubelet requests for an inline volume.
pub fn capability(group: &str) -> VolumeCapability {
    let mount = MountVolume { volume_mount_group: group.to_owned(), ..MountVolume::default() };
    VolumeCapability {
        access_type: Some(AccessType::Mount(mount)),
        access_mode: Some(AccessMode { mode: Mode::SingleNodeWriter.into() }),
    }
}

/// The context of an inline volume: its attributes, and the keys that a kubelet adds.
pub fn context(pod: &str, uid: &str, attributes: &[(&str, &str)]) -> HashMap<String, String> {
    let of_kubelet = [
        ("csi.storage.k8s.io/ephemeral", "true"),
        ("csi.storage.k8s.io/pod.name", pod),
        ("csi.storage.k8s.io/pod.namespace", "default"),
        ("csi.storage.k8s.io/pod.uid", uid),
        ("csi.storage.k8s.io/serviceAccount.name", "default"),
        ("csi.storage.k8s.io/serviceAccount.tokens", r#"{"":{"token":"t0ken-of-the-pod"}}"#),
    ];
    of_kubelet.iter().chain(attributes).map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}
