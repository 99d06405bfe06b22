//! The pods whose volumes podfs serves in the place of the kubelet's, and until when. Plain data.
//!
//! 1. A pod is chosen by its label or annotation, by its namespace, or because all pods are. A pod whose label or
//!    annotation is `"false"` is never chosen.
//! 2. Only volumes of the four payload kinds are chosen: configMap, secret, downwardAPI and projected.
//! 3. A chosen pod stays chosen while a sandbox of it may have containers: until its source no longer has it and the runtime
//!    has removed its sandboxes. If the pod's phase is Succeeded or Failed, stopped sandboxes suffice.
//! 4. While the runtime is not connected, podfs assumes that a pod has containers as long as the kubelet's directory of the pod
//!    exists.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::PodSource;
use crate::manifest::pod::{PodIdentity, PodUid};
use crate::node::pod::{NodePod, PodStage};
use crate::node::state::ContainerEntry;
use crate::volume::VOLUMES_KEY;

/// The kinds of volume that podfs serves in the kubelet's place, as manifests name them.
const KINDS: [&str; 4] = ["configMap", "secret", "downwardAPI", "projected"];

/// The rule that chooses pods.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// Pods with the label or annotation, and pods of namespaces with the label.
    #[default]
    Labeled,
    /// All pods but those whose label or annotation is `"false"`.
    All,
}

/// A change of the node's pods that the runtime has reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RuntimeChange {
    /// These are all sandboxes of the node, with their pods.
    Synchronized(BTreeMap<String, PodUid>),
    /// A sandbox of the pod starts.
    Started(String, PodUid),
    /// All containers of the sandbox have ended for good.
    Stopped(String),
    /// The sandbox was removed.
    Removed(String),
    /// The connection is lost: podfs may miss sandboxes.
    Lost,
    /// Of these pods, and of no others, the kubelet has no directory.
    NoDirectory(BTreeSet<PodUid>),
    /// These are now all containers of the pod with a volume of podfs, or with a volume of the kubelet that podfs could serve.
    Containers(PodIdentity, Vec<ContainerEntry>),
    /// These are now all problems of the connection.
    Failure(Vec<String>),
}

/// A sandbox of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Sandbox {
    pod: PodUid,
    /// Whether its containers have ended for good.
    is_stopped: bool,
}

/// The pods whose volumes podfs serves.
#[derive(Debug, Default)]
pub struct Chosen {
    choice: Choice,
    /// The namespaces with the label.
    namespaces: BTreeSet<String>,
    /// The sandboxes, by their ids.
    sandboxes: BTreeMap<String, Sandbox>,
    /// Whether these are all sandboxes of the node.
    is_synchronized: bool,
    /// The pods that podfs serves now.
    served: BTreeSet<PodUid>,
    /// The pods of `served` that an earlier daemon served, and that no source has listed yet.
    unconfirmed: BTreeSet<PodUid>,
    /// The sources that have not listed their pods yet. Each of them may have the unconfirmed pods.
    awaited: BTreeSet<PodSource>,
    /// The pods that no source has any more.
    gone: BTreeSet<PodUid>,
    /// The pods of which the kubelet had no directory when podfs last looked, without a connection to the runtime. A pod that
    /// has not started has none.
    without_directory: BTreeSet<PodUid>,
}

impl Chosen {
    /// Chooses by this rule. `earlier` are the pods that an earlier daemon served.
    pub fn new(choice: Choice, earlier: impl IntoIterator<Item = PodUid>) -> Chosen {
        let served: BTreeSet<PodUid> = earlier.into_iter().collect();
        Chosen { choice, unconfirmed: served.clone(), served, ..Chosen::default() }
    }

    /// Waits for the lists of these sources before it counts a pod of an earlier daemon as gone.
    pub fn await_sources(&mut self, sources: impl IntoIterator<Item = PodSource>) {
        self.awaited.extend(sources);
    }

    /// Whether the rule needs the labels of namespaces.
    pub fn wants_namespaces(&self) -> bool {
        self.choice == Choice::Labeled
    }

    /// Whether podfs chooses the pod when it starts.
    pub fn matches(&self, pod: &NodePod) -> bool {
        let facts = &pod.pod.facts;
        let mark = facts.labels.get(VOLUMES_KEY).or_else(|| facts.annotations.get(VOLUMES_KEY)).map(String::as_str);
        // In a pod with a user namespace, the runtime maps the ids of mounts, and a plugin does not get this mapping.
        let is_possible = !facts.user_namespace && payload_volumes(&pod.manifest).next().is_some();
        let is_marked = match mark {
            Some(mark) => mark == "true",
            None => self.choice == Choice::All || self.namespaces.contains(&pod.pod.identity.namespace),
        };
        is_marked && is_possible
    }

    /// Sets the namespaces with the label. Returns whether that is a change.
    pub fn take_namespaces(&mut self, namespaces: BTreeSet<String>) -> bool {
        let before = std::mem::replace(&mut self.namespaces, namespaces);
        before != self.namespaces
    }

    /// Notes that a source has the pod, or no longer has it.
    pub fn note_pod(&mut self, uid: &PodUid, has_it: bool) {
        self.unconfirmed.remove(uid);
        match has_it {
            true => drop(self.gone.remove(uid)),
            false => drop(self.gone.insert(uid.clone())),
        }
    }

    /// Notes that the source has listed all of its pods. After the list of the last source, returns the pods of an earlier daemon
    /// that no source has listed.
    pub fn note_list(&mut self, source: PodSource) -> BTreeSet<PodUid> {
        self.awaited.remove(&source);
        if !self.awaited.is_empty() {
            return BTreeSet::new();
        }
        let unconfirmed = std::mem::take(&mut self.unconfirmed);
        self.gone.extend(unconfirmed.iter().cloned());
        unconfirmed
    }

    /// Notes a change that the runtime has reported. Returns the pods whose service it may change.
    pub fn change(&mut self, change: &RuntimeChange) -> Vec<PodUid> {
        match change {
            RuntimeChange::Synchronized(sandboxes) => {
                let of = |pod: &PodUid| Sandbox { pod: pod.clone(), is_stopped: false };
                self.sandboxes = sandboxes.iter().map(|(id, pod)| (id.clone(), of(pod))).collect();
                self.is_synchronized = true;
                self.without_directory.clear();
                self.served.iter().cloned().collect()
            }
            RuntimeChange::Started(sandbox, uid) => {
                self.sandboxes.insert(sandbox.clone(), Sandbox { pod: uid.clone(), is_stopped: false });
                self.without_directory.remove(uid);
                vec![uid.clone()]
            }
            RuntimeChange::Stopped(sandbox) => {
                let stopped = self.sandboxes.get_mut(sandbox).map(|sandbox| {
                    sandbox.is_stopped = true;
                    sandbox.pod.clone()
                });
                stopped.into_iter().collect()
            }
            RuntimeChange::Removed(sandbox) => {
                self.sandboxes.remove(sandbox).map(|sandbox| sandbox.pod).into_iter().collect()
            }
            RuntimeChange::NoDirectory(uids) => {
                self.without_directory.clone_from(uids);
                uids.iter().cloned().collect()
            }
            RuntimeChange::Lost => {
                self.is_synchronized = false;
                Vec::new()
            }
            RuntimeChange::Containers(..) | RuntimeChange::Failure(_) => Vec::new(),
        }
    }

    /// Decides whether podfs serves the pod. `pod` is its last description by a source.
    pub fn is_served(&mut self, uid: &PodUid, pod: Option<&NodePod>) -> bool {
        let Some(pod) = pod else { return false };
        let is_terminal = pod.stage == PodStage::Terminal;
        let has_ended = self.gone.contains(uid) || is_terminal;
        let starts = !has_ended && pod.stage == PodStage::Desired && self.matches(pod);
        let may_run = match self.is_synchronized {
            true => {
                let mut sandboxes = self.sandboxes.values().filter(|sandbox| sandbox.pod == *uid);
                sandboxes.any(|sandbox| !(sandbox.is_stopped && is_terminal))
            }
            false => !self.without_directory.contains(uid),
        };
        let may_continue = self.served.contains(uid) && (may_run || (!has_ended && pod.stage == PodStage::Terminating));
        match starts || may_continue {
            true => drop(self.served.insert(uid.clone())),
            false => drop(self.served.remove(uid)),
        }
        starts || may_continue
    }

    /// Forgets the pod.
    pub fn forget(&mut self, uid: &PodUid) {
        self.served.remove(uid);
        self.gone.remove(uid);
        self.without_directory.remove(uid);
    }

    /// The pods that podfs serves.
    pub fn served(&self) -> Vec<PodUid> {
        self.served.iter().cloned().collect()
    }
}

/// The volumes of the four kinds in a manifest.
fn payload_volumes(manifest: &Value) -> impl Iterator<Item = &Value> {
    let volumes = manifest["spec"]["volumes"].as_array().into_iter().flatten();
    volumes.filter(|volume| KINDS.iter().any(|kind| volume.get(kind).is_some_and(|source| !source.is_null())))
}

/// The manifest with only its payload volumes, and only the containers' mounts of these. The kubelet serves all other volumes.
pub fn with_payload_volumes(manifest: &Value) -> Value {
    let volumes: Vec<Value> = payload_volumes(manifest).cloned().collect();
    let names: BTreeSet<String> =
        volumes.iter().filter_map(|volume| Some(volume["name"].as_str()?.to_owned())).collect();
    let mut manifest = manifest.clone();
    let Some(spec) = manifest["spec"].as_object_mut() else { return manifest };
    spec.insert("volumes".to_owned(), Value::Array(volumes));
    for kind in ["containers", "initContainers", "ephemeralContainers"] {
        for container in spec.get_mut(kind).and_then(Value::as_array_mut).into_iter().flatten() {
            let Some(container) = container.as_object_mut() else { continue };
            container.remove("volumeDevices");
            if let Some(mounts) = container.get_mut("volumeMounts").and_then(Value::as_array_mut) {
                mounts.retain(|mount| mount["name"].as_str().is_some_and(|name| names.contains(name)));
            }
        }
    }
    manifest
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::*;
    use crate::node::sample;

    fn pod(mark: Option<&str>, stage: PodStage) -> NodePod {
        let pod = sample::pod("u", &["{name: app, configMap: {name: app}}", "{name: data, emptyDir: {}}"], &["app"]);
        let mut parsed = (*pod.pod).clone();
        parsed.facts.labels.extend(mark.map(|mark| (VOLUMES_KEY.to_owned(), mark.to_owned())));
        NodePod { pod: Arc::new(parsed), stage, ..pod }
    }

    fn sandboxes(ids: &[&str]) -> RuntimeChange {
        RuntimeChange::Synchronized(ids.iter().map(|id| ((*id).to_owned(), sample::uid("u"))).collect())
    }

    #[test]
    fn pods_are_chosen_by_their_mark_by_their_namespace_or_all() {
        let labeled = Chosen::default();
        let all = Chosen::new(Choice::All, []);
        let mut namespace = Chosen::default();
        let of_pod = pod(None, PodStage::Desired).pod.identity.namespace.clone();
        assert!(namespace.take_namespaces([of_pod].into()));
        let matches = |chosen: &Chosen, mark| chosen.matches(&pod(mark, PodStage::Desired));
        for (mark, expected) in [(None, [false, true, true]), (Some("true"), [true; 3]), (Some("false"), [false; 3])] {
            assert_eq!([&labeled, &all, &namespace].map(|chosen| matches(chosen, mark)), expected, "{mark:?}");
        }
        let without = sample::pod("u", &["{name: data, emptyDir: {}}"], &["data"]);
        assert!(!all.matches(&without), "it has no volume of podfs");
    }

    #[test]
    fn a_chosen_pod_stays_until_it_is_gone_and_its_sandboxes_are_removed() {
        let (uid, mut chosen) = (sample::uid("u"), Chosen::default());
        let (runs, ends) = (pod(Some("true"), PodStage::Desired), pod(Some("true"), PodStage::Terminating));
        assert!(!chosen.is_served(&uid, Some(&ends)), "it is being deleted when podfs first hears of it");
        chosen.change(&sandboxes(&[]));
        assert!(chosen.is_served(&uid, Some(&runs)), "its containers are going to start");
        chosen.change(&RuntimeChange::Started("s1".into(), uid.clone()));
        let unmarked = pod(None, PodStage::Desired);
        assert!(chosen.is_served(&uid, Some(&unmarked)), "its containers run with podfs's volumes");
        assert!(chosen.is_served(&uid, Some(&ends)));
        chosen.note_pod(&uid, false);
        assert!(chosen.is_served(&uid, Some(&ends)), "the server has forgotten it, and the sandbox runs");
        chosen.change(&RuntimeChange::Stopped("s1".into()));
        assert!(chosen.is_served(&uid, Some(&ends)));
        assert_eq!(chosen.change(&RuntimeChange::Removed("s1".into())), vec![uid.clone()]);
        assert!(!chosen.is_served(&uid, Some(&ends)));
        assert!(chosen.served().is_empty());
    }

    #[test]
    fn a_pod_that_ended_unseen_goes_with_the_runtimes_list_or_with_the_kubelets_directory() {
        let (uid, ended) = (sample::uid("u"), pod(Some("true"), PodStage::Terminal));
        let earlier = || Chosen::new(Choice::Labeled, [uid.clone()]);
        let mut chosen = earlier();
        assert!(chosen.is_served(&uid, Some(&ended)), "the runtime has not said which sandboxes there are");
        chosen.change(&sandboxes(&["s"]));
        assert!(chosen.is_served(&uid, Some(&ended)));
        chosen.change(&RuntimeChange::Stopped("s".into()));
        assert!(!chosen.is_served(&uid, Some(&ended)), "its phase says that no container runs");
        let mut chosen = earlier();
        chosen.change(&sandboxes(&[]));
        assert!(!chosen.is_served(&uid, Some(&ended)));
        let mut chosen = earlier();
        assert_eq!(chosen.note_list(PodSource::Api), [uid.clone()].into());
        chosen.change(&RuntimeChange::NoDirectory([uid.clone()].into()));
        assert!(!chosen.is_served(&uid, Some(&ended)));
    }

    #[test]
    fn a_pod_without_a_directory_may_start_while_the_runtime_is_not_connected() {
        let (uid, mut chosen) = (sample::uid("u"), Chosen::default());
        let (runs, ends) = (pod(Some("true"), PodStage::Desired), pod(Some("true"), PodStage::Terminating));
        let no_directory = || RuntimeChange::NoDirectory([uid.clone()].into());
        let starts = || RuntimeChange::Started("s".into(), uid.clone());
        for found in [RuntimeChange::NoDirectory(BTreeSet::new()), starts(), sandboxes(&["s"])] {
            chosen.change(&RuntimeChange::Lost);
            assert!(chosen.is_served(&uid, Some(&runs)), "it is going to start");
            chosen.change(&no_directory());
            chosen.change(&found);
            chosen.change(&RuntimeChange::Lost);
            assert!(chosen.is_served(&uid, Some(&runs)));
            chosen.note_pod(&uid, false);
            assert!(chosen.is_served(&uid, Some(&ends)), "it may run: {found:?}");
            chosen.change(&no_directory());
            assert!(!chosen.is_served(&uid, Some(&ends)));
            chosen.forget(&uid);
        }
    }

    #[test]
    fn a_manifest_keeps_only_volumes_of_the_four_kinds() {
        let manifest = json!({"spec": {
            "volumes": [
                {"name": "a", "configMap": {"name": "x"}}, {"name": "b", "emptyDir": {}}, {"name": "c", "hostPath": {"path": "/"}},
                {"name": "d", "projected": {"sources": []}}, {"name": "e", "secret": {}}, {"name": "f", "downwardAPI": {}},
                {"name": "g", "persistentVolumeClaim": {"claimName": "x"}},
            ],
            "initContainers": [{"name": "i", "volumeMounts": [{"name": "g", "mountPath": "/g"}]}],
            "containers": [{"name": "c", "volumeDevices": [{"name": "g", "devicePath": "/dev/g"}],
                "volumeMounts": [{"name": "b", "mountPath": "/b"}, {"name": "a", "mountPath": "/a"}]}],
        }});
        let reduced = with_payload_volumes(&manifest);
        let names =
            |list: &Value| list.as_array().into_iter().flatten().map(|one| one["name"].clone()).collect::<Vec<_>>();
        assert_eq!(names(&reduced["spec"]["volumes"]), ["a", "d", "e", "f"]);
        assert_eq!(names(&reduced["spec"]["containers"][0]["volumeMounts"]), ["a"]);
        assert!(names(&reduced["spec"]["initContainers"][0]["volumeMounts"]).is_empty());
        assert!(reduced["spec"]["containers"][0].get("volumeDevices").is_none());
    }
}
