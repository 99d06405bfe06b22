//! The published state of the node. The manager publishes it after each change; commands and agents read it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::pod::{PodOrigin, PodStage};
use crate::manifest::pod::PodUid;

/// The state of the node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeState {
    /// Whether every source has listed its pods once. Until then, podfs unmounts nothing (VM-02).
    pub sources_ready: bool,
    /// Whether the daemon has found everything that an earlier daemon left.
    pub states_synced: bool,
    /// The problems of the sources of pods, one sentence each.
    pub trouble: Vec<String>,
    /// The pods, wanted or still mounted.
    pub pods: BTreeMap<PodUid, Arc<PodEntry>>,
}

/// A pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodEntry {
    /// Its namespace; absent for a pod of which only directories were found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Its name; absent for the same reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Its uid.
    pub uid: String,
    /// The source that describes it, or has described it to an earlier daemon and has not listed its pods yet; absent when no
    /// source describes it any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<PodOrigin>,
    /// The stage of its life; absent while no source describes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stage: Option<PodStage>,
    /// Whether an agent has reported that its containers have stopped.
    pub released: bool,
    /// Whether the populator has taken all its volumes into the desired state, and a pod without volumes has its
    /// supervisor.
    pub processed: bool,
    /// Its volumes that a container uses, or that are mounted, in the manifest's order.
    pub volumes: Vec<VolumeEntry>,
    /// At most ten distinct errors, the oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<String>,
    /// What is unusual about it without being an error: a volume that stays until the pod is released,
    /// a supervisor that does not end, or why volumes do not follow their objects.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// The process id of its supervisor, while there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub supervisor: Option<u32>,
    /// Its containers, where podfs is a plugin of the container runtime.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub containers: Vec<ContainerEntry>,
}

/// A container of a chosen pod: where it has volumes of podfs, and where it has the kubelet's volumes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerEntry {
    /// Its id in the runtime.
    pub id: String,
    /// Its name in the pod.
    pub name: String,
    /// The paths in the container with volumes of podfs.
    pub replaced: Vec<String>,
    /// The paths in the container with the kubelet's volumes, although podfs serves the pod.
    pub kept: Vec<KeptMount>,
}

/// A mount of the kubelet's volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct KeptMount {
    /// The path in the container.
    pub path: String,
    /// Why the container has the kubelet's volume; absent if the runtime created the container without podfs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// A volume of a pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeEntry {
    /// Its name in the pod.
    pub name: String,
    /// Its name on the node: `kubernetes.io/configmap/UID-NAME`.
    pub unique_name: String,
    /// The volume plugin that serves it: `kubernetes.io/configmap`.
    pub plugin: String,
    /// Its kind, as in the manifest: `configMap`.
    pub kind: String,
    /// Whether it is in the desired world: podfs has to serve the pod, and a container of the pod uses the volume.
    pub desired: bool,
    /// Its mount.
    pub mount: MountState,
    /// Where it is mounted, or is going to be, once that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// Whether containers can only read it.
    pub read_only: bool,
    /// Its SELinux label, if the node uses SELinux and it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selinux: Option<String>,
    /// A supplemental group that containers need to use it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<u32>,
    /// Whether a controller of the cluster attaches it to the node; absent while unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attachable: Option<bool>,
    /// How many bytes it may have: the capacity of its PersistentVolume, or the sizeLimit of an emptyDir.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// Whether an agent has asked to refresh it, and the refresh has not ended.
    pub remount_required: bool,
    /// Why it is not mounted, or not current.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// The mount of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum MountState {
    /// It is not mounted, and has no parts that podfs would have to unmount.
    NotMounted,
    /// A mount or an unmount did not end: a part of it may be mounted, and podfs may have to unmount it later.
    Uncertain,
    /// It is mounted.
    Mounted,
}

impl NodeState {
    /// The pod with this uid, or with this `namespace/name`. If several pods have the name, prefers one that a source
    /// describes.
    pub fn find(&self, pod: &str) -> Option<(&PodUid, &Arc<PodEntry>)> {
        self.find_first(pod, |entry| (entry.stage.is_none(), false))
    }

    /// As [`Self::find`], but prefers a pod that no source describes any more.
    pub fn find_ending(&self, pod: &str) -> Option<(&PodUid, &Arc<PodEntry>)> {
        self.find_first(pod, |entry| (entry.stage.is_some(), false))
    }

    /// As [`Self::find`], but prefers a pod that no source describes any more and that was not released.
    pub fn find_unreleased(&self, pod: &str) -> Option<(&PodUid, &Arc<PodEntry>)> {
        self.find_first(pod, |entry| (entry.stage.is_some() || entry.released, entry.stage.is_none()))
    }

    /// The pod with this uid, or the first one with this name in the order of `key`.
    fn find_first(&self, pod: &str, key: fn(&PodEntry) -> (bool, bool)) -> Option<(&PodUid, &Arc<PodEntry>)> {
        let named = |entry: &PodEntry| matches!((&entry.namespace, &entry.name), (Some(namespace), Some(name)) if pod.split_once('/') == Some((namespace, name)));
        let by_uid = PodUid::parse(pod).ok().and_then(|uid| self.pods.get_key_value(&uid));
        by_uid.or_else(|| self.pods.iter().filter(|(_, entry)| named(entry)).min_by_key(|(_, entry)| key(entry)))
    }
}

impl PodEntry {
    /// Whether an earlier daemon served it, and no source of this daemon has said whether it still exists.
    pub fn is_unknown(&self) -> bool {
        self.origin.is_some() && self.stage.is_none()
    }

    /// `default/web`, or the uid if its name is unknown.
    pub fn title(&self) -> String {
        match (&self.namespace, &self.name) {
            (Some(namespace), Some(name)) => format!("{namespace}/{name}"),
            _ => self.uid.clone(),
        }
    }
}
