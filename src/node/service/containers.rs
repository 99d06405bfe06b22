//! Containers: the service forwards requests about a pod's containers to the pod's supervisor, and returns its answers.

use std::path::PathBuf;

use tokio::task::spawn_blocking;
use tonic::Status;

use super::proto;
use super::proto::container_mount::Source;
use crate::mounts::{AgentFacts, ContainerMount, DeviceNode, IdMapping, MountSource, Propagation};
use crate::supervisor::control::{ContainerRequest, ControlAnswer, ControlQuestion, ask};

/// How many times the service asks a busy supervisor: each answer that it is busy takes a second and a half.
const TRIES: u32 = 4;

/// The answer of the supervisor of the pod with this run directory.
pub(super) async fn answer(directory: PathBuf, question: ControlQuestion) -> Result<ControlAnswer, Status> {
    let answer = spawn_blocking(move || {
        let mut reason = String::new();
        for _ in 0..TRIES {
            match ask(&directory, &question, None) {
                Err(error) => return Err(Status::unavailable(error.to_string())),
                Ok(ControlAnswer::Busy(busy)) => reason = busy,
                Ok(ControlAnswer::Refused(reason)) => return Err(Status::failed_precondition(reason)),
                Ok(answer) => return Ok(answer),
            }
        }
        Err(Status::unavailable(reason))
    });
    answer.await.unwrap_or_else(|_| Err(Status::internal("the question was not asked to its end")))
}

/// The request for the supervisor.
pub(super) fn request(message: proto::PrepareContainerRequest) -> Result<ContainerRequest, Status> {
    let proto::PrepareContainerRequest { container, environment, pod_ips, hostname, host_network, .. } = message;
    let (uid_mappings, gid_mappings) = (message.uid_mappings, message.gid_mappings);
    let address = |text: String| {
        text.parse().map_err(|_| {
            Status::invalid_argument(format!("pod_ips: {text:?} is no address; write 10.0.0.7 or fd00::7"))
        })
    };
    let environment = AgentFacts {
        variables: environment.into_iter().collect(),
        pod_ips: pod_ips.into_iter().map(address).collect::<Result<_, _>>()?,
        hostname,
        host_network,
        uid_mappings: id_mappings("uid_mappings", uid_mappings)?,
        gid_mappings: id_mappings("gid_mappings", gid_mappings)?,
    };
    let recursive_read_only = message.recursive_read_only;
    Ok(ContainerRequest { container, environment, recursive_read_only, only_volumes: false })
}

fn id_mappings(field: &str, messages: Vec<proto::IdMapping>) -> Result<Vec<IdMapping>, Status> {
    let mapping = |proto::IdMapping { container_id, host_id, length }| {
        IdMapping::new(container_id, host_id, length)
            .map_err(|error| Status::invalid_argument(format!("{field}: {error}")))
    };
    messages.into_iter().map(mapping).collect()
}

fn id_mapping(mapping: IdMapping) -> proto::IdMapping {
    let (container_id, host_id, length) = (mapping.container_id(), mapping.host_id(), mapping.length());
    proto::IdMapping { container_id, host_id, length }
}

/// A mount as a message. A path that is not UTF-8 has no message.
pub(super) fn mount(mount: ContainerMount) -> Result<proto::ContainerMount, Status> {
    let source = match mount.source {
        MountSource::HostPath(path) => match path.into_os_string().into_string() {
            Ok(path) => Source::HostPath(path),
            Err(path) => {
                return Err(Status::failed_precondition(format!("the path {} is not UTF-8", path.display())));
            }
        },
        MountSource::Device(DeviceNode { path, major, minor }) => match path.into_os_string().into_string() {
            Ok(host_path) => Source::Device(proto::DeviceSource { host_path, major, minor }),
            Err(path) => {
                return Err(Status::failed_precondition(format!("the path {} is not UTF-8", path.display())));
            }
        },
        MountSource::Image { reference, sub_path } => Source::Image(proto::ImageSource { reference, sub_path }),
    };
    let propagation = match mount.propagation {
        Propagation::Private => proto::Propagation::Private,
        Propagation::HostToContainer => proto::Propagation::HostToContainer,
        Propagation::Bidirectional => proto::Propagation::Bidirectional,
    };
    Ok(proto::ContainerMount {
        name: mount.name,
        container_path: mount.container_path,
        source: Some(source),
        read_only: mount.read_only,
        recursive_read_only: mount.recursive_read_only,
        propagation: propagation.into(),
        selinux_relabel: mount.selinux_relabel,
        id_mapped: mount.id_mapped,
        nosuid: mount.nosuid,
        nodev: mount.nodev,
        noexec: mount.noexec,
        uid_mappings: mount.uid_mappings.into_iter().map(id_mapping).collect(),
        gid_mappings: mount.gid_mappings.into_iter().map(id_mapping).collect(),
    })
}
