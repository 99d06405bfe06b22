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
    /// The same pod as JSON, in the form of its source.
    pub manifest: Arc<Value>,
    /// The source that describes it.
    pub origin: PodOrigin,
    /// The stage of its life.
    pub stage: PodStage,
}

/// The source that describes a pod.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum PodOrigin {
    /// A manifest file: a static pod.
    File(PathBuf),
    /// The API server.
    Api,
    /// A kubelet that has published CSI volumes of it.
    Kubelet,
    /// `podfs node --nri` has chosen it: a container runtime mounts volumes of podfs in the place of the kubelet's.
    Runtime,
}

/// The stage of a pod's life, according to its source.
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
