//! The state of the pod at this moment. The supervisor's task writes it; the threads that answer status requests read
//! it. A thread that holds the lock of the status waits for nothing but the lock of the counters, which it takes
//! second.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Instant, SystemTime};

use k8s_openapi::jiff::Timestamp;
use podfs_fuse::client::VolumeObserver;
use podfs_fuse::projection::GenerationName;
use podfs_fuse::projection::old::OldUsage;
use tokio::sync::watch;

use super::capacity::CapacityHistory;
use super::counter_store::CounterStore;
use super::counters::PodCounters;
use super::health::ServerHealth;
use super::pod_status::{
    AuditStatus, ExpansionStatus, ObjectStatus, PodState, PodStatus, ProcessStatus, VolumeState, VolumeStatus,
};
use crate::driver::AwaitedAnswer;
use crate::host::fs_group::{OwnershipNotice, OwnershipReport};
use crate::manifest::Tokens;
use crate::manifest::pod::PodIdentity;
use crate::source::{Contact, Contacts, Unreachable};
use crate::supervisor::server::ServerHistory;
use crate::supervisor::volume::{Expansion, PodVolume, ShownContent, VolumeLife};
use crate::volume::{Volume, VolumeSource};

/// The version of this podfs.
pub(in crate::supervisor) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The status of a pod, shared. Cheap to clone.
#[derive(Clone)]
pub(in crate::supervisor) struct StatusStore {
    status: Arc<Mutex<StoredStatus>>,
    counters: CounterStore,
    /// Announces changes to the tasks that follow the pod.
    changed: Arc<watch::Sender<()>>,
}

/// Why podfs cannot trace the requests of a volume.
#[derive(Debug, thiserror::Error)]
pub(in crate::supervisor) enum WatchError {
    #[error("pod {pod} has no volume {name:?}; it has {names}")]
    NoVolume { pod: PodIdentity, name: String, names: String },
    #[error("volume {name:?} is not mounted yet: {reason}")]
    Waiting { name: String, reason: String },
    #[error("volume {0:?} is a bind mount: its requests do not come to podfs")]
    Bind(String),
}

/// The status of a pod.
pub(in crate::supervisor) struct StoredStatus {
    identity: PodIdentity,
    /// When the supervisor began to serve the pod.
    pub(in crate::supervisor) started: SystemTime,
    health: ServerHealth,
    /// A problem of all volumes, besides those of the servers.
    trouble: Option<String>,
    /// The record of the contacts with an API server.
    pub(in crate::supervisor) contacts: Contacts,
    /// The tokens that volumes show.
    pub(in crate::supervisor) tokens: Tokens,
    /// The status of each volume, by place.
    pub(in crate::supervisor) volumes: BTreeMap<usize, VolumeReport>,
}

/// The status of a volume.
pub(in crate::supervisor) struct VolumeReport {
    pub(in crate::supervisor) name: String,
    pub(in crate::supervisor) kind: String,
    pub(in crate::supervisor) path: Option<PathBuf>,
    pub(in crate::supervisor) group: Option<u32>,
    pub(in crate::supervisor) is_read_only: bool,
    expansion: Option<Expansion>,
    /// The last report about the group of the volume's files.
    ownership: Option<OwnershipNotice>,
    pub(in crate::supervisor) state: VolumeLife,
    /// Whether a refresh of the volume has ended. True from the start for a volume with a source on the node.
    pub(in crate::supervisor) tried: bool,
    /// Since when the volume's generation is visible.
    since: Instant,
    /// The earlier generations that the volume still keeps.
    pub(in crate::supervisor) old: OldUsage,
    last_error: Option<String>,
    /// The answer of a driver that podfs waits for, until the refresh ends.
    awaited: Option<String>,
    /// Whether the volume's source does not answer.
    pub(in crate::supervisor) source_is_silent: bool,
    /// The errors that the kernel has counted on the disk of the source.
    pub(in crate::supervisor) disk_errors: BTreeMap<String, u64>,
    /// The observer of the volume's requests, if the server serves it.
    pub(in crate::supervisor) watch: Option<VolumeObserver>,
    /// The name of the PersistentVolumeClaim that the volume shows.
    pub(in crate::supervisor) claim: Option<String>,
    /// Whether podfs reports the volume's capacity.
    pub(in crate::supervisor) reports_capacity: bool,
    /// The state from earlier looks at the volume's capacity.
    pub(in crate::supervisor) earlier: CapacityHistory,
}

impl StatusStore {
    /// A store in which all `volumes` wait.
    pub(in crate::supervisor) fn new(identity: PodIdentity, volumes: &[Volume]) -> Self {
        let waiting = volumes.iter().map(|volume| VolumeReport::waiting(volume, &identity)).enumerate().collect();
        let status = StoredStatus {
            identity,
            started: SystemTime::now(),
            health: ServerHealth::default(),
            trouble: None,
            contacts: Contacts::default(),
            tokens: Tokens::default(),
            volumes: waiting,
        };
        Self { status: Arc::new(Mutex::new(status)), counters: CounterStore::default(), changed: Arc::default() }
    }

    /// Announces that the status may have changed.
    pub(in crate::supervisor) fn note_change(&self) {
        self.changed.send_replace(());
    }

    /// Receives the announcements of [`StatusStore::note_change`].
    pub(in crate::supervisor) fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// Locks the status.
    pub(in crate::supervisor) fn stored(&self) -> MutexGuard<'_, StoredStatus> {
        self.status.lock().expect("no thread panics while the store is locked")
    }

    pub(in crate::supervisor) fn counters(&self) -> &CounterStore {
        &self.counters
    }

    /// The pod's status, in the words of `podfs status`.
    pub(in crate::supervisor) fn status(&self) -> PodStatus {
        let status = self.stored();
        let (restarts, volumes) = self.counters.read(|counters| {
            let volumes: Vec<_> = status.volumes.values().map(|volume| volume.status(counters)).collect();
            (counters.server_restarts, volumes)
        });
        let trouble = status.trouble.clone().or_else(|| status.health.trouble(restarts, Instant::now()));
        let (state, reason, state_since) = with_source(&status.contacts, PodState::of(&volumes, trouble.as_deref()));
        let PodIdentity { namespace, name, uid } = &status.identity;
        PodStatus {
            namespace: Some(namespace.clone()),
            name: Some(name.clone()),
            uid: uid.to_string(),
            state,
            reason,
            state_since,
            supervisor: Some(ProcessStatus { pid: std::process::id(), version: Some(VERSION.to_owned()) }),
            server: status.health.status(restarts),
            volumes,
            objects: status.contacts.all().into_iter().map(object).collect(),
        }
    }

    /// The observer of the requests of the volume with this name.
    ///
    /// # Errors
    /// When there is no such volume, it is not mounted yet, or its requests do not reach podfs.
    pub(in crate::supervisor) fn watch(&self, name: &str) -> Result<VolumeObserver, WatchError> {
        let status = self.stored();
        let Some(volume) = status.volumes.values().find(|volume| volume.name == name) else {
            let names: Vec<_> = status.volumes.values().map(|volume| volume.name.as_str()).collect();
            let names = if names.is_empty() { "no volumes".to_owned() } else { names.join(", ") };
            return Err(WatchError::NoVolume { pod: status.identity.clone(), name: name.to_owned(), names });
        };
        match (&volume.watch, &volume.state) {
            (Some(watch), _) => Ok(watch.clone()),
            (None, VolumeLife::Waiting(reason)) => {
                Err(WatchError::Waiting { name: name.to_owned(), reason: reason.clone() })
            }
            (None, _) => Err(WatchError::Bind(name.to_owned())),
        }
    }
}

impl StoredStatus {
    /// Records the state of the volume at this place after a refresh. `mounted` is the volume whose mount it shows:
    /// itself, or the leader of its claim.
    pub(in crate::supervisor) fn refreshed(&mut self, place: usize, volume: &Volume, mounted: &PodVolume) {
        self.record_before_refresh(place, volume, mounted);
        if let Some(report) = self.volumes.get_mut(&place) {
            report.tried = true;
        }
    }

    /// Records the state of the volume at this place before its next refresh. `mounted` is as for [`Self::refreshed`].
    pub(in crate::supervisor) fn record_before_refresh(&mut self, place: usize, volume: &Volume, mounted: &PodVolume) {
        let before = self.volumes.remove(&place);
        let state = mounted.state().clone();
        let same = before.as_ref().filter(|before| before.generation() == state.generation());
        let tried = before.as_ref().is_some_and(|before| before.tried);
        let report = VolumeReport {
            name: volume.name.to_string(),
            kind: volume.field().to_owned(),
            path: mounted.path().map(ToOwned::to_owned),
            group: mounted.group(),
            is_read_only: mounted.is_read_only(),
            expansion: mounted.expansion().cloned(),
            ownership: before.as_ref().and_then(|before| before.ownership.clone()),
            tried,
            since: match tried {
                true => same.map_or_else(Instant::now, |before| before.since),
                false => since(state.generation()),
            },
            old: mounted.old_generations(),
            source_is_silent: before.as_ref().is_some_and(|before| before.source_is_silent),
            disk_errors: before.as_ref().map(|before| before.disk_errors.clone()).unwrap_or_default(),
            last_error: mounted.last_error().map(str::to_owned),
            awaited: None,
            watch: mounted.watch(),
            claim: volume.claim_name(&self.identity.name),
            reports_capacity: matches!(volume.source, VolumeSource::Claim(_) | VolumeSource::EmptyDir(_)),
            earlier: before.map(|before| before.earlier).unwrap_or_default(),
            state,
        };
        self.volumes.insert(place, report);
    }

    /// Records the last report about the group of a volume's files, or that the files have the group.
    pub(in crate::supervisor) fn ownership(&mut self, of: OwnershipReport) {
        if let Some(report) = self.volumes.values_mut().find(|report| report.name == of.volume) {
            report.ownership = of.notice;
        }
    }

    /// Records the answer of its driver that a volume waits for, or that it has the answer.
    pub(in crate::supervisor) fn driver_called(&mut self, awaited: AwaitedAnswer) {
        if let Some(report) = self.volumes.values_mut().find(|report| report.name == awaited.volume) {
            report.awaited = awaited.sentence;
        }
    }

    /// Adds a volume.
    pub(in crate::supervisor) fn add(&mut self, place: usize, volume: &Volume) {
        let report = VolumeReport::waiting(volume, &self.identity);
        self.volumes.insert(place, report);
    }

    /// Removes the volume at this place.
    pub(in crate::supervisor) fn remove(&mut self, place: usize) -> Option<VolumeReport> {
        self.volumes.remove(&place)
    }

    /// Records the history of the servers, how many servers have replaced another one since the last call (`restarts`),
    /// and the version of the current server.
    pub(in crate::supervisor) fn server(&mut self, history: &ServerHistory, restarts: u32, version: Option<String>) {
        self.health.note(history, restarts, version, Instant::now());
        for volume in self.volumes.values_mut().filter(|volume| volume.watch.is_some()) {
            volume.source_is_silent = history.silent_sources.contains(&volume.name);
            volume.disk_errors = history.disk_errors.get(&volume.name).cloned().unwrap_or_default();
        }
    }

    /// The problem, if there is no server at this moment.
    pub(in crate::supervisor) fn server_is_dead(&self) -> Option<String> {
        self.health.dead()
    }

    /// Sets the record of the contacts with an API server.
    pub(in crate::supervisor) fn contacts(&mut self, contacts: Contacts) {
        self.contacts = contacts;
    }

    /// Sets a problem of all volumes.
    pub(in crate::supervisor) fn trouble(&mut self, trouble: &str) {
        self.trouble = Some(trouble.to_owned());
    }
}

/// When a generation became visible, according to its name: an earlier supervisor may have made it. If the name has a
/// time in the future, because the clock was set back, the result is this moment.
fn since(generation: Option<&GenerationName>) -> Instant {
    let age = generation.and_then(GenerationName::made_at).and_then(|made_at| made_at.elapsed().ok());
    let now = Instant::now();
    age.and_then(|age| now.checked_sub(age)).unwrap_or(now)
}

/// The state of a pod whose objects come from an API server, with the reason. It is `of_volumes`, unless the API server
/// has deleted the pod or cannot be reached. Then the result also has the time since when that is so.
fn with_source(
    contacts: &Contacts,
    of_volumes: (PodState, Option<String>),
) -> (PodState, Option<String>, Option<String>) {
    let (state, reason) = of_volumes;
    let (state, cause, since) = match (contacts.pod_deleted(), contacts.unreachable()) {
        (Some(since), _) => {
            let cause = "the API server has deleted the pod; podfs serves its volumes until podfs is stopped";
            (PodState::PodDeleted, cause.to_owned(), since)
        }
        (None, Some(Unreachable { since, trouble })) => (
            PodState::Degraded,
            format!("the API server cannot be reached, and nothing is refreshed: {trouble}"),
            since,
        ),
        (None, None) => return (state, reason, None),
    };
    let since = Timestamp::try_from(since).ok().map(|since| since.strftime("%Y-%m-%dT%H:%M:%SZ").to_string());
    (state, Some([Some(cause), reason].into_iter().flatten().collect::<Vec<_>>().join("; ")), since)
}

/// The status of an object, from the record of the last contact about it.
fn object((object, contact): (String, Contact)) -> ObjectStatus {
    ObjectStatus {
        object,
        contact_age_seconds: contact.age().map(|age| age.as_secs()),
        resource_version: contact.version,
        watch: contact.state.to_owned(),
        trouble: contact.trouble,
    }
}

impl VolumeReport {
    /// The status of a volume of which podfs knows only the definition in the manifest.
    fn waiting(volume: &Volume, pod: &PodIdentity) -> Self {
        Self {
            name: volume.name.to_string(),
            kind: volume.field().to_owned(),
            path: None,
            group: None,
            is_read_only: false,
            expansion: None,
            ownership: None,
            state: VolumeLife::before_first_refresh(volume),
            tried: false,
            since: Instant::now(),
            old: OldUsage::default(),
            last_error: None,
            awaited: None,
            source_is_silent: false,
            disk_errors: BTreeMap::new(),
            watch: None,
            claim: volume.claim_name(&pod.name),
            reports_capacity: matches!(volume.source, VolumeSource::Claim(_) | VolumeSource::EmptyDir(_)),
            earlier: CapacityHistory::default(),
        }
    }

    fn generation(&self) -> Option<&GenerationName> {
        self.state.generation()
    }

    /// The volume's state, in the words of `podfs status`.
    pub(in crate::supervisor) fn state(&self) -> VolumeState {
        match &self.state {
            VolumeLife::Waiting(_) => VolumeState::Waiting,
            VolumeLife::Live(_) if self.source_is_silent => VolumeState::Silent,
            VolumeLife::Live(_) => VolumeState::Live,
            VolumeLife::Behind(..) => VolumeState::Behind,
            VolumeLife::Hidden(..) => VolumeState::Hidden,
        }
    }

    fn status(&self, counters: &PodCounters) -> VolumeStatus {
        let (state, shown) = (self.state(), self.state.shown());
        VolumeStatus {
            name: self.name.clone(),
            kind: self.kind.clone(),
            path: self.path.clone(),
            state,
            reason: match state {
                VolumeState::Silent => Some("its source does not answer".to_owned()),
                // After a failure, the failure says more.
                VolumeState::Waiting if self.awaited.is_some() && self.last_error.is_none() => self.awaited.clone(),
                _ => self.state.reason().map(str::to_owned),
            },
            mode: shown.map(|shown| shown.mode().to_owned()),
            mode_reason: shown.and_then(ShownContent::mode_reason),
            backend: shown.and_then(ShownContent::backend).map(str::to_owned),
            transport: self.watch.as_ref().map(|watch| transport(watch).to_owned()),
            generation: self.generation().map(ToString::to_string),
            generation_age_seconds: self.generation().map(|_| self.since.elapsed().as_secs()),
            old_generations: Some(self.old.generations).filter(|count| *count > 0),
            old_generation_bytes: Some(self.old.bytes).filter(|bytes| *bytes > 0),
            requests: self.watch.as_ref().map(VolumeObserver::requests),
            audit: self.watch.as_ref().and_then(VolumeObserver::opens).map(AuditStatus::of),
            read_only: self.is_read_only,
            supplemental_group: self.group,
            expansion: self.expansion.clone().map(ExpansionStatus::of),
            ownership: self.ownership.clone(),
            source_errors: self.source_errors(),
            disk_errors: self.disk_errors.clone(),
            restarts: counters.restarts_of(&self.name),
            last_error: self.last_error.clone(),
        }
    }
}

impl VolumeReport {
    /// The calls that failed because of the volume's source, by errno.
    pub(in crate::supervisor) fn source_errors(&self) -> BTreeMap<String, u64> {
        let errors = self.watch.as_ref().map(VolumeObserver::source_errors).unwrap_or_default();
        errors.into_iter().map(|(errno, count)| (errno.to_owned(), count)).collect()
    }
}

/// How FUSE requests reach podfs.
fn transport(watch: &VolumeObserver) -> &'static str {
    if watch.is_over_io_uring() { "io_uring" } else { "/dev/fuse" }
}
