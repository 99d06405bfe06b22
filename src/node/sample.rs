//! Pods for unit tests, from a few words.

use std::path::Path;
use std::sync::Arc;

use super::pod::{NodePod, PodOrigin, PodStage};
use crate::manifest::parse_documents;
use crate::manifest::pod::{Pod, PodUid};

/// A pod with these entries of `spec.volumes` (YAML flow maps). Its one container mounts those in `used`.
pub(crate) fn pod(uid: &str, volumes: &[&str], used: &[&str]) -> NodePod {
    let volumes: String = volumes.iter().map(|volume| format!("  - {volume}\n")).collect();
    let mounts: String = used.iter().map(|name| format!("    - {{name: {name}, mountPath: /{name}}}\n")).collect();
    let text = format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: p-{uid}, uid: \"{uid}\"}}\nspec:\n  volumes:\n{volumes}  containers:\n  \
         - name: c\n    volumeMounts:\n{mounts}"
    );
    let document = parse_documents(Path::new("pod.yaml"), text.as_bytes()).expect("YAML").remove(0);
    let manifest = Arc::new(document.clone().into_value());
    let pod = Arc::new(Pod::parse(document).expect("a pod"));
    NodePod { pod, manifest, origin: PodOrigin::Api, stage: PodStage::Desired }
}

/// A uid.
pub(crate) fn uid(text: &str) -> PodUid {
    PodUid::parse(text).expect("a uid")
}
