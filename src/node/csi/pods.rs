//! The pods that the publications of a kubelet make: each has the volumes that the kubelet wants, and everything else from the
//! pod's source, the API server or a manifest file. Plain data.
//!
//! 1. A pod is there while it has a publication. Pods without one are known, and never mounted.
//! 2. A volume with fields of the pod waits until a source has told of the pod; others need not wait.
//! 3. A pod that its source does not have any more keeps what the source said last: its containers may still run.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value, json};
use tracing::warn;

use super::Publication;
use crate::manifest::pod::{Pod, PodUid};
use crate::manifest::{Document, Origin};
use crate::node::feed::{FeedEvent, PodSource};
use crate::node::pod::{NodePod, PodOrigin, PodStage};

/// The pods of a kubelet's publications.
#[derive(Debug, Default)]
pub struct KubeletPods {
    /// What the sources say, by uid.
    described: BTreeMap<PodUid, NodePod>,
    /// The publications, by target.
    publications: BTreeMap<PathBuf, Publication>,
}

/// What a kubelet has changed.
#[derive(Clone, Debug)]
pub enum KubeletChange {
    /// It wants the volume at its target.
    Published(Box<Publication>),
    /// It wants nothing at the target any more.
    Unpublished(PathBuf),
}

impl KubeletPods {
    /// Begins with the publications that an earlier daemon wrote down.
    pub fn new(publications: BTreeMap<PathBuf, Publication>) -> KubeletPods {
        KubeletPods { described: BTreeMap::new(), publications }
    }

    /// What the manager hears first: all pods.
    pub fn first(&self) -> FeedEvent {
        let mut uids: Vec<PodUid> = self.publications.values().map(Publication::uid).collect();
        uids.sort();
        uids.dedup();
        FeedEvent::Pods(PodSource::Kubelet, uids.iter().filter_map(|uid| self.pod(uid)).collect())
    }

    /// Takes what a source says of pods. Gives what the manager hears.
    pub fn hear(&mut self, event: FeedEvent) -> Vec<FeedEvent> {
        match event {
            FeedEvent::Pods(_, pods) => pods.into_iter().filter_map(|pod| self.describe(pod)).collect(),
            FeedEvent::Put(pod) => self.describe(pod).into_iter().collect(),
            FeedEvent::Gone(_, uid) => {
                if !self.is_published(&uid) {
                    self.described.remove(&uid);
                }
                Vec::new()
            }
            trouble @ FeedEvent::Trouble(..) => vec![trouble],
        }
    }

    /// Takes what the kubelet has changed. Gives what the manager hears.
    pub fn change(&mut self, change: KubeletChange) -> Option<FeedEvent> {
        let uid = match change {
            KubeletChange::Published(publication) => {
                let uid = publication.uid();
                self.publications.insert(publication.target.clone(), *publication);
                uid
            }
            KubeletChange::Unpublished(target) => self.publications.remove(&target)?.uid(),
        };
        match self.is_published(&uid) {
            true => self.pod(&uid).map(FeedEvent::Put),
            false => Some(FeedEvent::Gone(PodSource::Kubelet, uid)),
        }
    }

    fn describe(&mut self, pod: NodePod) -> Option<FeedEvent> {
        let uid = self.uid_for(&pod);
        self.described.insert(uid.clone(), pod);
        self.pod(&uid).map(FeedEvent::Put)
    }

    /// The kubelet may give a static pod another uid than podfs: then the name decides.
    fn uid_for(&self, pod: &NodePod) -> PodUid {
        let identity = &pod.pod.identity;
        let is_static = matches!(pod.origin, PodOrigin::File(_)) && !self.is_published(&identity.uid);
        let is_named = |publication: &&Publication| {
            (&publication.pod.namespace, &publication.pod.name) == (&identity.namespace, &identity.name)
        };
        let named = self.publications.values().find(is_named).filter(|_| is_static);
        named.map_or_else(|| identity.uid.clone(), Publication::uid)
    }

    fn is_published(&self, uid: &PodUid) -> bool {
        self.of(uid).next().is_some()
    }

    fn of(&self, uid: &PodUid) -> impl Iterator<Item = &Publication> {
        self.publications.values().filter(move |publication| publication.pod.uid == uid.as_str())
    }

    /// What a source says of the pod.
    fn description(&self, uid: &PodUid, publication: &Publication) -> Option<&NodePod> {
        let is_named = |pod: &&NodePod| {
            let identity = &pod.pod.identity;
            matches!(pod.origin, PodOrigin::File(_))
                && (&identity.namespace, &identity.name) == (&publication.pod.namespace, &publication.pod.name)
        };
        self.described.get(uid).or_else(|| self.described.values().find(is_named))
    }

    /// The pod with the volumes that the kubelet wants now, if it wants any.
    fn pod(&self, uid: &PodUid) -> Option<NodePod> {
        let first = self.of(uid).next()?;
        let described = self.description(uid, first);
        let manifest = described.map(|pod| Value::clone(&pod.manifest)).unwrap_or_else(|| bare(first));
        let volumes = self.of(uid).filter(|publication| described.is_some() || !publication.needs_pod);
        let manifest = with_volumes(manifest, uid, &volumes.collect::<Vec<_>>());
        let document = Document::of_server(Origin::file(Path::new("pod of the kubelet")), manifest.clone());
        match document.and_then(Pod::parse) {
            Ok(pod) => {
                let (pod, manifest) = (Arc::new(pod), Arc::new(manifest));
                Some(NodePod { pod, manifest, origin: PodOrigin::Kubelet, stage: PodStage::Desired })
            }
            Err(error) => {
                warn!("pod {}/{}: its volumes stay as they are: {error}", first.pod.namespace, first.pod.name);
                None
            }
        }
    }
}

/// What the kubelet says of a pod.
fn bare(publication: &Publication) -> Value {
    let pod = &publication.pod;
    let mut spec = json!({"containers": []});
    if !pod.service_account.is_empty() {
        spec["serviceAccountName"] = json!(pod.service_account);
    }
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": pod.name, "namespace": pod.namespace, "uid": pod.uid},
        "spec": spec,
    })
}

/// The manifest with these volumes and no others, each used by a container.
fn with_volumes(mut manifest: Value, uid: &PodUid, publications: &[&Publication]) -> Value {
    manifest["metadata"]["uid"] = json!(uid.as_str());
    let spec = &mut manifest["spec"];
    let volumes = publications.iter().map(|publication| {
        let mut volume = publication.volume.clone();
        volume["name"] = json!(publication.name);
        volume
    });
    spec["volumes"] = volumes.collect();
    if let Some(group) = publications.iter().find_map(|publication| publication.group) {
        if !spec["securityContext"].is_object() {
            spec["securityContext"] = Value::Object(Map::new());
        }
        spec["securityContext"]["fsGroup"] = json!(group);
    }
    let uses = |spec: &Value, name: &str| {
        let containers = spec["containers"].as_array().into_iter().flatten();
        containers
            .flat_map(|container| container["volumeMounts"].as_array().into_iter().flatten())
            .any(|mount| mount["name"] == name)
    };
    let unused = publications.iter().filter(|publication| !uses(spec, &publication.name));
    let mounts: Vec<Value> =
        unused.map(|one| json!({"name": one.name, "mountPath": format!("/.podfs/{}", one.name)})).collect();
    if !spec["containers"].is_array() {
        spec["containers"] = json!([]);
    }
    if let Some(containers) = spec["containers"].as_array_mut().filter(|_| !mounts.is_empty()) {
        if containers.is_empty() {
            containers.push(json!({"name": "container"}));
        }
        match containers[0]["volumeMounts"].as_array_mut() {
            Some(all) => all.extend(mounts),
            None => containers[0]["volumeMounts"] = Value::Array(mounts),
        }
    }
    manifest
}

#[cfg(test)]
mod tests {
    use super::super::publication::PublishedPod;
    use super::*;
    use crate::node::sample;

    fn publication(volume: &str, needs_pod: bool) -> Publication {
        let pod = PublishedPod {
            uid: "u".to_owned(),
            namespace: "default".to_owned(),
            name: "p-u".to_owned(),
            service_account: String::new(),
        };
        let kind = json!({"configMap": {"name": volume}});
        let target = PathBuf::from(format!("/k/pods/u/{volume}/mount"));
        let mut publication = Publication::new(volume.to_owned(), target, pod, volume.to_owned(), kind);
        publication.needs_pod = needs_pod;
        publication.group = Some(7);
        publication
    }

    fn names(event: Option<FeedEvent>) -> Vec<String> {
        match event {
            Some(FeedEvent::Put(pod)) => {
                assert_eq!((pod.origin, pod.pod.facts.fs_group), (PodOrigin::Kubelet, Some(7)));
                pod.pod.volumes.iter().map(|volume| volume.name.to_string()).collect()
            }
            Some(FeedEvent::Gone(PodSource::Kubelet, uid)) => vec![format!("gone {uid}")],
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_pod_has_the_volumes_that_the_kubelet_wants_and_goes_with_the_last() {
        let mut pods = KubeletPods::default();
        let published = |publication: Publication| KubeletChange::Published(Box::new(publication));
        let FeedEvent::Pods(PodSource::Kubelet, none) = pods.first() else { panic!("all pods come first") };
        assert!(none.is_empty());
        assert_eq!(names(pods.change(published(publication("a", false)))), ["a"]);
        assert_eq!(names(pods.change(published(publication("d", true)))), ["a"], "its pod is not known yet");
        let described = sample::pod("u", &["{name: other, emptyDir: {}}"], &["other"]);
        assert_eq!(names(pods.hear(FeedEvent::Put(described)).pop()), ["a", "d"]);
        let neighbour = sample::pod("v", &["{name: other, emptyDir: {}}"], &["other"]);
        assert!(pods.hear(FeedEvent::Put(neighbour)).is_empty(), "it has no publication");
        assert!(pods.hear(FeedEvent::Gone(PodSource::Api, sample::uid("u"))).is_empty(), "its containers may run");
        assert_eq!(names(pods.change(KubeletChange::Unpublished(publication("a", false).target))), ["d"]);
        assert_eq!(names(pods.change(KubeletChange::Unpublished(publication("d", false).target))), ["gone u"]);
        assert!(pods.change(KubeletChange::Unpublished("/k/pods/u/a/mount".into())).is_none());
    }
}
