//! The pods whose volumes podfs serves beside the kubelet's own, and until when. Plain data.
//!
//! 1. A pod is chosen by its label or annotation, by its namespace, or because all are. A pod with the value `"false"` never is.
//! 2. Only volumes of the four payload kinds are chosen: configMap, secret, downwardAPI and projected.
//! 3. A chosen pod stays chosen while a sandbox of it may have containers: until its source no longer has it and the runtime
//!    has removed its sandboxes. If the pod's phase is Succeeded or Failed, stopped sandboxes suffice.
//! 4. While the runtime is not connected, the kubelet's directory of the pod shows whether there are containers.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::manifest::pod::{PodIdentity, PodUid};
use crate::node::pod::{NodePod, PodStage};
use crate::node::state::ContainerEntry;
use crate::volume::MARK;

/// The kinds of volume that podfs serves in the kubelet's place, as manifests name them.
const KINDS: [&str; 4] = ["configMap", "secret", "downwardAPI", "projected"];

/// Which pods are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// Those with the label or annotation, and those of namespaces with the label.
    #[default]
    Labeled,
    /// All but those that say `"false"`.
    All,
}

/// A change of the node's pods that the runtime has reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RuntimeChange {
    /// These sandboxes are all that there are, with their pods.
    Synchronized(BTreeMap<String, PodUid>),
    /// A sandbox of the pod starts.
    Started(String, PodUid),
    /// No container of the sandbox runs any more.
    Stopped(String),
    /// The sandbox is gone.
    Removed(String),
    /// The connection is lost: sandboxes may go unseen.
    Lost,
    /// The kubelet has no directory of the pod any more.
    NoDirectory(PodUid),
    /// These are all containers of the pod whose volumes podfs was asked for.
    Containers(PodIdentity, Vec<ContainerEntry>),
    /// What is wrong with the connection now.
    Trouble(Vec<String>),
}

/// A sandbox of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Sandbox {
    pod: PodUid,
    /// Whether its containers were ended for good.
    is_stopped: bool,
}

/// The pods that are chosen.
#[derive(Debug, Default)]
pub struct Chosen {
    choice: Choice,
    /// The namespaces with the label.
    namespaces: BTreeSet<String>,
    /// The sandboxes, by their ids.
    sandboxes: BTreeMap<String, Sandbox>,
    /// Whether they are all that there are.
    is_synchronized: bool,
    /// The pods that were chosen and have not been given up.
    taken: BTreeSet<PodUid>,
    /// Those of them that an earlier daemon served, and that no source has described yet.
    unheard: BTreeSet<PodUid>,
    /// Those that no source has any more.
    gone: BTreeSet<PodUid>,
    /// Those of which the kubelet has no directory.
    without_directory: BTreeSet<PodUid>,
}

impl Chosen {
    /// Chooses in this way. `earlier` are the pods that an earlier daemon served.
    pub fn new(choice: Choice, earlier: impl IntoIterator<Item = PodUid>) -> Chosen {
        let taken: BTreeSet<PodUid> = earlier.into_iter().collect();
        Chosen { choice, unheard: taken.clone(), taken, ..Chosen::default() }
    }

    /// Whether the labels of namespaces matter.
    pub fn wants_namespaces(&self) -> bool {
        self.choice == Choice::Labeled
    }

    /// Whether the pod is one that is chosen when it starts.
    pub fn matches(&self, pod: &NodePod) -> bool {
        let facts = &pod.pod.facts;
        let mark = facts.labels.get(MARK).or_else(|| facts.annotations.get(MARK)).map(String::as_str);
        // The runtime's mounts map ids, and a plugin does not get the mapping.
        let is_possible = !facts.user_namespace && payload_volumes(&pod.manifest).next().is_some();
        let is_marked = match mark {
            Some(mark) => mark == "true",
            None => self.choice == Choice::All || self.namespaces.contains(&pod.pod.identity.namespace),
        };
        is_marked && is_possible
    }

    /// The namespaces with the label are these. Gives whether others were before.
    pub fn take_namespaces(&mut self, namespaces: BTreeSet<String>) -> bool {
        let before = std::mem::replace(&mut self.namespaces, namespaces);
        before != self.namespaces
    }

    /// Takes a change of a source: it has the pod, or no longer has it.
    pub fn hear(&mut self, uid: &PodUid, has_it: bool) {
        self.unheard.remove(uid);
        match has_it {
            true => drop(self.gone.remove(uid)),
            false => drop(self.gone.insert(uid.clone())),
        }
    }

    /// A source has listed its pods. Gives those of an earlier daemon that no source has described.
    pub fn hear_all(&mut self) -> BTreeSet<PodUid> {
        let unheard = std::mem::take(&mut self.unheard);
        self.gone.extend(unheard.iter().cloned());
        unheard
    }

    /// Takes a change of the runtime. Gives the pods whose service may have changed.
    pub fn change(&mut self, change: &RuntimeChange) -> Vec<PodUid> {
        match change {
            RuntimeChange::Synchronized(sandboxes) => {
                let of = |pod: &PodUid| Sandbox { pod: pod.clone(), is_stopped: false };
                self.sandboxes = sandboxes.iter().map(|(id, pod)| (id.clone(), of(pod))).collect();
                self.is_synchronized = true;
                self.taken.iter().cloned().collect()
            }
            RuntimeChange::Started(sandbox, uid) => {
                self.sandboxes.insert(sandbox.clone(), Sandbox { pod: uid.clone(), is_stopped: false });
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
            RuntimeChange::NoDirectory(uid) => {
                self.without_directory.insert(uid.clone());
                vec![uid.clone()]
            }
            RuntimeChange::Lost => {
                self.is_synchronized = false;
                Vec::new()
            }
            RuntimeChange::Containers(..) | RuntimeChange::Trouble(_) => Vec::new(),
        }
    }

    /// Whether podfs serves the pod, which a source describes or has described.
    pub fn holds(&mut self, uid: &PodUid, pod: Option<&NodePod>) -> bool {
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
        let goes_on = self.taken.contains(uid) && (may_run || (!has_ended && pod.stage == PodStage::Terminating));
        match starts || goes_on {
            true => drop(self.taken.insert(uid.clone())),
            false => drop(self.taken.remove(uid)),
        }
        starts || goes_on
    }

    /// Nothing is known of the pod any more.
    pub fn forget(&mut self, uid: &PodUid) {
        self.taken.remove(uid);
        self.gone.remove(uid);
        self.without_directory.remove(uid);
    }

    /// Whether no source has the pod any more.
    pub fn is_gone(&self, uid: &PodUid) -> bool {
        self.gone.contains(uid)
    }

    /// The pods that podfs serves.
    pub fn taken(&self) -> Vec<PodUid> {
        self.taken.iter().cloned().collect()
    }
}

/// The volumes of the four kinds in a manifest.
fn payload_volumes(manifest: &Value) -> impl Iterator<Item = &Value> {
    let volumes = manifest["spec"]["volumes"].as_array().into_iter().flatten();
    volumes.filter(|volume| KINDS.iter().any(|kind| volume.get(kind).is_some_and(|source| !source.is_null())))
}

/// The manifest with its payload volumes alone, and with the containers' mounts of those. Everything else is the kubelet's.
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
        parsed.facts.labels.extend(mark.map(|mark| (MARK.to_owned(), mark.to_owned())));
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
        assert!(!chosen.holds(&uid, Some(&ends)), "it is being deleted when podfs first hears of it");
        chosen.change(&sandboxes(&[]));
        assert!(chosen.holds(&uid, Some(&runs)), "its containers are going to start");
        chosen.change(&RuntimeChange::Started("s1".into(), uid.clone()));
        let unmarked = pod(None, PodStage::Desired);
        assert!(chosen.holds(&uid, Some(&unmarked)), "its containers run with podfs's volumes");
        assert!(chosen.holds(&uid, Some(&ends)));
        chosen.hear(&uid, false);
        assert!(chosen.holds(&uid, Some(&ends)), "the server has forgotten it, and the sandbox runs");
        chosen.change(&RuntimeChange::Stopped("s1".into()));
        assert!(chosen.holds(&uid, Some(&ends)));
        assert_eq!(chosen.change(&RuntimeChange::Removed("s1".into())), vec![uid.clone()]);
        assert!(!chosen.holds(&uid, Some(&ends)));
        assert!(chosen.taken().is_empty());
    }

    #[test]
    fn a_pod_whose_end_nobody_saw_goes_with_the_runtimes_list_or_with_the_kubelets_directory() {
        let (uid, ended) = (sample::uid("u"), pod(Some("true"), PodStage::Terminal));
        let earlier = || Chosen::new(Choice::Labeled, [uid.clone()]);
        let mut chosen = earlier();
        assert!(chosen.holds(&uid, Some(&ended)), "the runtime has not said which sandboxes there are");
        chosen.change(&sandboxes(&["s"]));
        assert!(chosen.holds(&uid, Some(&ended)));
        chosen.change(&RuntimeChange::Stopped("s".into()));
        assert!(!chosen.holds(&uid, Some(&ended)), "its phase says that no container runs");
        let mut chosen = earlier();
        chosen.change(&sandboxes(&[]));
        assert!(!chosen.holds(&uid, Some(&ended)));
        let mut chosen = earlier();
        assert_eq!(chosen.hear_all(), [uid.clone()].into());
        chosen.change(&RuntimeChange::NoDirectory(uid.clone()));
        assert!(!chosen.holds(&uid, Some(&ended)));
    }

    #[test]
    fn only_the_four_kinds_are_left_of_a_manifest() {
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
        let left = with_payload_volumes(&manifest);
        let names =
            |list: &Value| list.as_array().into_iter().flatten().map(|one| one["name"].clone()).collect::<Vec<_>>();
        assert_eq!(names(&left["spec"]["volumes"]), ["a", "d", "e", "f"]);
        assert_eq!(names(&left["spec"]["containers"][0]["volumeMounts"]), ["a"]);
        assert!(names(&left["spec"]["initContainers"][0]["volumeMounts"]).is_empty());
        assert!(left["spec"]["containers"][0].get("volumeDevices").is_none());
    }
}
