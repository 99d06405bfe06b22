//! The pods of both sources as one list, for the manager.
//!
//! 1. A uid is one pod. If a static pod and a pod of the API server have one uid, only the static pod counts.
//! 2. A mirror pod of the API server is an image of a static pod, and never a pod of its own.
//! 3. Before a source has listed all its pods, a pod that it has not listed is unknown, not deleted.
//! 4. While podfs has not been able to read a file since its start, it keeps the pods that an earlier daemon read in
//!    the file.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use super::{FeedEvent, PodSource};
use crate::manifest::pod::PodUid;
use crate::node::pod::{NodePod, PodOrigin};

/// The annotation of a mirror pod: the kubelet's hash of the static pod, which is the static pod's uid.
const MIRROR: &str = "kubernetes.io/config.mirror";
/// The annotation of a mirror pod with the uid of its static pod.
const HASH: &str = "kubernetes.io/config.hash";
/// The annotation with the kubelet's source of a pod; `file` for a static pod.
const SOURCE: &str = "kubernetes.io/config.source";

pub(super) type PodsByUid = BTreeMap<PodUid, NodePod>;

/// The pods of both sources, and those that the manager has.
pub(super) struct MergedPods {
    /// The pods that an earlier daemon knew.
    earlier: Vec<NodePod>,
    /// The static pods, once the files were read.
    files: Option<PodsByUid>,
    /// The pods of the API server, once it has listed them.
    api: Option<PodsByUid>,
    /// The pods that the manager has.
    reported: PodsByUid,
}

impl MergedPods {
    pub(super) fn new(earlier: Vec<NodePod>) -> MergedPods {
        MergedPods { earlier, files: None, api: None, reported: PodsByUid::new() }
    }

    /// Takes the static pods. `unread` are files that podfs has never read.
    pub(super) fn take_files(&mut self, pods: &[NodePod], unread: &BTreeSet<PathBuf>) -> Vec<FeedEvent> {
        let mut files: PodsByUid = self
            .earlier
            .iter()
            .filter(|pod| matches!(&pod.origin, PodOrigin::File(file) if unread.contains(file)))
            .chain(pods)
            .map(|pod| (pod.pod.identity.uid.clone(), pod.clone()))
            .collect();
        // A pod that was created again in another file has another uid.
        let names: BTreeMap<_, _> =
            pods.iter().map(|pod| (pod.pod.identity.to_string(), &pod.pod.identity.uid)).collect();
        files.retain(|uid, pod| names.get(&pod.pod.identity.to_string()).is_none_or(|current| *current == uid));
        let is_first = self.files.replace(files).is_none();
        self.changes(is_first.then_some(PodSource::Files))
    }

    /// Takes the pods of the API server.
    pub(super) fn take_list(&mut self, pods: Vec<NodePod>) -> Vec<FeedEvent> {
        let pods = pods.into_iter().map(|pod| (pod.pod.identity.uid.clone(), pod)).collect();
        let is_first = self.api.replace(pods).is_none();
        self.changes(is_first.then_some(PodSource::Api))
    }

    /// Takes a new or changed pod of the API server.
    pub(super) fn put_pod(&mut self, pod: NodePod) -> Vec<FeedEvent> {
        self.api.get_or_insert_default().insert(pod.pod.identity.uid.clone(), pod);
        self.changes(None)
    }

    /// Takes the deletion of a pod of the API server.
    pub(super) fn remove_pod_of_api(&mut self, uid: &PodUid) -> Vec<FeedEvent> {
        self.api.get_or_insert_default().remove(uid);
        self.changes(None)
    }

    /// The changes that the manager does not have yet. Deletions come first: another pod may have the name of a deleted
    /// one.
    fn changes(&mut self, first: Option<PodSource>) -> Vec<FeedEvent> {
        let now = self.wanted();
        let gone = self.reported.iter().filter(|(uid, _)| !now.contains_key(uid));
        let mut events: Vec<_> =
            gone.map(|(uid, pod)| FeedEvent::Gone(PodSource::of(&pod.origin), uid.clone())).collect();
        let differs =
            |uid: &PodUid, pod: &NodePod| self.reported.get(uid).is_none_or(|reported| !is_same(reported, pod));
        let is_listed = |pod: &NodePod| first == Some(PodSource::of(&pod.origin));
        let put = now.iter().filter(|(uid, pod)| differs(uid, pod) && !is_listed(pod));
        events.extend(put.map(|(_, pod)| FeedEvent::Put(pod.clone())));
        if let Some(first) = first {
            events.push(FeedEvent::Pods(first, now.values().filter(|pod| is_listed(pod)).cloned().collect()));
        }
        self.reported = now;
        events
    }

    fn wanted(&self) -> PodsByUid {
        let mut wanted = self.files.clone().unwrap_or_default();
        for (uid, pod) in self.api.iter().flatten() {
            if !wanted.contains_key(uid) && !self.is_mirror(pod) {
                wanted.insert(uid.clone(), pod.clone());
            }
        }
        wanted
    }

    fn is_mirror(&self, pod: &NodePod) -> bool {
        let annotation = |name: &str| pod.pod.facts.annotations.get(name).map(String::as_str);
        let mut files = self.files.iter().flat_map(BTreeMap::values).map(|file| &file.pod.identity);
        let identity = &pod.pod.identity;
        annotation(MIRROR).is_some()
            || files.any(|file| {
                let has_name = (&file.namespace, &file.name) == (&identity.namespace, &identity.name);
                annotation(HASH) == Some(file.uid.as_str()) || has_name && annotation(SOURCE) == Some("file")
            })
    }
}

fn is_same(one: &NodePod, other: &NodePod) -> bool {
    let same_manifest = Arc::ptr_eq(&one.manifest, &other.manifest) || one.manifest == other.manifest;
    same_manifest && one.stage == other.stage && one.origin == other.origin
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::manifest::pod::Pod;
    use crate::manifest::{Document, Origin};
    use crate::node::pod::PodStage;

    fn pod(name: &str, uid: &str, annotations: Value, file: Option<&str>) -> NodePod {
        let metadata = json!({"name": name, "uid": uid, "annotations": annotations});
        let manifest = json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": []}});
        let origin = file.map_or(PodOrigin::Api, |file| PodOrigin::File(file.into()));
        let document = Document::of_server(Origin::file("test".as_ref()), manifest.clone()).expect("a document");
        let pod = Arc::new(Pod::parse(document).expect("a pod"));
        NodePod { pod, manifest: Arc::new(manifest), origin, stage: PodStage::Desired }
    }

    fn file(name: &str, uid: &str) -> NodePod {
        pod(name, uid, json!({}), Some(&format!("{name}.yaml")))
    }

    fn api(name: &str, uid: &str) -> NodePod {
        pod(name, uid, json!({}), None)
    }

    fn shown(events: Vec<FeedEvent>) -> Vec<String> {
        let name = |pod: &NodePod| format!("{} {:?}", pod.pod.identity.uid, PodSource::of(&pod.origin));
        let show = |event: FeedEvent| match event {
            FeedEvent::Pods(source, pods) => {
                format!("{source:?}: {}", pods.iter().map(name).collect::<Vec<_>>().join(", "))
            }
            FeedEvent::Put(pod) => format!("put {}", name(&pod)),
            FeedEvent::Gone(source, uid) => format!("gone {uid} {source:?}"),
            FeedEvent::Failure(..) | FeedEvent::Containers(..) => unreachable!("neither comes from here"),
        };
        events.into_iter().map(show).collect()
    }

    #[test]
    fn each_source_lists_its_pods_once_and_then_reports_changes() {
        let mut merge = MergedPods::new(Vec::new());
        let none = BTreeSet::new();
        assert_eq!(shown(merge.take_files(&[file("a", "u1")], &none)), ["Files: u1 Files"]);
        assert_eq!(shown(merge.take_list(vec![api("b", "u2")])), ["Api: u2 Api"]);
        assert_eq!(shown(merge.take_list(vec![api("b", "u2")])), Vec::<String>::new());
        assert_eq!(shown(merge.put_pod(api("c", "u3"))), ["put u3 Api"]);
        assert_eq!(shown(merge.remove_pod_of_api(&api("b", "u2").pod.identity.uid)), ["gone u2 Api"]);
        assert_eq!(shown(merge.take_files(&[], &none)), ["gone u1 Files"]);
    }

    #[test]
    fn a_pod_with_a_new_uid_comes_after_the_one_it_replaces() {
        let mut merge = MergedPods::new(Vec::new());
        let none = BTreeSet::new();
        merge.take_files(&[file("web", "u2")], &none);
        assert_eq!(shown(merge.take_files(&[file("web", "u1")], &none)), ["gone u2 Files", "put u1 Files"]);
    }

    #[test]
    fn a_static_pod_and_its_mirror_pod_count_once() {
        let none = BTreeSet::new();
        for (name, annotations) in [
            ("web-n1", json!({MIRROR: "u1", HASH: "u1", SOURCE: "file"})),
            ("web-n1", json!({MIRROR: "of another file"})),
            ("anything", json!({HASH: "u1"})),
            ("web", json!({SOURCE: "file"})),
        ] {
            let mut merge = MergedPods::new(Vec::new());
            merge.take_files(&[file("web", "u1")], &none);
            let mirror = pod(name, "u9", annotations.clone(), None);
            assert_eq!(shown(merge.take_list(vec![mirror])), ["Api: "], "{annotations}");
        }
        let mut merge = MergedPods::new(Vec::new());
        assert_eq!(
            shown(merge.take_list(vec![api("web", "u1"), pod("x", "u9", json!({HASH: "u1"}), None)])),
            ["Api: u1 Api, u9 Api"]
        );
        assert_eq!(shown(merge.take_files(&[file("web", "u1")], &none)), ["gone u9 Api", "Files: u1 Files"]);
        assert_eq!(shown(merge.take_files(&[], &none)), ["put u1 Api", "put u9 Api"]);
    }

    #[test]
    fn a_file_that_was_never_read_keeps_the_pods_of_an_earlier_daemon() {
        let mut merge = MergedPods::new(vec![file("web", "u1"), file("db", "u2")]);
        let unread = BTreeSet::from([PathBuf::from("web.yaml")]);
        assert_eq!(shown(merge.take_files(&[], &unread)), ["Files: u1 Files"]);
        assert_eq!(shown(merge.take_files(&[file("web", "u3")], &BTreeSet::new())), ["gone u1 Files", "put u3 Files"]);
    }
}
