//! The task of the local volumes: it takes changes, plans, and performs one step (a request or an inspection) at a
//! time; then it plans again with the new state. Erasures run beside it, each on a thread of its own.

mod steps;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use podfs_fuse::{Backoff, DoublingPause};
use serde_json::Value;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until};
use tracing::{info, warn};

use super::clean::{ErasureOutcome, ErasureProgress};
use super::entries::DirectoryScan;
use super::error::{ErasureError, InspectionError};
use super::inspection::UsableEntry;
use super::metrics::LocalVolumeCounts;
use super::plan::{DiskStep, OfferedClass, World, plan, remarks};
use super::record::{ErasureRecord, Records};
use super::volume::{HOSTNAME, LocalVolume, NodeNames, Phase, Reclaim};
use super::{ClassDirectory, LocalVolumeMetrics, wake};
use crate::kube::address::{Collection, Resource};
use crate::kube::client::ApiClient;
use crate::kube::follower::{Follower, FollowerEvent};
use crate::kube::retry::Retry;
use crate::node::NodeHandle;

/// How many volumes podfs erases at the same time.
const CLEANINGS: usize = 4;
/// The pauses before podfs tries a failed step again.
const PAUSE: DoublingPause = DoublingPause::new(Duration::from_secs(1), Duration::from_secs(60));

/// The settings of local volumes.
pub(in crate::node) struct ProvisionerSettings {
    pub(in crate::node) client: ApiClient,
    /// The name of the Node object.
    pub(in crate::node) node: String,
    pub(in crate::node) directories: Vec<ClassDirectory>,
    pub(in crate::node) root_directory: PathBuf,
    pub(in crate::node) kubelet_root: PathBuf,
    pub(in crate::node) handle: NodeHandle,
    pub(in crate::node) metrics: LocalVolumeMetrics,
}

/// An event for the task.
enum ProvisionerEvent {
    Scan(DirectoryScan),
    Volumes(FollowerEvent),
    Class(String, FollowerEvent),
    Cleaned(String, Box<ErasureOutcome>),
}

struct Provisioner {
    settings: ProvisionerSettings,
    names: NodeNames,
    inputs: UnboundedReceiver<ProvisionerEvent>,
    input: UnboundedSender<ProvisionerEvent>,
    /// `None` before the first scan; `volumes` is `None` before the first list.
    scan: Option<DirectoryScan>,
    volumes: Option<BTreeMap<String, LocalVolume>>,
    classes: BTreeMap<String, OfferedClass>,
    records: Records,
    cleanings: BTreeMap<String, Arc<ErasureProgress>>,
    /// Entries that an inspection has found unfit since the last scan.
    unfit: BTreeSet<PathBuf>,
    /// Inspections that have not ended in time.
    hanging: BTreeMap<PathBuf, JoinHandle<Result<UsableEntry, InspectionError>>>,
    /// When podfs may try the next step for a PersistentVolume, after failures.
    pauses: BTreeMap<String, (Instant, Backoff)>,
    /// The remarks of the last plan.
    remarks: BTreeMap<String, String>,
    /// The last log line about each step, entry and followed object.
    last_logged: BTreeMap<String, String>,
    retry: Retry,
}

/// Offers and erases local volumes for as long as the daemon runs.
pub(in crate::node) async fn serve(settings: ProvisionerSettings) {
    let records = match Records::read(&settings.root_directory) {
        Ok(records) => records,
        Err(error) => {
            warn!(
                "podfs offers no local volume, because it cannot read the records of erasures: {error}; repair this and restart"
            );
            return;
        }
    };
    let (input, inputs) = unbounded_channel();
    let scans = input.clone();
    let report = move |scan| scans.send(ProvisionerEvent::Scan(scan)).is_ok();
    let mut pauses = PAUSE.backoff();
    while let Err(error) = wake::start(settings.directories.clone(), report.clone()) {
        if pauses.failures() == 0 {
            warn!("podfs offers no local volume yet, because it cannot watch the directories: {error}; it tries again");
        }
        sleep(pauses.fail()).await;
    }
    let names = names(&settings.client, &settings.node).await;
    follow(&settings.client, Collection::all(Resource::PERSISTENT_VOLUME), &input, ProvisionerEvent::Volumes);
    let mut classes: Vec<_> = settings.directories.iter().map(|directory| directory.class.clone()).collect();
    classes.sort();
    classes.dedup();
    for class in classes {
        let collection = Collection::only(Resource::STORAGE_CLASS, None, &class);
        follow(&settings.client, collection, &input, move |event| ProvisionerEvent::Class(class.clone(), event));
    }
    let retry = Retry::new(settings.client.clone());
    let provisioner = Provisioner {
        settings,
        names,
        inputs,
        input,
        scan: None,
        volumes: None,
        classes: BTreeMap::new(),
        records,
        cleanings: BTreeMap::new(),
        unfit: BTreeSet::new(),
        hanging: BTreeMap::new(),
        pauses: BTreeMap::new(),
        remarks: BTreeMap::new(),
        last_logged: BTreeMap::new(),
        retry,
    };
    provisioner.run().await;
}

/// Gets the names by which PersistentVolumes refer to the node.
async fn names(client: &ApiClient, node: &str) -> NodeNames {
    let (mut retry, collection) = (Retry::new(client.clone()), Collection::only(Resource::NODE, None, node));
    let mut last = None;
    loop {
        let (sentence, pause) = match client.get(&collection).await {
            Ok(object) => {
                let hostname = object.as_ref().and_then(|object| object["metadata"]["labels"][HOSTNAME].as_str());
                if let Some(hostname) = hostname {
                    return NodeNames { name: node.to_owned(), hostname: hostname.to_owned() };
                }
                (format!("Node {node} does not exist, or has no label {HOSTNAME}"), retry.next_pause())
            }
            Err(error) => (error.to_string(), retry.failed(&error)),
        };
        if last.as_ref() != Some(&sentence) {
            warn!("podfs offers no local volume yet: {sentence}");
            last = Some(sentence);
        }
        retry.wait(&pause).await;
    }
}

fn follow(
    client: &ApiClient,
    collection: Collection,
    input: &UnboundedSender<ProvisionerEvent>,
    wrap: impl Fn(FollowerEvent) -> ProvisionerEvent + Send + Sync + 'static,
) {
    let (mut follower, input) = (Follower::new(client.clone(), collection), input.clone());
    tokio::spawn(async move {
        loop {
            let event = follower.next().await;
            if input.send(wrap(event)).is_err() {
                return;
            }
        }
    });
}

impl Provisioner {
    async fn run(mut self) {
        loop {
            while let Ok(input) = self.inputs.try_recv() {
                self.take(input);
            }
            let steps = self.plan();
            self.stop_cleanings(&steps);
            self.settings.metrics.set(self.counts());
            let now = Instant::now();
            match steps.into_iter().find(|step| self.is_possible_now(step, now)) {
                Some(step) => self.perform(step).await,
                None => self.wait().await,
            }
        }
    }

    /// Waits for an event, or until podfs may try a step again.
    async fn wait(&mut self) {
        let now = Instant::now();
        let next = self.pauses.values().map(|(until, _)| *until).filter(|until| *until > now).min();
        let pause = async {
            match next {
                Some(until) => sleep_until(until).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            input = self.inputs.recv() => {
                if let Some(input) = input {
                    self.take(input);
                }
            }
            () = pause => {}
        }
    }

    fn plan(&mut self) -> Vec<DiskStep> {
        let (Some(scan), Some(volumes)) = (&self.scan, &self.volumes) else { return Vec::new() };
        let (node, classes, records) = (&self.names, &self.classes, &self.records.by_name);
        let world = World { node, scan, volumes, classes, records };
        let steps = plan(world);
        let remarks = remarks(world);
        for (about, sentence) in &remarks {
            if self.remarks.get(about) != Some(sentence) {
                info!("{sentence}");
            }
        }
        self.remarks = remarks;
        steps
    }

    fn counts(&self) -> LocalVolumeCounts {
        let own = |phase: Phase| {
            let volumes = self.volumes.iter().flat_map(BTreeMap::values);
            volumes.filter(|volume| volume.own.is_some() && volume.is_here && volume.phase == phase).count()
        };
        let entries = self.scan.iter().flat_map(|scan| scan.entries.values());
        LocalVolumeCounts {
            free: own(Phase::Free),
            bound: own(Phase::Other),
            released: own(Phase::Released),
            unfit: entries.filter(|entry| entry.mode.is_err()).count() + self.unfit.len(),
            failing: self.pauses.len(),
        }
    }

    fn is_possible_now(&self, step: &DiskStep, now: Instant) -> bool {
        let volume = step.volume();
        let is_paused = self.pauses.get(volume).is_some_and(|(until, _)| *until > now);
        let is_possible = match step {
            DiskStep::Clean(_) => self.cleanings.len() < CLEANINGS,
            DiskStep::Offer { path, .. } => {
                let hangs = self.hanging.get(path).is_some_and(|inspection| !inspection.is_finished());
                !hangs && !self.unfit.contains(path)
            }
            _ => true,
        };
        is_possible && !is_paused && !self.cleanings.contains_key(volume)
    }

    /// Stops erasures that are no longer planned.
    fn stop_cleanings(&self, steps: &[DiskStep]) {
        for (name, progress) in &self.cleanings {
            if !steps.iter().any(|step| matches!(step, DiskStep::Clean(record) if record.volume == *name)) {
                progress.stop();
            }
        }
    }

    fn take(&mut self, input: ProvisionerEvent) {
        match input {
            ProvisionerEvent::Scan(scan) => {
                self.scan = Some(scan);
                self.unfit.clear();
            }
            ProvisionerEvent::Volumes(event) => self.take_volumes(event),
            ProvisionerEvent::Class(name, event) => self.take_class(name, event),
            ProvisionerEvent::Cleaned(name, cleaned) => {
                let ErasureOutcome { record, result } = *cleaned;
                self.cleanings.remove(&name);
                self.settings.metrics.end(&name);
                let path = self.path_of(&name, record.as_ref());
                if let Some(record) = record {
                    self.records.by_name.insert(name.clone(), Some(record));
                }
                match result {
                    Ok(()) => {
                        self.pauses.remove(&name);
                        info!("podfs has erased {path} of PersistentVolume {name}");
                    }
                    // The plan decides what comes next.
                    Err(reason @ ErasureError::Stopped) => {
                        self.delay(&name);
                        self.log_once(&format!("step {name}"), &format!("{path} of PersistentVolume {name} {reason}"));
                    }
                    Err(reason) => self.pause(&name, &format!("{path} of PersistentVolume {name} {reason}")),
                }
            }
        }
    }

    fn path_of(&self, name: &str, record: Option<&ErasureRecord>) -> String {
        let volume = self.volumes.as_ref().and_then(|volumes| volumes.get(name));
        let path = record.map(|record| &record.path).or_else(|| volume?.path.as_ref());
        path.map_or_else(|| "the entry".to_owned(), |path| path.display().to_string())
    }

    fn take_volumes(&mut self, event: FollowerEvent) {
        match event {
            FollowerEvent::Listed(objects) => {
                let volumes = objects.iter().filter_map(|object| LocalVolume::parse(object, &self.names));
                self.volumes = Some(volumes.map(|volume| (volume.name.clone(), volume)).collect());
            }
            FollowerEvent::Put(object) => self.put(&object),
            FollowerEvent::Deleted(object) => {
                let gone = LocalVolume::parse(&object, &self.names);
                if let (Some(volumes), Some(gone)) = (&mut self.volumes, gone)
                    && volumes.get(&gone.name).is_some_and(|volume| volume.uid == gone.uid)
                {
                    volumes.remove(&gone.name);
                    self.pauses.remove(&gone.name);
                }
            }
            FollowerEvent::Alive => {}
            FollowerEvent::Failure(error) => self.log_once("persistentvolumes", &format!("local volumes: {error}")),
        }
    }

    fn put(&mut self, object: &Value) {
        if let (Some(volumes), Some(volume)) = (&mut self.volumes, LocalVolume::parse(object, &self.names)) {
            volumes.insert(volume.name.clone(), volume);
        }
    }

    fn take_class(&mut self, name: String, event: FollowerEvent) {
        let object = match event {
            FollowerEvent::Listed(mut objects) => objects.pop(),
            FollowerEvent::Put(object) => Some(object),
            FollowerEvent::Deleted(_) => None,
            FollowerEvent::Alive => return,
            FollowerEvent::Failure(error) => return self.log_once(&name, &format!("StorageClass {name}: {error}")),
        };
        let class = object.map(|object| OfferedClass {
            reclaim: match object["reclaimPolicy"].as_str() {
                Some("Retain") => Reclaim::Retain,
                // The API server's default.
                _ => Reclaim::Delete,
            },
            mount_options: serde_json::from_value(object["mountOptions"].clone()).unwrap_or_default(),
        });
        match class {
            Some(class) => drop(self.classes.insert(name, class)),
            None => drop(self.classes.remove(&name)),
        }
    }

    /// Delays the next step for this PersistentVolume, after a failure, and logs the failure.
    fn pause(&mut self, name: &str, sentence: &str) {
        self.delay(name);
        self.log_once(&format!("step {name}"), &format!("{sentence}; podfs tries again"));
    }

    /// Delays the next step for this PersistentVolume.
    fn delay(&mut self, name: &str) {
        let mut backoff = self.pauses.get(name).map_or(PAUSE.backoff(), |(_, backoff)| *backoff);
        let until = Instant::now() + backoff.fail();
        self.pauses.insert(name.to_owned(), (until, backoff));
    }

    /// Logs a sentence, unless it was the last one about the same step, entry or object.
    fn log_once(&mut self, about: &str, sentence: &str) {
        if self.last_logged.get(about).is_none_or(|last| last != sentence) {
            warn!("{sentence}");
            self.last_logged.insert(about.to_owned(), sentence.to_owned());
        }
    }
}
