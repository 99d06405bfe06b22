//! Reports the readiness and the state of the volumes.
//!
//! | to | when | what |
//! |---|---|---|
//! | people, on standard error | once, when all volumes are ready | one line |
//! | people at a terminal | until then | the volumes that are mounted, and those that wait, see `progress` |
//! | the node agent, on `--ready-fd` | once, when all volumes are ready | one JSON object, then the end of the file |
//! | systemd, by `sd_notify(3)` | at every change | `STATUS=`, `READY=1` when ready, and `EXTEND_TIMEOUT_USEC=` for each volume that is unmounted |
//! | clients of the control socket | at any time | the status store, see `store` |

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;
use std::time::{Duration, SystemTime};

use podfs_fuse::log::line::of_sentence;
use podfs_fuse::printable::printable_line;
use podfs_fuse::projection::GenerationName;
use sd_notify::NotifyState;
use serde::Serialize;
use tracing::{info, warn};

use super::progress::{LogOutput, StandardErrorLines, VolumeProgress};
use super::store::{StatusStore, StoredStatus, VolumeReport};
use crate::driver::CallObserver;
use crate::host::fs_group::OwnershipObserver;
use crate::manifest::Tokens;
use crate::manifest::pod::PodIdentity;
use crate::source::Contacts;
use crate::supervisor::log_format::LogFormat;
use crate::supervisor::ready_fd;
use crate::supervisor::server::ServerHistory;
use crate::supervisor::volume::{PodVolume, VolumeLife};
use crate::volume::Volume;

/// The time limit for the unmount of one volume, in microseconds, as in the systemd unit. It is long, because podfs also deletes
/// the content of an emptyDir.
const FOR_ONE_VOLUME: u32 = 5 * 60 * 1_000_000;

/// The scope of a supervisor's reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReportScope {
    /// The volumes of a pod.
    Pod,
    /// One volume, for a person (`podfs mount`).
    Volume,
}

/// Collects the state of the volumes, and reports when it changes.
pub struct Report {
    subject: ReportScope,
    identity: PodIdentity,
    store: StatusStore,
    log_format: LogFormat,
    /// Whether all volumes have been ready.
    ready: bool,
    /// The status that systemd got last.
    status: String,
    progress: StandardErrorLines,
}

#[derive(Serialize)]
struct Ready<'a> {
    pod: ReadyPod<'a>,
    volumes: Vec<ReadyVolume<'a>>,
}

#[derive(Serialize)]
struct ReadyPod<'a> {
    namespace: &'a str,
    name: &'a str,
    uid: &'a str,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ReadyVolume<'a> {
    name: &'a str,
    kind: &'a str,
    path: &'a Path,
    mode: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    generation: Option<&'a str>,
    /// A group that containers need to use the volume (PV-04).
    #[serde(skip_serializing_if = "Option::is_none")]
    supplemental_group: Option<u32>,
}

impl Report {
    /// Reports on these volumes.
    pub fn new(subject: ReportScope, identity: PodIdentity, volumes: &[Volume], log_format: LogFormat) -> Self {
        let (store, status) = (StatusStore::new(identity.clone(), volumes), String::new());
        // A server may write its access log to the same terminal. The progress lines would overwrite the log.
        let is_quiet = volumes.iter().all(|volume| !volume.preferences.audit);
        let progress = StandardErrorLines::new(log_format == LogFormat::Text && is_quiet);
        Self { subject, identity, store, log_format, ready: false, status, progress }
    }

    /// Reports that the supervisor begins.
    pub(in crate::supervisor) fn started(&mut self) {
        if self.subject == ReportScope::Pod {
            info!("serving {} volume(s) of pod {}", self.store.stored().volumes.len(), self.identity);
        }
    }

    /// The format of the lines on standard error.
    pub(in crate::supervisor) fn log_format(&self) -> LogFormat {
        self.log_format
    }

    /// Records the state of the volume at this place after a refresh. `mounted` is the volume whose mount it shows: itself, or the
    /// leader of its claim.
    pub(in crate::supervisor) fn volume(&mut self, place: usize, volume: &Volume, mounted: &PodVolume) {
        self.store.stored().refreshed(place, volume, mounted);
        self.count_service(volume, mounted);
    }

    /// Records the state of the volume at this place before its next refresh. `mounted` is as for [`Self::volume`].
    pub(in crate::supervisor) fn record_before_refresh(&mut self, place: usize, volume: &Volume, mounted: &PodVolume) {
        self.store.stored().record_before_refresh(place, volume, mounted);
        self.count_service(volume, mounted);
    }

    /// Notes whether a server serves the volume, for its count of restarts.
    fn count_service(&self, volume: &Volume, mounted: &PodVolume) {
        self.store.counters().served(volume.name.as_str(), mounted.watch().is_some());
    }

    /// Adds a volume.
    pub(in crate::supervisor) fn add(&mut self, place: usize, volume: &Volume) {
        self.store.stored().add(place, volume);
    }

    /// Removes the volume at this place.
    pub(in crate::supervisor) fn remove(&mut self, place: usize) {
        let removed = self.store.stored().remove(place);
        removed.iter().for_each(|volume| self.store.counters().served(&volume.name, false));
    }

    /// Records the history of the servers, how many servers have replaced another one since the last call (`restarts`), and the
    /// version of the current server.
    pub(in crate::supervisor) fn server(&mut self, history: &ServerHistory, restarts: u32, version: Option<String>) {
        self.store.stored().server(history, restarts, version);
        self.store.counters().restarted(restarts);
    }

    /// Sets the record of the contacts with an API server.
    pub(in crate::supervisor) fn contacts(&mut self, contacts: Contacts) {
        self.store.stored().contacts(contacts);
    }

    /// Continues the counts of the earlier supervisor, and keeps them in the pod's run directory.
    pub(in crate::supervisor) fn count_in(&mut self, directory: &Path) {
        self.store.counters().keep_in(directory);
    }

    /// Counts a mount or refresh that failed.
    pub(in crate::supervisor) fn failed(&mut self, volume: &Volume) {
        self.store.counters().failed(volume.name.as_str());
    }

    /// Counts an operation on a volume that has ended.
    pub(in crate::supervisor) fn operated(&mut self, name: &str, plugin: &str, succeeded: bool, took: Duration) {
        self.store.counters().operated(name, plugin, succeeded, took);
    }

    /// Sets the tokens that volumes show.
    pub(in crate::supervisor) fn tokens(&mut self, tokens: Tokens) {
        self.store.stored().tokens = tokens;
    }

    /// Records each call to a driver as the reason why its volume waits.
    pub(in crate::supervisor) fn driver_calls(&self) -> CallObserver {
        let store = self.store();
        CallObserver::new(move |awaited| {
            store.stored().driver_called(awaited);
            store.note_change();
        })
    }

    /// Records each report about the group of a volume's files.
    pub(in crate::supervisor) fn ownership(&self) -> OwnershipObserver {
        let store = self.store();
        OwnershipObserver::new(move |report| {
            store.stored().ownership(report);
            store.note_change();
        })
    }

    /// The status store, for status requests and metrics.
    pub(in crate::supervisor) fn store(&self) -> StatusStore {
        self.store.clone()
    }

    /// Reports changes since the last report.
    pub(in crate::supervisor) fn progress(&mut self) {
        self.store.note_change();
        let status = self.describe();
        if status != self.status {
            notify(&[NotifyState::Status(&status)]);
            self.status = status;
        }
        if !self.ready && self.is_ready() {
            self.ready = true;
            self.progress.clear();
            self.report_ready();
        } else if !self.ready && self.progress.is_wanted() {
            self.show_progress();
        }
    }

    /// Removes the progress from the terminal, until it changes.
    pub(in crate::supervisor) fn hide_progress(&mut self) {
        self.progress.clear();
    }

    /// Reports that the supervisor ends.
    pub(in crate::supervisor) fn stopping(&mut self) {
        self.hide_progress();
        self.store.stored().trouble("podfs ends and unmounts the volumes");
        self.store.note_change();
        notify(&[NotifyState::Stopping, NotifyState::Status("unmounting")]);
    }

    /// Reports how many volumes the supervisor still has to unmount.
    pub(in crate::supervisor) fn unmounting(&self, remaining: usize) {
        let status = format!("unmounting; {remaining} volumes are left");
        notify(&[NotifyState::ExtendTimeoutUsec(FOR_ONE_VOLUME), NotifyState::Status(&status)]);
    }

    /// Reports that the supervisor ends and the server goes on.
    pub(in crate::supervisor) fn leaving(&self) {
        notify(&[NotifyState::Stopping, NotifyState::Status("the volumes are served on, and wait for the next podfs")]);
    }

    /// Whether every volume's first generation is visible at its path.
    fn is_ready(&self) -> bool {
        let status = self.store.stored();
        status.volumes.values().all(|volume| volume.tried && !matches!(volume.state, VolumeLife::Waiting(_)))
    }

    fn show_progress(&mut self) {
        let status = self.store.stored();
        let pod = (self.subject == ReportScope::Pod).then_some(&self.identity);
        let mut upcoming = VolumeProgress { pod, expected: status.volumes.len(), up: Vec::new(), waiting: Vec::new() };
        for volume in status.volumes.values().filter(|volume| volume.tried) {
            match &volume.state {
                VolumeLife::Waiting(reason) => upcoming.waiting.push((&volume.name, reason)),
                VolumeLife::Live(_) | VolumeLife::Behind(..) | VolumeLife::Hidden(..) => upcoming.up.push(&volume.name),
            }
        }
        self.progress.show(&upcoming);
    }

    /// The state of the pod in one line, for systemd.
    fn describe(&self) -> String {
        let status = self.store.stored();
        let volumes = || status.volumes.values().filter(|volume| volume.tried);
        let shown = volumes().filter(|volume| !matches!(volume.state, VolumeLife::Waiting(_))).count();
        let mut text = format!("{shown} of {} volumes are up", status.volumes.len());
        if let Some(trouble) = status.server_is_dead() {
            text += &format!("; {trouble}");
        }
        for volume in volumes() {
            match &volume.state {
                VolumeLife::Waiting(reason) => text += &format!("; {} waits: {reason}", volume.name),
                VolumeLife::Behind(_, reason) => text += &format!("; {} is not refreshed: {reason}", volume.name),
                VolumeLife::Hidden(_, reason) => text += &format!("; {} is not at its path: {reason}", volume.name),
                VolumeLife::Live(_) => {}
            }
        }
        // In the protocol of sd_notify(3), a line break ends the status.
        text.replace('\n', " ")
    }

    /// Reports that all volumes are ready.
    fn report_ready(&mut self) {
        let line = match self.subject {
            ReportScope::Pod => format!("pod {} is ready: {}", self.identity, self.names_by_directory()),
            ReportScope::Volume => format!("{}; Ctrl-C unmounts it", self.volume_places()),
        };
        match self.log_format {
            // One write(2) for the whole line, because a server may write to the same standard error.
            LogFormat::Text => {
                let line = match rustix::termios::isatty(rustix::stdio::stderr()) {
                    true => format!("podfs: {}\n", printable_line(&line)),
                    false => of_sentence("podfs", &line, SystemTime::now()),
                };
                drop(LogOutput.write_all(line.as_bytes()));
            }
            LogFormat::Json => info!("{line}"),
        }
        if let Err(error) = ready_fd::write(|| self.ready_json()) {
            // The pod's volumes do not depend on the reader of this descriptor.
            warn!("cannot write to the descriptor given with --ready-fd: {error}");
        }
        notify(&[NotifyState::Ready, NotifyState::Status(&self.status)]);
    }

    fn ready_json(&self) -> io::Result<Vec<u8>> {
        let mut json = serde_json::to_vec(&self.ready_object(&self.store.stored()))?;
        json.push(b'\n');
        Ok(json)
    }

    /// The names of the volumes by directory, with the mode of those without generations: `config, data (passthrough)
    /// in /…/kubernetes.io~configmap`.
    fn names_by_directory(&self) -> String {
        let status = self.store.stored();
        let volumes = &status.volumes;
        let mut names: BTreeMap<&Path, Vec<String>> = BTreeMap::new();
        for volume in volumes.values() {
            if let Some(path) = &volume.path {
                names.entry(path.parent().unwrap_or(path)).or_default().push(volume.title());
            }
        }
        let places: Vec<_> =
            names.iter().map(|(directory, names)| format!("{} in {}", names.join(", "), directory.display())).collect();
        if places.is_empty() { "it has no volumes".to_owned() } else { places.join("; ") }
    }

    /// The volumes with their paths: `volume "config" is ready at /mnt`.
    fn volume_places(&self) -> String {
        let place = |volume: &VolumeReport| {
            let mode = volume.mode_if_passthrough().map_or(String::new(), |mode| format!(" ({mode})"));
            let path = volume.path.as_deref().unwrap_or(Path::new(""));
            format!("volume {:?} is ready at {}{mode}", volume.name, path.display())
        };
        self.store.stored().volumes.values().map(place).collect::<Vec<_>>().join(", ")
    }

    fn ready_object<'a>(&'a self, status: &'a StoredStatus) -> Ready<'a> {
        let PodIdentity { namespace, name, uid } = &self.identity;
        let volumes = status.volumes.values().filter_map(|volume| match (&volume.state, &volume.path) {
            (VolumeLife::Live(shown) | VolumeLife::Behind(shown, _) | VolumeLife::Hidden(shown, _), Some(path)) => {
                Some(ReadyVolume {
                    name: &volume.name,
                    kind: &volume.kind,
                    path,
                    mode: shown.mode(),
                    generation: shown.generation().map(GenerationName::as_str),
                    supplemental_group: volume.group,
                })
            }
            _ => None,
        });
        Ready { pod: ReadyPod { namespace, name, uid: uid.as_str() }, volumes: volumes.collect() }
    }
}

impl VolumeReport {
    /// The name of the volume, with the mode of a volume without generations.
    fn title(&self) -> String {
        match self.mode_if_passthrough() {
            Some(mode) => format!("{} ({mode})", self.name),
            None => self.name.clone(),
        }
    }

    /// The mode of a volume without generations.
    fn mode_if_passthrough(&self) -> Option<&'static str> {
        match &self.state {
            VolumeLife::Live(shown) | VolumeLife::Behind(shown, _) | VolumeLife::Hidden(shown, _)
                if shown.generation().is_none() =>
            {
                Some(shown.mode())
            }
            _ => None,
        }
    }
}

/// Notifies systemd, if it has started this process with a notification socket.
pub(crate) fn notify(state: &[NotifyState<'_>]) {
    // If no service manager has started this process, this does nothing and returns no error.
    if let Err(error) = sd_notify::notify(state) {
        warn!("cannot notify the service manager: {error}");
    }
}
