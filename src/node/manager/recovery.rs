//! Pods of an earlier daemon, with which this daemon continues.

use std::sync::Arc;

use tracing::{info, warn};

use crate::manifest::pod::{Pod, PodUid};
use crate::manifest::{Document, Origin};
use crate::node::checkpoint::Checkpoint;
use crate::node::metrics::Recorder;
use crate::node::pod::{NodePod, PodStage};
use crate::node::reconstruct::{FoundSupervisor, ReconstructedPod};
use crate::node::spans;

/// A pod that an earlier daemon served.
pub struct Recovered {
    /// The pod, as its source described it then.
    pub pod: NodePod,
    /// Whether an agent has released it.
    pub released: bool,
    /// The names of the volumes that its supervisor serves, or should serve.
    pub volumes: Vec<String>,
    /// Whether it has a supervisor even without a volume.
    pub without_volumes: bool,
}

/// Whether this daemon can continue with a pod of which it has found something.
pub enum RecoveredPod {
    /// A pod that it served.
    Pod(Recovered),
    /// A pod that it served, whose checkpoint this daemon cannot use. If no source describes the pod, podfs retires it
    /// (RC-04).
    Lost(PodUid),
    /// No daemon has served the pod. podfs leaves a supervisor alone that no daemon has started.
    Nothing,
}

/// The pod of a valid checkpoint. Without a checkpoint, only the pod's source knows which volumes podfs has to serve.
pub fn recover(found: ReconstructedPod, recorder: &Recorder) -> RecoveredPod {
    let ReconstructedPod { uid, checkpoint, trouble, supervisor, .. } = found;
    let _span = spans::of_uid(&uid, None).entered();
    if let Some(trouble) = trouble {
        recorder.reconstructed(false);
        warn!(
            "pod {uid}: {trouble}; its volumes stay as they are until its source describes it, and podfs removes them if none does"
        );
        return RecoveredPod::Lost(uid);
    }
    let Some(checkpoint) = checkpoint else { return RecoveredPod::Nothing };
    let origin = Origin::file(uid.as_str().as_ref());
    let parsed = Document::of_server(origin, (*checkpoint.manifest).clone()).and_then(Pod::parse);
    let pod = match parsed {
        Ok(pod) => pod,
        Err(error) => {
            recorder.reconstructed(false);
            warn!(
                "pod {uid}: its checkpoint is not valid: {error}; its volumes stay as they are until its source describes it, and podfs removes them if none does"
            );
            return RecoveredPod::Lost(uid);
        }
    };
    recorder.reconstructed(true);
    let state = match supervisor {
        FoundSupervisor::Alive(pid) => format!("with its supervisor (pid {pid})"),
        FoundSupervisor::Dead => "without a supervisor".to_owned(),
    };
    spans::set_pod(&pod.identity.namespace, &pod.identity.name);
    info!("pod {}: found {state}", pod.identity);
    let pod = NodePod {
        pod: Arc::new(pod),
        manifest: Arc::clone(&checkpoint.manifest),
        origin: checkpoint.origin.clone(),
        stage: PodStage::Desired,
    };
    let Checkpoint { released, volumes, without_volumes, .. } = checkpoint;
    RecoveredPod::Pod(Recovered { pod, released, volumes: volumes.into_iter().collect(), without_volumes })
}
