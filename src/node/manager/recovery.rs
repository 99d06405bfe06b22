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
    /// A pod that it served, whose checkpoint is gone or cannot be used. If no source describes the pod, podfs retires it
    /// (RC-04).
    Lost(PodUid),
    /// A pod whose checkpoint only another version of podfs can use. The pod may have a source that this version does not know, so it
    /// never counts as gone.
    Unknown(PodUid),
    /// No daemon has served the pod. podfs leaves a supervisor alone that no daemon has started.
    Nothing,
}

/// The pod of a valid checkpoint. Without a checkpoint, only the pod's source knows which volumes podfs has to serve.
pub fn recover(found: ReconstructedPod, recorder: &Recorder) -> RecoveredPod {
    let ReconstructedPod { uid, checkpoint, trouble, is_of_other_version, supervisor, is_of_daemon, .. } = found;
    let _span = spans::of_uid(&uid, None).entered();
    if let Some(trouble) = trouble.as_ref().filter(|_| is_of_other_version) {
        recorder.reconstructed(false);
        warn!(
            "pod {uid}: {trouble}; its volumes and its checkpoint stay as they are: release the pod when its containers have stopped, or \
             remove the checkpoint, and podfs serves the pod anew if a source describes it"
        );
        return RecoveredPod::Unknown(uid);
    }
    // A supervisor may have started while a daemon removed its pod.
    let has_no_checkpoint = || (checkpoint.is_none() && is_of_daemon).then(|| "its checkpoint is gone".to_owned());
    if let Some(trouble) = trouble.or_else(has_no_checkpoint) {
        recorder.reconstructed(false);
        warn!(
            "pod {uid}: {trouble}; its volumes stay as they are until its source describes it, and podfs removes them once all sources can be read and none does"
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
                "pod {uid}: its checkpoint is not valid: {error}; its volumes stay as they are until its source describes it, and podfs removes them once all sources can be read and none does"
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_without_a_checkpoint_is_lost_if_a_daemon_has_started_its_supervisor() {
        let of_daemon = |is_of_daemon| {
            let found = ReconstructedPod {
                uid: PodUid::parse("u").expect("a uid"),
                checkpoint: None,
                trouble: None,
                is_of_other_version: false,
                supervisor: FoundSupervisor::Alive(std::process::id()),
                is_of_daemon,
                volumes: Vec::new(),
            };
            recover(found, &Recorder::default())
        };
        assert!(matches!(of_daemon(true), RecoveredPod::Lost(uid) if uid.as_str() == "u"));
        assert!(matches!(of_daemon(false), RecoveredPod::Nothing));
    }
}
