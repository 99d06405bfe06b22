//! The state of the node as messages, and messages as the state.

use std::path::PathBuf;
use std::sync::Arc;

use super::proto;
use crate::manifest::pod::PodUid;
use crate::node::{ContainerEntry, KeptMount, MountState, NodeState, PodEntry, PodOrigin, PodStage, VolumeEntry};

/// The state of the node as a message.
pub(super) fn state_message(state: &NodeState) -> proto::GetStateResponse {
    proto::GetStateResponse {
        sources_ready: state.sources_ready,
        states_synced: state.states_synced,
        trouble: state.trouble.clone(),
        pods: state.pods.values().map(|pod| pod_message(pod)).collect(),
    }
}

/// A pod as a message.
pub(super) fn pod_message(pod: &PodEntry) -> proto::Pod {
    let (origin, file) = match &pod.origin {
        None => (proto::Origin::Unspecified, String::new()),
        Some(PodOrigin::File(path)) => (proto::Origin::File, path.display().to_string()),
        Some(PodOrigin::Api) => (proto::Origin::Api, String::new()),
        Some(PodOrigin::Kubelet) => (proto::Origin::Kubelet, String::new()),
        Some(PodOrigin::Runtime) => (proto::Origin::Runtime, String::new()),
    };
    let stage = match pod.stage {
        None => proto::Stage::Unspecified,
        Some(PodStage::Desired) => proto::Stage::Desired,
        Some(PodStage::Terminating) => proto::Stage::Terminating,
        Some(PodStage::Terminal) => proto::Stage::Terminal,
    };
    proto::Pod {
        uid: pod.uid.clone(),
        namespace: pod.namespace.clone().unwrap_or_default(),
        name: pod.name.clone().unwrap_or_default(),
        origin: origin.into(),
        file,
        stage: stage.into(),
        released: pod.released,
        processed: pod.processed,
        volumes: pod.volumes.iter().map(volume_message).collect(),
        errors: pod.errors.clone(),
        notes: pod.notes.clone(),
        supervisor: pod.supervisor,
        containers: pod.containers.iter().map(container_message).collect(),
    }
}

fn container_message(container: &ContainerEntry) -> proto::PodContainer {
    let kept = |mount: &KeptMount| proto::KeptMount {
        path: mount.path.clone(),
        reason: mount.reason.clone().unwrap_or_default(),
    };
    proto::PodContainer {
        id: container.id.clone(),
        name: container.name.clone(),
        replaced: container.replaced.clone(),
        kept: container.kept.iter().map(kept).collect(),
    }
}

fn volume_message(volume: &VolumeEntry) -> proto::Volume {
    let mount = match volume.mount {
        MountState::NotMounted => proto::Mount::None,
        MountState::Uncertain => proto::Mount::Uncertain,
        MountState::Mounted => proto::Mount::Mounted,
    };
    proto::Volume {
        name: volume.name.clone(),
        unique_name: volume.unique_name.clone(),
        plugin: volume.plugin.clone(),
        kind: volume.kind.clone(),
        desired: volume.desired,
        mount: mount.into(),
        path: volume.path.as_ref().map(|path| path.display().to_string()).unwrap_or_default(),
        read_only: volume.read_only,
        selinux_label: volume.selinux.clone(),
        supplemental_group: volume.group,
        attachable: volume.attachable,
        size_bytes: volume.size,
        remount_required: volume.remount_required,
        reason: volume.reason.clone().unwrap_or_default(),
    }
}

/// The mounted volumes of a pod as messages.
pub(super) fn mounted_messages(pod: &PodEntry) -> Vec<proto::MountedVolume> {
    let mounted = pod.volumes.iter().filter(|volume| volume.mount == MountState::Mounted);
    let message = |volume: &VolumeEntry| {
        Some(proto::MountedVolume {
            name: volume.name.clone(),
            path: volume.path.as_ref()?.display().to_string(),
            kind: volume.kind.clone(),
            read_only: volume.read_only,
            selinux_label: volume.selinux.clone(),
            supplemental_group: volume.group,
        })
    };
    mounted.filter_map(message).collect()
}

/// The state in a message, without fields that this program does not know.
pub(super) fn state(message: proto::GetStateResponse) -> NodeState {
    let by_uid = |pod: proto::Pod| Some((PodUid::parse(&pod.uid).ok()?, Arc::new(self::pod(pod))));
    NodeState {
        sources_ready: message.sources_ready,
        states_synced: message.states_synced,
        trouble: message.trouble,
        pods: message.pods.into_iter().filter_map(by_uid).collect(),
    }
}

fn pod(message: proto::Pod) -> PodEntry {
    let origin = match message.origin() {
        proto::Origin::Unspecified => None,
        proto::Origin::File => Some(PodOrigin::File(PathBuf::from(&message.file))),
        proto::Origin::Api => Some(PodOrigin::Api),
        proto::Origin::Kubelet => Some(PodOrigin::Kubelet),
        proto::Origin::Runtime => Some(PodOrigin::Runtime),
    };
    let stage = match message.stage() {
        proto::Stage::Unspecified => None,
        proto::Stage::Desired => Some(PodStage::Desired),
        proto::Stage::Terminating => Some(PodStage::Terminating),
        proto::Stage::Terminal => Some(PodStage::Terminal),
    };
    PodEntry {
        namespace: non_empty(message.namespace),
        name: non_empty(message.name),
        uid: message.uid,
        origin,
        stage,
        released: message.released,
        processed: message.processed,
        volumes: message.volumes.into_iter().map(volume).collect(),
        errors: message.errors,
        notes: message.notes,
        supervisor: message.supervisor,
        containers: message.containers.into_iter().map(container).collect(),
    }
}

fn container(message: proto::PodContainer) -> ContainerEntry {
    let proto::PodContainer { id, name, replaced, kept } = message;
    let kept = kept.into_iter().map(|mount| KeptMount { path: mount.path, reason: non_empty(mount.reason) });
    ContainerEntry { id, name, replaced, kept: kept.collect() }
}

fn volume(message: proto::Volume) -> VolumeEntry {
    let mount = match message.mount() {
        proto::Mount::None => MountState::NotMounted,
        // An unknown value counts as uncertain.
        proto::Mount::Unspecified | proto::Mount::Uncertain => MountState::Uncertain,
        proto::Mount::Mounted => MountState::Mounted,
    };
    VolumeEntry {
        name: message.name,
        unique_name: message.unique_name,
        plugin: message.plugin,
        kind: message.kind,
        desired: message.desired,
        mount,
        path: non_empty(message.path).map(PathBuf::from),
        read_only: message.read_only,
        selinux: message.selinux_label,
        group: message.supplemental_group,
        attachable: message.attachable,
        size: message.size_bytes,
        remount_required: message.remount_required,
        reason: non_empty(message.reason),
    }
}

fn non_empty(text: String) -> Option<String> {
    Some(text).filter(|text| !text.is_empty())
}
