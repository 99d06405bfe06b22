//! The pods of a node with a kubelet. The sources, the API server or manifest files, describe the pods; the
//! publications of the kubelet ([`publication`](crate::node::publication)) and the choice of the operator
//! ([`chosen`](super::chosen)) decide which of their volumes podfs serves. Plain data.
//!
//! 1. podfs mounts volumes of a pod only while the pod has a publication or is chosen.
//! 2. A volume with fields of the pod waits until a source describes the pod; others need not wait.
//! 3. A pod that its source no longer has keeps its last description: its containers may still run.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value, json};
use tracing::warn;

use super::chosen::{Chosen, RuntimeChange, with_payload_volumes};
use super::{FeedEvent, PodSource};
use crate::manifest::pod::{Pod, PodUid};
use crate::manifest::{Document, Origin};
use crate::node::pod::{NodePod, PodOrigin, PodStage};
use crate::node::publication::Publication;
use crate::node::spans;
use crate::volume::{forget_other_volumes, set_mount_options};

/// The pods of a node with a kubelet.
#[derive(Debug, Default)]
pub struct KubeletPods {
    /// The pods as the sources describe them, by uid.
    described: BTreeMap<PodUid, NodePod>,
    /// The publications, by target.
    publications: BTreeMap<PathBuf, Publication>,
    /// The pods that are chosen, where podfs serves the containers of the runtime.
    chosen: Option<Chosen>,
    /// The chosen pods that the manager has.
    reported: BTreeSet<PodUid>,
}

/// A change that a kubelet has made.
#[derive(Clone, Debug)]
pub enum KubeletChange {
    /// The kubelet wants the volume at its target.
    Published(Box<Publication>),
    /// The kubelet no longer wants a volume at the target.
    Unpublished(PathBuf),
}

impl KubeletPods {
    /// Starts with the publications of an earlier daemon.
    pub fn publish(&mut self, publications: BTreeMap<PathBuf, Publication>) -> FeedEvent {
        self.publications = publications;
        self.published()
    }

    /// The pods with publications, as the kubelet's first list for the manager.
    pub fn published(&self) -> FeedEvent {
        let uids: BTreeSet<PodUid> = self.publications.values().map(Publication::uid).collect();
        FeedEvent::Pods(PodSource::Kubelet, uids.iter().filter_map(|uid| self.pod(uid)).collect())
    }

    /// Starts with the pods that an earlier daemon served for the runtime. Their checkpoints have the publications,
    /// too.
    pub fn choose(&mut self, chosen: Chosen, earlier: &[NodePod]) -> FeedEvent {
        self.chosen = Some(chosen);
        let mut pods = Vec::new();
        for pod in earlier {
            let uid = pod.pod.identity.uid.clone();
            let published: BTreeSet<&str> = self.of(&uid).map(|publication| publication.name.as_str()).collect();
            let manifest = Arc::new(without(Value::clone(&pod.manifest), &published));
            self.described.insert(uid.clone(), NodePod { manifest, ..pod.clone() });
            self.reported.insert(uid.clone());
            if self.is_served(&uid) {
                pods.extend(self.pod(&uid));
            }
        }
        FeedEvent::Pods(PodSource::Runtime, pods)
    }

    /// Takes a change of a source. Returns the changes for the manager.
    pub fn change_source(&mut self, event: FeedEvent) -> Vec<FeedEvent> {
        match event {
            FeedEvent::Pods(source, pods) => {
                let mut events: Vec<_> = pods.into_iter().filter_map(|pod| self.describe(pod)).collect();
                if let Some(chosen) = &mut self.chosen {
                    for uid in chosen.note_list() {
                        events.extend(self.change_of(&uid));
                        self.forget_gone(&uid);
                    }
                    // The manager unmounts nothing before the sources have listed their pods.
                    events.push(FeedEvent::Pods(source, Vec::new()));
                }
                events
            }
            FeedEvent::Put(pod) => self.describe(pod).into_iter().collect(),
            FeedEvent::Gone(_, uid) => {
                self.note(&uid, false);
                let event = if self.is_chosen(&uid) { self.change_of(&uid) } else { None };
                self.forget_gone(&uid);
                event.into_iter().collect()
            }
            other @ (FeedEvent::Failure(..) | FeedEvent::Containers(..)) => vec![other],
        }
    }

    /// Takes a change of the kubelet. Returns the change for the manager.
    pub fn change(&mut self, change: KubeletChange) -> Option<FeedEvent> {
        let uid = match change {
            KubeletChange::Published(publication) => {
                let uid = publication.uid();
                self.publications.insert(publication.target.clone(), *publication);
                uid
            }
            KubeletChange::Unpublished(target) => self.publications.remove(&target)?.uid(),
        };
        match self.is_published(&uid) || self.is_served(&uid) {
            true => self.pod(&uid).map(FeedEvent::Put),
            false => Some(FeedEvent::Gone(PodSource::Kubelet, uid)),
        }
    }

    /// Takes a change of the runtime. Returns the changes for the manager.
    pub fn change_runtime(&mut self, change: RuntimeChange) -> Vec<FeedEvent> {
        let Some(chosen) = &mut self.chosen else { return Vec::new() };
        let concerned = chosen.change(&change);
        match change {
            RuntimeChange::Containers(pod, containers) => vec![FeedEvent::Containers(pod, containers)],
            RuntimeChange::Failure(trouble) => vec![FeedEvent::Failure(PodSource::Runtime, trouble)],
            _ => {
                let events = concerned.iter().filter_map(|uid| self.end_of(uid)).collect();
                concerned.iter().for_each(|uid| self.forget_gone(uid));
                events
            }
        }
    }

    /// Takes the marked namespaces. Returns the changes for the manager.
    pub fn take_namespaces(&mut self, namespaces: BTreeSet<String>) -> Vec<FeedEvent> {
        if !self.chosen.as_mut().is_some_and(|chosen| chosen.take_namespaces(namespaces)) {
            return Vec::new();
        }
        let known: Vec<PodUid> = self.described.keys().cloned().collect();
        known.iter().filter_map(|uid| self.change_of(uid)).collect()
    }

    fn describe(&mut self, pod: NodePod) -> Option<FeedEvent> {
        let uid = self.uid_for(&pod);
        self.described.insert(uid.clone(), pod);
        self.note(&uid, true);
        self.change_of(&uid)
    }

    fn note(&mut self, uid: &PodUid, has_it: bool) {
        if let Some(chosen) = &mut self.chosen {
            chosen.note_pod(uid, has_it);
        }
    }

    /// The change of a pod for the manager, if there is one.
    fn change_of(&mut self, uid: &PodUid) -> Option<FeedEvent> {
        let is_served = self.is_served(uid);
        // A pod that is no longer chosen keeps only the kubelet's publications.
        let was_reported = if is_served { self.reported.insert(uid.clone()) } else { self.reported.remove(uid) };
        match is_served || self.is_published(uid) {
            true => self.pod(uid).map(FeedEvent::Put),
            false => was_reported.then(|| FeedEvent::Gone(PodSource::Runtime, uid.clone())),
        }
    }

    /// The change for the manager after a sandbox of a pod has ended: the pod is gone, or nothing.
    fn end_of(&mut self, uid: &PodUid) -> Option<FeedEvent> {
        match self.is_served(uid) {
            true => None,
            false => self.change_of(uid),
        }
    }

    /// Forgets a pod that no source has and podfs no longer serves.
    fn forget_gone(&mut self, uid: &PodUid) {
        let is_gone = self.chosen.as_ref().is_none_or(|chosen| chosen.is_gone(uid));
        if is_gone && !self.is_published(uid) && !self.is_served(uid) {
            self.described.remove(uid);
            if let Some(chosen) = &mut self.chosen {
                chosen.forget(uid);
            }
        }
    }

    /// Whether podfs serves the pod for the runtime.
    fn is_served(&mut self, uid: &PodUid) -> bool {
        let described = self.described.get(uid);
        self.chosen.as_mut().is_some_and(|chosen| chosen.is_served(uid, described))
    }

    fn is_chosen(&self, uid: &PodUid) -> bool {
        self.reported.contains(uid)
    }

    /// The kubelet's uid of a static pod may differ from podfs's: then the name decides.
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

    /// The description of the pod by a source.
    fn description(&self, uid: &PodUid, publication: &Publication) -> Option<&NodePod> {
        let is_named = |pod: &&NodePod| {
            let identity = &pod.pod.identity;
            matches!(pod.origin, PodOrigin::File(_))
                && (&identity.namespace, &identity.name) == (&publication.pod.namespace, &publication.pod.name)
        };
        self.described.get(uid).or_else(|| self.described.values().find(is_named))
    }

    /// The pod with the volumes that podfs serves now, if it is known.
    fn pod(&self, uid: &PodUid) -> Option<NodePod> {
        let first = self.of(uid).next();
        let described = first.map_or_else(|| self.described.get(uid), |first| self.description(uid, first));
        let is_chosen = self.reported.contains(uid);
        let manifest = match (described, first) {
            (Some(pod), _) if is_chosen => with_payload_volumes(&pod.manifest),
            (Some(pod), _) => without_volumes(Value::clone(&pod.manifest)),
            (None, Some(first)) => minimal_manifest(first),
            (None, None) => return None,
        };
        let volumes = self.of(uid).filter(|publication| described.is_some() || !publication.needs_pod);
        let manifest = with_volumes(manifest, uid, &volumes.collect::<Vec<_>>());
        let document = Document::of_server(Origin::file(Path::new("pod of the kubelet")), manifest.clone());
        match document.and_then(Pod::parse) {
            Ok(pod) => {
                let (pod, manifest) = (Arc::new(pod), Arc::new(manifest));
                // The origin shows the next daemon that the pod was chosen.
                let origin = if is_chosen { PodOrigin::Runtime } else { PodOrigin::Kubelet };
                Some(NodePod { pod, manifest, origin, stage: PodStage::Desired })
            }
            Err(error) => {
                let _span = spans::of_uid(uid, described.map(|pod| &pod.pod.identity)).entered();
                warn!("pod {uid}: its volumes stay as they are: {error}");
                None
            }
        }
    }
}

/// A manifest with what the publication has about the pod.
fn minimal_manifest(publication: &Publication) -> Value {
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

/// The manifest without the volumes of these names.
fn without(mut manifest: Value, names: &BTreeSet<&str>) -> Value {
    if let Some(volumes) = manifest["spec"]["volumes"].as_array_mut() {
        volumes.retain(|volume| volume["name"].as_str().is_none_or(|name| !names.contains(name)));
    }
    manifest
}

fn without_volumes(mut manifest: Value) -> Value {
    manifest["spec"]["volumes"] = json!([]);
    manifest
}

/// The manifest with these volumes besides its own, each used by a container.
fn with_volumes(mut manifest: Value, uid: &PodUid, publications: &[&Publication]) -> Value {
    manifest["metadata"]["uid"] = json!(uid.as_str());
    let volumes = publications.iter().map(|publication| {
        let mut volume = publication.volume.clone();
        volume["name"] = json!(publication.name);
        volume
    });
    match manifest["spec"]["volumes"].as_array_mut() {
        Some(all) => all.extend(volumes),
        None => manifest["spec"]["volumes"] = volumes.collect(),
    }
    for publication in publications {
        set_mount_options(&mut manifest, &publication.name, &publication.mount_options);
    }
    forget_other_volumes(&mut manifest);
    let spec = &mut manifest["spec"];
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
    use super::*;
    use crate::node::feed::chosen::Choice;
    use crate::node::publication::PublishedPod;
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
        let FeedEvent::Pods(PodSource::Kubelet, none) = pods.publish(BTreeMap::new()) else {
            panic!("all pods come first")
        };
        assert!(none.is_empty());
        assert_eq!(names(pods.change(published(publication("a", false)))), ["a"]);
        assert_eq!(names(pods.change(published(publication("d", true)))), ["a"], "its pod is not known yet");
        let described = sample::pod("u", &["{name: other, emptyDir: {}}"], &["other"]);
        assert_eq!(names(pods.change_source(FeedEvent::Put(described)).pop()), ["a", "d"]);
        let neighbour = sample::pod("v", &["{name: other, emptyDir: {}}"], &["other"]);
        assert!(pods.change_source(FeedEvent::Put(neighbour)).is_empty(), "it has no publication");
        assert!(
            pods.change_source(FeedEvent::Gone(PodSource::Api, sample::uid("u"))).is_empty(),
            "its containers may run"
        );
        assert_eq!(names(pods.change(KubeletChange::Unpublished(publication("a", false).target))), ["d"]);
        assert_eq!(names(pods.change(KubeletChange::Unpublished(publication("d", false).target))), ["gone u"]);
        assert!(pods.change(KubeletChange::Unpublished("/k/pods/u/a/mount".into())).is_none());
    }
    #[test]
    fn annotations_are_those_of_the_volumes_that_the_kubelet_wants() {
        let mut pods = KubeletPods::default();
        pods.publish(BTreeMap::new());
        let mut described = sample::pod("u", &["{name: other, emptyDir: {}}"], &["other"]);
        Arc::make_mut(&mut described.manifest)["metadata"]["annotations"] = json!({
            "podfs.io/cache.other": "none", "podfs.io/sub-path.a": "live", "podfs.io/mount-options.share": "soft", "x": "y",
        });
        pods.change_source(FeedEvent::Put(described));
        let mut share = publication("share", false);
        share.volume = json!({"nfs": {"server": "nfs.example", "path": "/"}});
        share.mount_options = vec!["nolock".to_owned(), "ro".to_owned()];
        pods.change(KubeletChange::Published(Box::new(share)));
        let event = pods.change(KubeletChange::Published(Box::new(publication("a", false))));
        let Some(FeedEvent::Put(pod)) = event else { panic!("no annotation keeps a volume back: {event:?}") };
        assert_eq!(
            pod.manifest["metadata"]["annotations"],
            json!({"podfs.io/sub-path.a": "live", "podfs.io/mount-options.share": "nolock,ro", "x": "y"}),
        );
        assert_eq!(pod.pod.volumes.len(), 2);
    }

    #[test]
    fn a_chosen_pod_has_its_payload_volumes_and_those_of_the_kubelet_and_goes_with_its_sandbox() {
        let mut pods = KubeletPods::default();
        let FeedEvent::Pods(PodSource::Runtime, none) = pods.choose(Chosen::new(Choice::All, []), &[]) else {
            panic!("all pods come first")
        };
        assert!(none.is_empty());
        pods.change_runtime(RuntimeChange::Synchronized(BTreeMap::new()));
        let volumes = ["{name: app, configMap: {name: app}}", "{name: data, emptyDir: {}}"];
        let described = sample::pod("u", &volumes, &["app", "data"]);
        let volumes_of = |event: Option<&FeedEvent>| match event {
            Some(FeedEvent::Put(pod)) => {
                let names = pod.pod.volumes.iter().map(|volume| volume.name.to_string()).collect::<Vec<_>>();
                (pod.origin.clone(), names)
            }
            other => panic!("{other:?}"),
        };
        let of_runtime = (PodOrigin::Runtime, vec!["app".to_owned()]);
        assert_eq!(volumes_of(pods.change_source(FeedEvent::Put(described)).first()), of_runtime);
        let published = pods.change(KubeletChange::Published(Box::new(publication("a", false))));
        let both = (PodOrigin::Runtime, vec!["app".to_owned(), "a".to_owned()]);
        assert_eq!(volumes_of(published.as_ref()), both);
        let unpublished = pods.change(KubeletChange::Unpublished(publication("a", false).target));
        assert_eq!(volumes_of(unpublished.as_ref()), of_runtime);
        let uid = sample::uid("u");
        pods.change_runtime(RuntimeChange::Started("s".to_owned(), uid.clone()));
        let Some(FeedEvent::Put(written_down)) = published else { panic!("it is there") };
        let mut next = KubeletPods::default();
        next.publish(BTreeMap::from([("/k/pods/u/a/mount".into(), publication("a", false))]));
        next.choose(Chosen::new(Choice::All, [uid.clone()]), &[written_down]);
        let FeedEvent::Pods(_, first) = next.published() else { panic!("all pods come first") };
        assert_eq!(volumes_of(first.into_iter().map(FeedEvent::Put).next().as_ref()), both, "another daemon goes on");
        let terminating = NodePod { stage: PodStage::Terminating, ..sample::pod("u", &volumes, &["app", "data"]) };
        assert_eq!(
            volumes_of(next.change_source(FeedEvent::Put(terminating)).first()),
            both,
            "it ends, and has not ended"
        );
        let gone = pods.change_source(FeedEvent::Gone(PodSource::Api, uid.clone()));
        assert_eq!(volumes_of(gone.first()), of_runtime, "its sandbox runs");
        let ended = pods.change_runtime(RuntimeChange::Removed("s".to_owned()));
        assert!(matches!(&ended[..], [FeedEvent::Gone(PodSource::Runtime, gone)] if *gone == uid), "{ended:?}");
        assert!(pods.change_runtime(RuntimeChange::Removed("s".to_owned())).is_empty());
    }
}
