//! A pod of the node, as a manifest file or the API server describes it.

use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::manifest::pod::Pod;

/// A pod of the node.
#[derive(Clone, Debug)]
pub struct NodePod {
    /// The parsed pod.
    pub pod: Arc<Pod>,
    /// The same pod as JSON, as it was written.
    pub manifest: Arc<Value>,
    /// Which source describes it.
    pub origin: PodOrigin,
    /// How far it is in its life.
    pub stage: PodStage,
}

/// Which source describes a pod.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum PodOrigin {
    /// A manifest file: a static pod.
    File(PathBuf),
    /// The API server.
    Api,
    /// A kubelet that has published CSI volumes of it.
    Kubelet,
    /// The operator has chosen it: a container runtime mounts volumes of podfs in the place of the kubelet's.
    Runtime,
}

/// How far a pod is in its life, as its source says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum PodStage {
    /// Its containers run, or are going to.
    Desired,
    /// It has a `deletionTimestamp`: its containers are being stopped.
    Terminating,
    /// Its phase is `Succeeded` or `Failed`: its containers do not run again.
    Terminal,
}
