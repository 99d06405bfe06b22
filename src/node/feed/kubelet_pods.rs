//! The pods of a node with a kubelet. The sources, the API server or manifest files, describe the pods; the
//! publications of the kubelet ([`publication`](crate::node::publication)) and the choice of the operator
//! ([`chosen`](super::chosen)) decide which of their volumes podfs serves. Plain data.
//!
//! 1. podfs mounts volumes of a pod only while the pod has a publication or is chosen.
//! 2. A volume with fields of the pod waits until a source describes the pod. Other volumes do not wait.
//! 3. A pod that its source no longer has keeps its last description: its containers may still run.
//! 4. A pod that an earlier daemon served keeps the description of its checkpoint until a source describes it: a source that has not
//!    answered yet says nothing about the pod. Without that description, a mounted volume could count as one that waits, and podfs
//!    would unmount it. So a published pod without a checkpoint, and with such a volume, is left out until a source describes it.
//! 5. A static pod has the name that the kubelet gives it, not the name in its file.

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
use crate::volume::{forget_other_volumes, set_mount_options, set_within};

/// The pods of a node with a kubelet.
#[derive(Debug, Default)]
pub struct KubeletPods {
    /// The pods as the sources describe them, by uid.
    described: BTreeMap<PodUid, NodePod>,
    /// The pods of `described` that no source has any more.
    gone: BTreeSet<PodUid>,
    /// The publications, by target.
    publications: BTreeMap<PathBuf, Publication>,
    /// The pods that are chosen, if podfs is a plugin of a container runtime.
    chosen: Option<Chosen>,
    /// The published pods of an earlier daemon that podfs leaves out until a source describes them.
    unrecorded: BTreeSet<PodUid>,
    /// The names of the pods that an earlier daemon served for the kubelet or the runtime. Their supervisors refuse other names.
    earlier_names: BTreeMap<PodUid, String>,
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
    /// Starts with the publications of an earlier daemon, and with the pods of its checkpoints.
    pub fn publish(&mut self, publications: BTreeMap<PathBuf, Publication>, earlier: &[NodePod]) -> FeedEvent {
        self.publications = publications;
        let with_fields = self.publications.values().filter(|publication| publication.needs_pod);
        self.unrecorded = with_fields.map(Publication::uid).collect();
        for pod in earlier {
            let uid = &pod.pod.identity.uid;
            self.unrecorded.remove(uid);
            let has = |name: &str| pod.pod.volumes.iter().any(|volume| volume.name.as_str() == name);
            // The earlier daemon mounted such a volume only once it had the pod's description.
            if self.publications_of(uid).any(|publication| publication.needs_pod && has(&publication.name)) {
                self.remember(pod);
                self.gone.insert(uid.clone());
            }
        }
        self.published()
    }

    /// Takes the description of a pod from a checkpoint. The checkpoint also has the volumes of publications, which do not belong to
    /// the description.
    fn remember(&mut self, pod: &NodePod) {
        let uid = &pod.pod.identity.uid;
        let published: BTreeSet<&str> =
            self.publications_of(uid).map(|publication| publication.name.as_str()).collect();
        let manifest = Arc::new(without_named_volumes(Value::clone(&pod.manifest), &published));
        self.described.insert(uid.clone(), NodePod { manifest, ..pod.clone() });
    }

    /// The pods with publications, as the kubelet's first list for the manager.
    pub fn published(&self) -> FeedEvent {
        let uids: BTreeSet<PodUid> = self.publications.values().map(Publication::uid).collect();
        FeedEvent::Pods(PodSource::Kubelet, uids.iter().filter_map(|uid| self.pod(uid)).collect())
    }

    /// Keeps the names of pods that an earlier daemon served.
    pub fn keep_names(&mut self, earlier: &[NodePod]) {
        let identities = earlier.iter().map(|pod| &pod.pod.identity);
        self.earlier_names.extend(identities.map(|identity| (identity.uid.clone(), identity.name.clone())));
    }

    /// Starts with the pods that an earlier daemon served for the runtime.
    pub fn choose(&mut self, chosen: Chosen, earlier: &[NodePod]) -> FeedEvent {
        self.chosen = Some(chosen);
        let mut pods = Vec::new();
        for pod in earlier {
            let uid = pod.pod.identity.uid.clone();
            self.remember(pod);
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
                    for uid in chosen.note_list(source) {
                        self.gone.insert(uid.clone());
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
                let uids: BTreeSet<PodUid> = self.descriptions_by_file(&uid).chain([uid.clone()]).collect();
                uids.iter().filter_map(|uid| self.lose(uid)).collect()
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
            false => {
                self.forget_gone(&uid);
                Some(FeedEvent::Gone(PodSource::Kubelet, uid))
            }
        }
    }

    /// Takes a change of the runtime. Returns the changes for the manager.
    pub fn change_runtime(&mut self, change: RuntimeChange) -> Vec<FeedEvent> {
        let Some(chosen) = &mut self.chosen else { return Vec::new() };
        let affected = chosen.change(&change);
        match change {
            RuntimeChange::Containers(pod, containers) => vec![FeedEvent::Containers(pod, containers)],
            RuntimeChange::Failure(trouble) => vec![FeedEvent::Failure(PodSource::Runtime, trouble)],
            _ => {
                let events = affected.iter().filter_map(|uid| self.end_of(uid)).collect();
                affected.iter().for_each(|uid| self.forget_gone(uid));
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
        if is_static(&pod) {
            self.forget_other_descriptions(&uid, &pod.pod.identity.uid);
        }
        self.described.insert(uid.clone(), pod);
        self.note_source(&uid, true);
        self.change_of(&uid)
    }

    /// Forgets what podfs has read in a manifest file before, when the kubelet had another pod of this file.
    fn forget_other_descriptions(&mut self, uid: &PodUid, of_file: &PodUid) {
        let others: Vec<PodUid> = self.descriptions_by_file(of_file).filter(|other| other != uid).collect();
        for other in others {
            if !self.is_served(&other) {
                self.described.remove(&other);
                self.gone.remove(&other);
            }
        }
    }

    /// The uids under which podfs keeps what it has read in one manifest file. `of_file` is the uid that podfs gives the file's pod.
    fn descriptions_by_file(&self, of_file: &PodUid) -> impl Iterator<Item = PodUid> {
        let described =
            self.described.iter().filter(move |(_, pod)| is_static(pod) && pod.pod.identity.uid == *of_file);
        described.map(|(uid, _)| uid.clone())
    }

    /// Records that no source has the pod any more. Returns the change for the manager, if there is one.
    fn lose(&mut self, uid: &PodUid) -> Option<FeedEvent> {
        self.note_source(uid, false);
        let event = if self.is_chosen(uid) { self.change_of(uid) } else { None };
        self.forget_gone(uid);
        event
    }

    /// Notes whether a source has the pod.
    fn note_source(&mut self, uid: &PodUid, has_it: bool) {
        match has_it {
            true => drop(self.gone.remove(uid)),
            false => drop(self.gone.insert(uid.clone())),
        }
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

    /// The change for the manager after a sandbox of the pod has ended. There is none while podfs still serves the pod.
    fn end_of(&mut self, uid: &PodUid) -> Option<FeedEvent> {
        match self.is_served(uid) {
            true => None,
            false => self.change_of(uid),
        }
    }

    /// Forgets the pod if no source has it, and podfs serves none of its volumes.
    fn forget_gone(&mut self, uid: &PodUid) {
        if self.gone.contains(uid) && !self.is_published(uid) && !self.is_served(uid) {
            self.described.remove(uid);
            self.earlier_names.remove(uid);
            self.gone.remove(uid);
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

    /// The uid by which the kubelet knows the pod. For a static pod, it may differ from the uid of podfs; then the name
    /// decides.
    fn uid_for(&self, pod: &NodePod) -> PodUid {
        let uid = &pod.pod.identity.uid;
        let mut publications = self.publications.values().filter(|_| is_static(pod) && !self.is_published(uid));
        publications.find(|publication| has_name_of(pod, publication)).map_or_else(|| uid.clone(), Publication::uid)
    }

    fn is_published(&self, uid: &PodUid) -> bool {
        self.publications_of(uid).next().is_some()
    }

    fn publications_of(&self, uid: &PodUid) -> impl Iterator<Item = &Publication> {
        self.publications.values().filter(move |publication| publication.pod.uid == uid.as_str())
    }

    /// The description of the pod by a source.
    fn description(&self, uid: &PodUid, publication: &Publication) -> Option<&NodePod> {
        let is_named = |pod: &&NodePod| is_static(pod) && has_name_of(pod, publication);
        self.described.get(uid).or_else(|| self.described.values().find(is_named))
    }

    /// The pod with the volumes that podfs serves now, if it is known.
    fn pod(&self, uid: &PodUid) -> Option<NodePod> {
        let first = self.publications_of(uid).next();
        let described = first.map_or_else(|| self.described.get(uid), |first| self.description(uid, first));
        if described.is_none() && self.unrecorded.contains(uid) {
            return None;
        }
        let is_chosen = self.reported.contains(uid);
        let mut manifest = match (described, first) {
            (Some(pod), _) if is_chosen => with_payload_volumes(&pod.manifest),
            (Some(pod), _) => without_volumes(Value::clone(&pod.manifest)),
            (None, Some(first)) => minimal_manifest(first),
            (None, None) => return None,
        };
        if let Some(pod) = described.filter(|pod| is_static(pod)) {
            let published = first.map(|publication| &publication.pod.name);
            let known = self.earlier_names.get(uid).or(published).cloned();
            manifest["metadata"]["name"] = known.unwrap_or_else(|| name_at_kubelet(pod)).into();
        }
        let volumes = self.publications_of(uid).filter(|publication| described.is_some() || !publication.needs_pod);
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

fn is_static(pod: &NodePod) -> bool {
    matches!(pod.origin, PodOrigin::File(_))
}

/// The kubelet's name of a static pod: the name in the file, and the name of the node in lower case (DA-01). If podfs does not know
/// the node, the name in the file.
fn name_at_kubelet(pod: &NodePod) -> String {
    let name = &pod.pod.identity.name;
    pod.pod.facts.node_name.as_ref().map_or_else(|| name.clone(), |node| format!("{name}-{}", node.to_lowercase()))
}

/// Whether the static pod has the name of the publication's pod.
fn has_name_of(pod: &NodePod, publication: &Publication) -> bool {
    publication.pod.namespace == pod.pod.identity.namespace && publication.pod.name == name_at_kubelet(pod)
}

/// A manifest with the fields of the pod that the publication has.
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
fn without_named_volumes(mut manifest: Value, names: &BTreeSet<&str>) -> Value {
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
        set_within(&mut manifest, &publication.name, publication.within.as_deref());
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
mod tests;
