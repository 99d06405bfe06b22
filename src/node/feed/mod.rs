//! The feed: the pods of the node, and the objects that their volumes refer to.
//!
//! | module | owns |
//! |---|---|
//! | `directory` | the manifest directory: static pods and objects |
//! | `pods` | the pods that the API server has put on the node |
//! | `namespaces` | the namespaces whose pods are chosen for the runtime's containers |
//! | `kubelet_pods` | the pods of a node with a kubelet, and which of their volumes podfs serves |
//! | `chosen` | the pods whose volumes podfs serves in the place of the kubelet's, and until when |
//! | `merge` | one list of the pods of all sources, and its changes |
//! | `object` | an object as its source has it, and parsed |
//! | `readers` | clients of the API server that read the objects of CSI volumes with the pods' own tokens |
//! | `wanted` | the references of pods to objects |
//! | `registry` | which pods refer to which objects, and what podfs knows of each object |
//! | `server` | the requests for objects to the API server |
//! | `journal` | the log lines about objects |
//! | `follower` | the pushes for the supervisor of one pod |
//! | `update` | from the state of a supervisor to the push that brings it up to date |
//!
//! [`Feed::next`] gives the manager the changes of pods; [`PodObjects`] follows their objects. A slow caller gets a pod
//! or an object that changed several times meanwhile once, in its last state.

mod chosen;
mod directory;
mod follower;
mod journal;
mod kubelet_pods;
mod merge;
mod namespaces;
mod object;
mod pods;
mod readers;
mod registry;
mod server;
#[cfg(test)]
mod tests;
mod update;
mod wanted;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::pod::{NodePod, PodOrigin};
use super::publication::Publication;
use super::state::ContainerEntry;
use crate::kube::client::ApiClient;
use crate::kube::settings::SettingsError;
use crate::manifest::pod::{PodIdentity, PodUid};
use crate::source::{AbortOnDrop, CombinedFiles, Contacts, Scanned, SettingsSource, SourceError};
use directory::DirectoryCombiner;
use kubelet_pods::KubeletPods;
use merge::MergedPods;
use pods::PodChange;
use registry::ObjectRegistry;
use server::ObjectServer;

pub use chosen::{Choice, Chosen, RuntimeChange};
pub use follower::ObjectFollower;
pub use kubelet_pods::KubeletChange;
pub(in crate::node) use readers::PodReaders;

/// The sources of pods and objects.
#[derive(Default)]
pub struct FeedSettings {
    /// The directory of static pods and of objects.
    pub manifests: Option<PathBuf>,
    /// The access to the API server, if there is one. It needs the name of the node.
    pub api: Option<SettingsSource>,
    /// Whether podfs reads the objects of a CSI volume with the token of its pod, instead of its own credentials.
    pub reads_as_pods: bool,
    /// The name of the node, where it is known.
    pub node: Option<String>,
    /// The pods that an earlier daemon knew. A static pod among them stays while podfs has never been able to read its
    /// file.
    pub earlier: Vec<NodePod>,
}

/// A source of pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PodSource {
    /// The manifest directory.
    Files,
    /// The API server.
    Api,
    /// A kubelet, which publishes CSI volumes.
    Kubelet,
    /// `podfs node --nri`: the pods whose containers have volumes of podfs in the place of the kubelet's.
    Runtime,
}

impl PodSource {
    /// The source that described a pod of this origin.
    pub fn of(origin: &PodOrigin) -> PodSource {
        match origin {
            PodOrigin::File(_) => PodSource::Files,
            PodOrigin::Api => PodSource::Api,
            PodOrigin::Kubelet => PodSource::Kubelet,
            PodOrigin::Runtime => PodSource::Runtime,
        }
    }
}

/// A change of the node's pods, for the manager.
#[derive(Clone, Debug)]
pub enum FeedEvent {
    /// The source has listed all its pods, for the first time; it is ready from now on.
    Pods(PodSource, Vec<NodePod>),
    /// A pod is new, or different.
    Put(NodePod),
    /// The source no longer has the pod.
    Gone(PodSource, PodUid),
    /// These are now all containers of the pod with a volume of podfs, or with a volume of the kubelet that podfs could
    /// serve.
    Containers(PodIdentity, Vec<ContainerEntry>),
    /// These are now all problems of the source, one sentence each.
    Failure(PodSource, Vec<String>),
}

/// Why the feed cannot start.
#[derive(Debug, thiserror::Error)]
pub enum FeedError {
    /// Files cannot be watched.
    #[error(transparent)]
    Files(#[from] SourceError),
    /// The settings of the API server cannot be used.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// podfs does not know the name of the node, by which it finds the pods of the node.
    #[error("the pods of this node are found by its name; give it with --node-name, as kubectl get nodes shows it")]
    NoNode,
}

/// The pods of the node.
pub struct Feed {
    inputs: UnboundedReceiver<FeedInput>,
    /// Keeps the channel open when there is no source.
    input: UnboundedSender<FeedInput>,
    merge: MergedPods,
    events: VecDeque<FeedEvent>,
    static_pods: StaticPods,
    objects: PodObjects,
    contacts: Contacts,
    client: Option<ApiClient>,
    /// The pods that an earlier daemon served for a kubelet or a runtime.
    earlier: Vec<NodePod>,
    /// The pods of a node with a kubelet, if the kubelet or the runtime decides which of them podfs serves.
    kubelet: Option<KubeletPods>,
    /// The task that follows the namespaces whose pods are chosen.
    _namespaces: Option<AbortOnDrop>,
    _files: Option<CombinedFiles>,
    _pods: Option<AbortOnDrop>,
}

/// The objects of the node's pods. Cheap to clone.
#[derive(Clone)]
pub struct PodObjects {
    registry: Arc<ObjectRegistry>,
}

/// A change from a source.
enum FeedInput {
    Files { pods: Option<Vec<NodePod>>, problems: BTreeSet<String>, unread: BTreeSet<PathBuf>, is_found: bool },
    Api { change: Option<PodChange>, trouble: Option<Vec<String>> },
    Kubelet(KubeletChange),
    Runtime(RuntimeChange),
    Namespaces(BTreeSet<String>),
}

/// The state of the manifest files.
#[derive(Default)]
struct StaticPods {
    pods: Vec<NodePod>,
    problems: BTreeSet<String>,
}

impl Feed {
    /// Starts to read files and to request objects. Does not wait for answers.
    ///
    /// # Errors
    /// When a limit of the kernel on watches of files is reached, or the settings of the API server cannot be used.
    /// The feed reports missing or wrong files, and a server that cannot be reached, later, as [`FeedEvent::Failure`].
    pub async fn open(settings: FeedSettings) -> Result<Feed, FeedError> {
        let FeedSettings { manifests, api, reads_as_pods, node, earlier } = settings;
        let (input, inputs) = unbounded_channel();
        let contacts = Contacts::default();
        let readers = api.clone().filter(|_| reads_as_pods).map(PodReaders::new);
        let client = match api {
            Some(access) => Some(ApiClient::open(access).await?),
            None => None,
        };
        let pods = match (&client, &node) {
            (Some(client), Some(node)) => {
                let (client, node, contacts) = (client.clone(), node.clone(), contacts.clone());
                Some(AbortOnDrop::spawn(pods::follow(client, node, contacts, input.clone())))
            }
            (Some(_), None) => return Err(FeedError::NoNode),
            (None, _) => None,
        };
        let server = client.clone().map(|client| ObjectServer::new(client, contacts.clone(), readers));
        let registry = ObjectRegistry::new(manifests.is_some(), server);
        let files = manifests.map(|path| open_files(path, node, Arc::clone(&registry), input.clone())).transpose()?;
        let of_kubelet = earlier.iter().filter(|pod| matches!(pod.origin, PodOrigin::Kubelet | PodOrigin::Runtime));
        Ok(Feed {
            inputs,
            input,
            earlier: of_kubelet.cloned().collect(),
            merge: MergedPods::new(earlier),
            events: VecDeque::new(),
            static_pods: StaticPods::default(),
            objects: PodObjects { registry },
            contacts,
            client,
            kubelet: None,
            _namespaces: None,
            _files: files,
            _pods: pods,
        })
    }

    /// The state of the requests to the API server, for each object and for the pods.
    pub fn contacts(&self) -> Contacts {
        self.contacts.clone()
    }

    /// The readers of the objects of CSI volumes, where the pods read them with their own credentials.
    pub(in crate::node) fn readers(&self) -> Option<PodReaders> {
        self.objects.registry.readers().cloned()
    }

    /// The client of the API server, if there is one. All parts of the daemon share its connection.
    pub(crate) fn client(&self) -> Option<ApiClient> {
        self.client.clone()
    }

    /// From now on a kubelet decides which pods podfs serves: the sources only describe them. Returns a function that
    /// takes the kubelet's changes, and returns false once the feed is dropped.
    pub fn follow_kubelet(
        &mut self,
        publications: BTreeMap<PathBuf, Publication>,
    ) -> impl Fn(KubeletChange) -> bool + Send + Sync + 'static {
        let kubelet = self.kubelet.get_or_insert_default();
        kubelet.keep_names(&self.earlier);
        self.events.push_back(kubelet.publish(publications, &self.earlier));
        let input = self.input.clone();
        move |change| input.send(FeedInput::Kubelet(change)).is_ok()
    }

    /// From now on podfs serves pods only if they are chosen for the runtime's containers, or the kubelet has published
    /// volumes of them. `earlier` are the pods that an earlier daemon served for the runtime. Returns a function that
    /// takes the runtime's changes, and returns false once the feed is dropped.
    pub fn follow_runtime(
        &mut self,
        mut chosen: Chosen,
        earlier: &[NodePod],
    ) -> impl Fn(RuntimeChange) -> bool + Send + Sync + 'static {
        if let Some(client) = self.client.clone().filter(|_| chosen.wants_namespaces()) {
            self._namespaces = Some(AbortOnDrop::spawn(namespaces::follow(client, self.input.clone())));
        }
        let sources = [(PodSource::Files, self._files.is_some()), (PodSource::Api, self._pods.is_some())];
        chosen.await_sources(sources.into_iter().filter_map(|(source, is_there)| is_there.then_some(source)));
        let kubelet = self.kubelet.get_or_insert_default();
        kubelet.keep_names(&self.earlier);
        let pods = kubelet.choose(chosen, earlier);
        // The first list of the kubelet's pods has the chosen pods with the volumes that they have for the runtime.
        for event in self.events.iter_mut().filter(|event| matches!(event, FeedEvent::Pods(PodSource::Kubelet, _))) {
            *event = kubelet.published();
        }
        self.events.push_back(pods);
        let input = self.input.clone();
        move |change| input.send(FeedInput::Runtime(change)).is_ok()
    }

    /// The objects of the pods.
    pub fn objects(&self) -> PodObjects {
        self.objects.clone()
    }

    /// Waits for the next change. Cancel-safe.
    pub async fn next(&mut self) -> FeedEvent {
        loop {
            if let Some(event) = self.events.pop_front() {
                return event;
            }
            match self.inputs.recv().await.expect("self.input keeps the channel open") {
                FeedInput::Files { pods, problems, unread, is_found } => {
                    self.take_files(pods, problems, &unread, is_found)
                }
                FeedInput::Api { change, trouble } => self.take_api(change, trouble),
                FeedInput::Kubelet(change) => {
                    let event = self.kubelet.as_mut().and_then(|kubelet| kubelet.change(change));
                    self.events.extend(event);
                }
                FeedInput::Namespaces(names) => {
                    let kubelet = self.kubelet.as_mut();
                    self.events.extend(kubelet.map(|kubelet| kubelet.take_namespaces(names)).unwrap_or_default());
                }
                FeedInput::Runtime(change) => {
                    let kubelet = self.kubelet.as_mut();
                    self.events.extend(kubelet.map(|kubelet| kubelet.change_runtime(change)).unwrap_or_default());
                }
            }
        }
    }

    fn take_api(&mut self, change: Option<PodChange>, problems: Option<Vec<String>>) {
        let events = match change {
            Some(PodChange::All(pods)) => self.merge.take_list(pods),
            Some(PodChange::Put(pod)) => self.merge.put_pod(pod),
            Some(PodChange::Gone(uid)) => self.merge.remove_pod_of_api(&uid),
            None => Vec::new(),
        };
        self.pass_on(PodSource::Api, events, problems);
    }

    fn take_files(
        &mut self,
        pods: Option<Vec<NodePod>>,
        problems: BTreeSet<String>,
        unread: &BTreeSet<PathBuf>,
        is_found: bool,
    ) {
        self.static_pods.pods = pods.unwrap_or_else(|| std::mem::take(&mut self.static_pods.pods));
        // An earlier daemon may have read pods in a directory that does not exist now: until it exists, its pods are
        // unknown.
        let events = if is_found { self.merge.take_files(&self.static_pods.pods, unread) } else { Vec::new() };
        let changed = (problems != self.static_pods.problems).then(|| problems.iter().cloned().collect());
        self.static_pods.problems = problems;
        self.pass_on(PodSource::Files, events, changed);
    }

    /// Passes the changes of a source to the manager, or to the pods of a kubelet. `problems` are now all problems of the source, if
    /// they have changed.
    fn pass_on(&mut self, source: PodSource, events: Vec<FeedEvent>, problems: Option<Vec<String>>) {
        // While a source has problems, the manager removes no pod that the source has not listed. So it gets problems before a
        // list, and their end after the pods that podfs could not use before.
        let (before, after) = match problems {
            Some(none) if none.is_empty() => (None, Some(none)),
            problems => (problems, None),
        };
        let failure = |problems| FeedEvent::Failure(source, problems);
        self.events.extend(before.map(failure));
        match &mut self.kubelet {
            Some(kubelet) => self.events.extend(events.into_iter().flat_map(|event| kubelet.change_source(event))),
            None => self.events.extend(events),
        }
        self.events.extend(after.map(failure));
    }
}

impl PodObjects {
    /// Follows the objects of a pod.
    pub fn follow(&self, pod: &NodePod) -> ObjectFollower {
        ObjectFollower::new(Arc::clone(&self.registry), pod)
    }
}

/// Reads the manifest directory. Registers objects before the pods that refer to them.
fn open_files(
    path: PathBuf,
    node: Option<String>,
    registry: Arc<ObjectRegistry>,
    input: UnboundedSender<FeedInput>,
) -> Result<CombinedFiles, SourceError> {
    let mut objects = Arc::default();
    CombinedFiles::open(DirectoryCombiner::new(node), path, move |scanned| {
        let Scanned { combined, problems, unread, is_found } = scanned;
        let pods = combined.map(|content| {
            objects = content.objects;
            content.pods
        });
        if is_found {
            registry.take_files(Arc::clone(&objects), unread.first().map(PathBuf::as_path));
        }
        // Fails only if the feed was dropped, and this thread is about to end.
        let _ = input.send(FeedInput::Files { pods, problems, unread, is_found });
    })
}
