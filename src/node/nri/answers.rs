//! A request of the runtime and its answer.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::PathBuf;
use std::time::Duration;

use prost::Message;
use tokio::time::Instant;
use tracing::{Instrument, Span, debug, info, warn};

use super::NriSettings;
use super::messages::nri::*;
use super::places::{Roots, is_bound_to_its_source, with_source};
use super::volumes::{Reason, Sources, WantedMount, find_sources};
use crate::manifest::pod::{PodIdentity, PodUid};
use crate::node::NodeHandle;
use crate::node::feed::{Choice, RuntimeChange};
use crate::node::metrics::Recorder;
use crate::node::pod::PodOrigin;
use crate::node::spans;
use crate::node::state::{ContainerEntry, KeptMount, PodEntry};
use crate::volume::VOLUMES_KEY;

/// The events to which podfs subscribes. Every version of NRI that podfs supports has them.
const EVENTS: [Event; 5] = [
    Event::RunPodSandbox,
    Event::StopPodSandbox,
    Event::RemovePodSandbox,
    Event::CreateContainer,
    Event::RemoveContainer,
];
/// The longest time for one answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// The sources of mounts, as the metrics name them.
const PODFS: &str = "podfs";
const KUBELET: &str = "kubelet";

/// The state for the answers to the runtime's requests.
pub(super) struct NriAnswers {
    settings: NriSettings,
    roots: Roots,
    /// The directory of the pods with podfs's volumes.
    pods_directory: PathBuf,
    run_directory: PathBuf,
    node: NodeHandle,
    recorder: Recorder,
    changes: Box<dyn Fn(RuntimeChange) -> bool + Send + Sync>,
    /// The time limit of one answer.
    time_limit: Duration,
    /// The containers with volumes of chosen pods, by their ids.
    containers: BTreeMap<String, (PodIdentity, ContainerEntry)>,
    /// The part of the runtime's list that has arrived: pods by their sandboxes, and containers.
    listed: (BTreeMap<String, PodSandbox>, Vec<Container>),
    /// The pods whose volumes were not mounted in time.
    late: HashSet<PodUid>,
}

/// An answer.
pub(super) enum Answered {
    /// The bytes of the message, and whether it answers the last part of the runtime's list.
    Message(Vec<u8>, bool),
    /// podfs does not know the method.
    Unimplemented,
}

impl NriAnswers {
    pub(super) fn new(
        settings: NriSettings,
        root_directory: PathBuf,
        run_directory: PathBuf,
        node: NodeHandle,
        recorder: Recorder,
        changes: Box<dyn Fn(RuntimeChange) -> bool + Send + Sync>,
    ) -> NriAnswers {
        let roots = Roots::of(&settings.kubelet_root);
        let pods_directory = root_directory.join("pods");
        NriAnswers {
            settings,
            roots,
            pods_directory,
            run_directory,
            node,
            recorder,
            changes,
            time_limit: ANSWER_TIMEOUT,
            containers: BTreeMap::new(),
            listed: Default::default(),
            late: HashSet::new(),
        }
    }

    /// Answers a request. A request that podfs cannot parse gets an empty answer: an error would fail a container.
    pub(super) async fn answer(&mut self, method: &str, payload: &[u8]) -> Answered {
        let started = Instant::now();
        let mut is_last = false;
        let answer = match method {
            "Configure" => self.configure(decode(method, payload)).encode_to_vec(),
            "Synchronize" => {
                let (answer, is_whole) = self.synchronize(decode(method, payload));
                is_last = is_whole;
                answer.encode_to_vec()
            }
            "CreateContainer" => self.create_container(decode(method, payload), started).await.encode_to_vec(),
            "StateChange" => {
                self.take_state(decode(method, payload));
                Vec::new()
            }
            "Shutdown" => Vec::new(),
            other => {
                debug!("the container runtime asks for {other}, which podfs does not know");
                return Answered::Unimplemented;
            }
        };
        self.recorder.nri(method, started);
        Answered::Message(answer, is_last)
    }

    /// Sends a change to the manager.
    pub(super) fn report(&self, change: RuntimeChange) {
        // Fails only while the daemon ends.
        let _ = (self.changes)(change);
    }

    /// The pods that podfs serves for the runtime and of which the kubelet has no directory.
    pub(super) fn without_directory(&self) -> BTreeSet<PodUid> {
        let state = self.node.state();
        let ours = state
            .pods
            .iter()
            .filter(|(_, pod)| pod.origin == Some(PodOrigin::Runtime) && pod.stage.is_some())
            .map(|(uid, _)| uid.clone());
        ours.filter(|uid| !self.settings.kubelet_root.join("pods").join(uid.as_str()).exists()).collect()
    }

    fn configure(&mut self, request: ConfigureRequest) -> ConfigureResponse {
        let ConfigureRequest { runtime_name, runtime_version, request_timeout, .. } = request;
        let half = u64::try_from(request_timeout).ok().filter(|timeout| *timeout > 0).map(|timeout| timeout / 2);
        self.time_limit = half.map_or(ANSWER_TIMEOUT, Duration::from_millis).min(ANSWER_TIMEOUT);
        self.roots = Roots::of(&self.settings.kubelet_root);
        self.listed = Default::default();
        info!(
            "{runtime_name} {runtime_version} knows podfs as a plugin; podfs answers it within {:?}",
            self.time_limit
        );
        ConfigureResponse { events: EVENTS.into_iter().fold(0, |mask, event| mask | 1 << (event as i32 - 1)) }
    }

    fn synchronize(&mut self, request: SynchronizeRequest) -> (SynchronizeResponse, bool) {
        let SynchronizeRequest { pods, containers, more } = request;
        self.listed.0.extend(pods.into_iter().map(|pod| (pod.id.clone(), pod)));
        self.listed.1.extend(containers);
        if !more {
            let (pods, containers) = std::mem::take(&mut self.listed);
            let listed = |one: &Container| Some((one.id.clone(), self.listed(one, pods.get(&one.pod_sandbox_id)?)?));
            let listed = containers.iter().filter_map(listed).collect();
            let before = std::mem::replace(&mut self.containers, listed);
            let uid = |(id, pod): (String, PodSandbox)| Some((id, PodUid::parse(&pod.uid).ok()?));
            self.report(RuntimeChange::Synchronized(pods.into_iter().filter_map(uid).collect()));
            let all = before.values().chain(self.containers.values());
            let affected: BTreeMap<_, _> = all.map(|(pod, _)| (pod.uid.clone(), pod.clone())).collect();
            affected.values().for_each(|pod| self.report_containers(pod));
        }
        (SynchronizeResponse { more }, !more)
    }

    /// Whether an existing container has podfs's volumes or the kubelet's; `None` if it has no volumes that podfs could
    /// serve.
    fn listed(&self, container: &Container, pod: &PodSandbox) -> Option<(PodIdentity, ContainerEntry)> {
        let is_own = |mount: &&Mount| std::path::Path::new(&mount.source).starts_with(&self.pods_directory);
        let is_kept = |mount: &&Mount| self.roots.place(&mount.source).is_some();
        let mounts = container.mounts.iter();
        let replaced: Vec<_> = mounts.clone().filter(is_own).map(|mount| mount.destination.clone()).collect();
        let kept = |mount: &Mount| KeptMount { path: mount.destination.clone(), reason: None };
        let kept: Vec<_> = mounts.filter(is_kept).map(kept).collect();
        let is_relevant = !replaced.is_empty() || (!kept.is_empty() && self.is_chosen(pod));
        let entry = ContainerEntry { id: container.id.clone(), name: container.name.clone(), replaced, kept };
        is_relevant.then_some((identity(pod)?, entry))
    }

    fn take_state(&mut self, change: StateChangeEvent) {
        let event = change.event();
        let StateChangeEvent { pod, container, .. } = change;
        let sandbox = pod.unwrap_or_default();
        match (event, PodUid::parse(&sandbox.uid)) {
            (Event::RunPodSandbox, Ok(uid)) => self.report(RuntimeChange::Started(sandbox.id, uid)),
            (Event::StopPodSandbox, _) => self.report(RuntimeChange::Stopped(sandbox.id)),
            (Event::RemovePodSandbox, uid) => {
                self.late.retain(|late| Some(late) != uid.as_ref().ok());
                self.report(RuntimeChange::Removed(sandbox.id));
            }
            (Event::RemoveContainer, _) => {
                if let Some((pod, _)) = self.containers.remove(&container.unwrap_or_default().id) {
                    self.report_containers(&pod);
                }
            }
            _ => {}
        }
    }

    async fn create_container(&mut self, request: CreateContainerRequest, started: Instant) -> CreateContainerResponse {
        let (pod, container) = (request.pod.unwrap_or_default(), request.container.unwrap_or_default());
        let place = |mount: &Mount| Some((mount.clone(), self.roots.place(&mount.source)?));
        let mounts: Vec<_> =
            container.mounts.iter().filter_map(place).filter(|(_, place)| place.pod == pod.uid).collect();
        let Ok(uid) = PodUid::parse(&pod.uid) else { return CreateContainerResponse::default() };
        if mounts.is_empty() || !self.is_chosen(&pod) {
            return CreateContainerResponse::default();
        }
        // podfs leaves these mounts to the kubelet and reports no reason: a part (subPath) of a volume that podfs does
        // not serve, and volumes of a pod that is not chosen, and that podfs knows only for its CSI volumes.
        let known = self.entry(&uid);
        let is_for_kubelet = |place: &super::places::PodVolumePath| {
            known.as_ref().is_some_and(|pod| {
                let is_unknown = pod.volumes.iter().all(|one| one.name != place.volume);
                is_unknown && (place.is_part || pod.origin == Some(PodOrigin::Kubelet))
            })
        };
        let mounts: Vec<_> = mounts.into_iter().filter(|(_, place)| !is_for_kubelet(place)).collect();
        let (bound, free): (Vec<_>, Vec<_>) = mounts.into_iter().partition(|(mount, _)| is_bound_to_its_source(mount));
        let wanted: Vec<WantedMount> = free
            .iter()
            .map(|(mount, place)| WantedMount { destination: mount.destination.clone(), place: place.clone() })
            .collect();
        let until = started + self.time_limit;
        let may_wait = !self.late.contains(&uid);
        let find = find_sources(&self.node, &self.run_directory, &uid, &container, &wanted, until, may_wait);
        let mut sources = find.instrument(spans::of_uid(&uid, identity(&pod).as_ref())).await;
        sources.extend(bound.iter().map(|(mount, _)| (mount.destination.clone(), Err(Reason::Options))));
        if Instant::now() >= until {
            self.late.insert(uid);
        }
        let mounts = free.iter().chain(&bound);
        let volumes = mounts.map(|(mount, place)| (mount.destination.as_str(), place.volume.as_str())).collect();
        self.report_sources(&pod, &container, &sources, &volumes);
        let replaced = free.iter().filter_map(|(mount, _)| {
            let source = sources.get(&mount.destination)?.clone().ok()?;
            Some(with_source(mount, source))
        });
        CreateContainerResponse { adjust: Some(ContainerAdjustment { mounts: replaced.collect() }) }
    }

    /// Counts and logs the sources of a container's mounts, and reports them to the manager.
    fn report_sources(
        &mut self,
        pod: &PodSandbox,
        container: &Container,
        sources: &Sources,
        volumes: &BTreeMap<&str, &str>,
    ) {
        let known = identity(pod);
        for (destination, source) in sources {
            let volume = volumes.get(destination.as_str());
            let span = known.as_ref().zip(volume).map(|(pod, volume)| spans::of_volume(&pod.uid, Some(pod), volume));
            let _span = span.as_ref().map(Span::enter);
            match source {
                Ok(source) => {
                    self.recorder.nri_mount(PODFS, "");
                    debug!("container {}: {destination} is {source}", container.name);
                }
                Err(reason) => {
                    self.recorder.nri_mount(KUBELET, reason.word());
                    warn!(
                        "pod {}/{}, container {}: {destination} is the kubelet's volume: {}",
                        pod.namespace,
                        pod.name,
                        container.name,
                        reason.sentence()
                    );
                }
            }
        }
        let Some(pod) = known.filter(|_| !sources.is_empty()) else { return };
        let mut entry = ContainerEntry { id: container.id.clone(), name: container.name.clone(), ..Default::default() };
        for (destination, source) in sources {
            match source {
                Ok(_) => entry.replaced.push(destination.clone()),
                Err(reason) => {
                    let reason = Some(reason.sentence().to_owned());
                    entry.kept.push(KeptMount { path: destination.clone(), reason });
                }
            }
        }
        self.containers.insert(container.id.clone(), (pod.clone(), entry));
        self.report_containers(&pod);
    }

    /// Sends the changed containers of a pod to the manager.
    fn report_containers(&self, pod: &PodIdentity) {
        let of_pod = self.containers.values().filter(|(of, _)| of.uid == pod.uid);
        self.report(RuntimeChange::Containers(pod.clone(), of_pod.map(|(_, container)| container.clone()).collect()));
        let of_podfs = self.containers.values().filter(|(_, container)| !container.replaced.is_empty()).count();
        self.recorder.nri_containers(PODFS, of_podfs);
        self.recorder.nri_containers(KUBELET, self.containers.len() - of_podfs);
    }

    /// Whether podfs serves the pod, or is about to. Only the manager knows the label of its namespace.
    fn is_chosen(&self, pod: &PodSandbox) -> bool {
        let mark = pod.labels.get(VOLUMES_KEY).or_else(|| pod.annotations.get(VOLUMES_KEY)).map(String::as_str);
        let is_served = || PodUid::parse(&pod.uid).is_ok_and(|uid| self.entry(&uid).is_some());
        match mark {
            Some(mark) => mark == "true",
            None => self.settings.choice == Choice::All || is_served(),
        }
    }

    fn entry(&self, uid: &PodUid) -> Option<std::sync::Arc<PodEntry>> {
        let entry = self.node.state().pods.get(uid).cloned()?;
        let is_known = entry.stage.is_some() && matches!(entry.origin, Some(PodOrigin::Runtime | PodOrigin::Kubelet));
        is_known.then_some(entry)
    }
}

fn identity(pod: &PodSandbox) -> Option<PodIdentity> {
    let uid = PodUid::parse(&pod.uid).ok()?;
    Some(PodIdentity { namespace: pod.namespace.clone(), name: pod.name.clone(), uid })
}

fn decode<T: Message + Default>(method: &str, payload: &[u8]) -> T {
    T::decode(payload).unwrap_or_else(|error| {
        warn!("podfs cannot read a request {method} of the container runtime: {error}; it changes nothing");
        T::default()
    })
}
