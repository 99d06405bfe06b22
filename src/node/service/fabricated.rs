//! A node without a manager, for tests: they publish its states, and take its commands.

use std::sync::Arc;

use tokio::sync::{mpsc, watch};

use crate::manifest::pod::PodUid;
use crate::node::{ManagerCommand, MountState, NodeHandle, NodeState, PodEntry, PodOrigin, PodStage, VolumeEntry};

pub(super) const UID: &str = "6f1c0a54-2f0e-4c6e-9d4e-1b7a5f3c9e01";

pub(super) struct FakeManager {
    pub(super) states: watch::Sender<Arc<NodeState>>,
    pub(super) commands: mpsc::Receiver<ManagerCommand>,
}

impl FakeManager {
    pub(super) fn new(state: NodeState) -> (FakeManager, NodeHandle) {
        let (states, followed) = watch::channel(Arc::new(state));
        let (sender, commands) = mpsc::channel(16);
        (FakeManager { states, commands }, NodeHandle::new(followed, sender))
    }

    pub(super) fn publish(&self, state: NodeState) {
        self.states.send(Arc::new(state)).expect("a handle is there");
    }
}

/// A node that has found everything, and has these pods.
pub(super) fn node(pods: impl IntoIterator<Item = PodEntry>) -> NodeState {
    let by_uid = |pod: PodEntry| (PodUid::parse(&pod.uid).expect("a uid"), Arc::new(pod));
    let pods = pods.into_iter().map(by_uid).collect();
    NodeState { sources_ready: true, states_synced: true, pods, ..NodeState::default() }
}

/// The pod default/web, which runs and has these volumes.
pub(super) fn pod(volumes: impl IntoIterator<Item = VolumeEntry>) -> PodEntry {
    PodEntry {
        namespace: Some("default".to_owned()),
        name: Some("web".to_owned()),
        uid: UID.to_owned(),
        origin: Some(PodOrigin::Api),
        stage: Some(PodStage::Desired),
        released: false,
        processed: true,
        volumes: volumes.into_iter().collect(),
        errors: Vec::new(),
        notes: Vec::new(),
        supervisor: Some(7),
        containers: Vec::new(),
    }
}

/// A volume that a container uses.
pub(super) fn volume(name: &str, mount: MountState) -> VolumeEntry {
    VolumeEntry {
        name: name.to_owned(),
        unique_name: format!("kubernetes.io/configmap/{UID}-{name}"),
        plugin: "kubernetes.io/configmap".to_owned(),
        kind: "configMap".to_owned(),
        desired: true,
        mount,
        path: Some(format!("/var/lib/podfs/pods/{UID}/volumes/kubernetes.io~configmap/{name}").into()),
        read_only: true,
        selinux: None,
        group: None,
        attachable: Some(false),
        size: None,
        remount_required: false,
        reason: None,
    }
}
