//! The metrics of a pod, from the status store.

use std::fs;
use std::sync::Mutex;
use std::time::SystemTime;

use podfs_fuse::projection::GenerationName;
use serde::Serialize;

use super::capacity::{CapacityCheck, CapacityTarget, measure};
use super::counters::{Errors, PodCounters};
use super::pod_status::{PodState, PodStatus, VolumeState};
use super::store::{StatusStore, StoredStatus, VERSION, VolumeReport};
use crate::driver::DriverHome;
use crate::driver::csi::DriverUsage;
use crate::metrics::families::*;
use crate::metrics::{PodLabels, PodReading};
use crate::supervisor::volume::{ShownContent, VolumeLife};

/// A thread holds this lock while it takes a reading, so that several threads do not wait for the same silent source.
static READING: Mutex<()> = Mutex::new(());

/// The metrics of a pod at this moment. Takes a second if a source does not answer.
pub(in crate::supervisor) fn read(store: &StatusStore) -> PodReading {
    let _turn = READING.lock().expect("no thread panics while a reading is taken");
    let status = store.status();
    let looks = capacity_checks(&store.stored());
    let looked_at: Vec<_> = looks.iter().map(|look| look.place).collect();
    let usages = measure(looks);
    let mut reading = begun(&status);
    pod(&mut reading, &status);
    let status = store.stored();
    reading.add(&START_TIME, &[], since_1970(status.started));
    source(&mut reading, &status);
    store.counters().read(|counters| {
        counts(&mut reading, counters);
        for report in status.volumes.values() {
            volume(&mut reading, report, counters.refresh_errors.get(&report.name));
        }
    });
    for (place, report) in status.volumes.iter().filter(|(place, _)| looked_at.contains(place)) {
        host(&mut reading, report, usages.get(place));
    }
    drop(status);
    store.counters().wait_until_written();
    reading
}

/// The metrics of a pod whose supervisor does not answer.
pub fn without_answer(status: &PodStatus) -> PodReading {
    let mut reading = begun(status);
    reading.add(&UP, &[], 0.0);
    state(&mut reading, status.state);
    reading
}

/// A reading without metrics yet, with the labels of the pod.
fn begun(status: &PodStatus) -> PodReading {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    PodReading::new(PodLabels { namespace: text(&status.namespace), pod: text(&status.name), uid: status.uid.clone() })
}

fn pod(reading: &mut PodReading, status: &PodStatus) {
    reading.add(&UP, &[], 1.0);
    state(reading, status.state);
    let server = status.server.as_ref().map(|server| &server.process);
    reading.add(&SERVER_UP, &[], as_number(server.is_some()));
    let processes = [("supervisor", status.supervisor.as_ref()), ("server", server)];
    for (role, process) in processes.into_iter().filter_map(|(role, process)| Some((role, process?))) {
        let version = process.version.as_deref().unwrap_or(VERSION);
        reading.add(&BUILD_INFO, &[role, version], 1.0);
        if let Some(bytes) = resident(process.pid) {
            reading.add(&RESIDENT_MEMORY, &[role], bytes);
        }
    }
    for state in VolumeState::ALL {
        let count = status.volumes.iter().filter(|volume| volume.state == state).count();
        reading.add(&VOLUMES, &[&word(state)], count as f64);
    }
}

fn state(reading: &mut PodReading, state: PodState) {
    for listed in PodState::ALL {
        reading.add(&POD_STATE, &[&word(listed)], as_number(listed == state));
    }
}

/// The word for a state in the JSON of `podfs status`.
fn word(state: impl Serialize) -> String {
    serde_json::to_value(state).ok().and_then(|word| word.as_str().map(str::to_owned)).unwrap_or_default()
}

fn counts(reading: &mut PodReading, counters: &PodCounters) {
    reading.add(&SERVER_RESTARTS, &[], counters.server_restarts as f64);
    for counts in &counters.operations {
        let status = if counts.succeeded { "success" } else { "fail-unknown" };
        let labels = [counts.name.as_str(), counts.plugin.as_str(), status, "false"];
        reading.add_durations(&STORAGE_OPERATIONS, &labels, &counts.durations);
    }
}

/// The metrics of the source of objects.
fn source(reading: &mut PodReading, status: &StoredStatus) {
    let contacts = status.contacts.all();
    if !contacts.is_empty() {
        let connected = contacts.iter().all(|(_, contact)| contact.connected);
        let troubled = contacts.iter().filter(|(_, contact)| contact.trouble.is_some()).count();
        reading.add(&SOURCE_CONNECTED, &[], as_number(connected));
        reading.add(&SOURCE_OBJECTS, &[], contacts.len() as f64);
        reading.add(&SOURCE_OBJECTS_IN_TROUBLE, &[], troubled as f64);
    }
    for (key, expires) in status.tokens.expirations() {
        let (audience, life) = (key.audience.as_deref().unwrap_or_default(), key.expiration_seconds.to_string());
        reading.add(&TOKEN_EXPIRATION, &[audience, &life], since_1970(expires));
    }
}

fn volume(reading: &mut PodReading, report: &VolumeReport, errors: Option<&Errors>) {
    let name = report.name.as_str();
    reading.add(&VOLUME_CURRENT, &[name], as_number(report.state() == VolumeState::Live));
    reading.add(&REFRESH_ERRORS, &[name], errors.map_or(0, |errors| errors.count) as f64);
    if let Some(errors) = errors {
        reading.add(&LAST_REFRESH_ERROR, &[name], since_1970(errors.last));
    }
    let Some(watch) = &report.watch else { return };
    for (operation, count) in watch.requests_by_operation() {
        reading.add(&FUSE_REQUESTS, &[name, operation], count as f64);
    }
    for (errno, count) in report.source_errors() {
        reading.add(&SOURCE_ERRORS, &[name, &errno], count as f64);
    }
    for (counter, count) in &report.disk_errors {
        reading.add(&DISK_ERRORS, &[name, counter], *count as f64);
    }
    if let Some(generation) = report.state.generation() {
        let commits = watch.commits();
        reading.add(&GENERATION, &[name], commits.count() as f64);
        if let Some(made_at) = GenerationName::made_at(generation) {
            reading.add(&GENERATION_TIME, &[name], since_1970(made_at));
        }
        reading.add(&OLD_GENERATIONS, &[name], report.old.generations as f64);
        reading.add(&OLD_GENERATION_BYTES, &[name], report.old.bytes as f64);
        reading.add_durations(&COMMIT_DURATION, &[name], &commits);
        reading.add_durations(&PROPAGATION, &[name], &watch.propagations());
    }
}

/// The metrics of a volume that shows a source of the node. Without a `usage`, its source did not answer.
fn host(reading: &mut PodReading, report: &VolumeReport, usage: Option<&DriverUsage>) {
    let name = report.name.as_str();
    reading.add(&SOURCE_ANSWERING, &[name], as_number(usage.is_some() && !report.source_is_silent));
    // The file system of a hostPath belongs to the node, and not to the pod (ME-03).
    let (Some(usage), true) = (usage, report.reports_capacity) else { return };
    let labels = [name, report.claim.as_deref().unwrap_or_default()];
    let mut add = |family, number: u64| reading.add(family, &labels, number as f64);
    if let Some(bytes) = usage.bytes {
        add(&CAPACITY_BYTES, bytes.total);
        // Only the containers know how much of a device is in use.
        if report.state.shown().is_none_or(|shown| !matches!(shown, ShownContent::Device(_))) {
            add(&AVAILABLE_BYTES, bytes.available);
            add(&USED_BYTES, bytes.used);
        }
    }
    if let Some(inodes) = usage.inodes {
        add(&INODES, inodes.total);
        add(&INODES_FREE, inodes.available);
        add(&INODES_USED, inodes.used);
    }
    if let Some(condition) = &usage.condition {
        add(&ABNORMAL, u64::from(!condition.is_empty()));
    }
}

/// The looks at the capacity of mounted volumes that show a source of the node.
fn capacity_checks(status: &StoredStatus) -> Vec<CapacityCheck> {
    let look = |(place, report): (&usize, &VolumeReport)| {
        let (shown, path) = match &report.state {
            VolumeLife::Waiting(_) => return None,
            VolumeLife::Live(shown) | VolumeLife::Behind(shown, _) => (shown, report.path.as_ref()),
            VolumeLife::Hidden(shown, _) => (shown, None),
        };
        let at = match (shown, &report.watch, path) {
            (ShownContent::Generation(_) | ShownContent::Audited(_), _, _) | (_, None, None) => return None,
            (ShownContent::Device(_), _, Some(path)) => CapacityTarget::Device(path.clone()),
            (_, Some(watch), _) => CapacityTarget::Source(watch.clone()),
            (_, None, Some(path)) => CapacityTarget::Mount(path.clone()),
        };
        let home = report.path.as_deref().and_then(DriverHome::of_csi);
        Some(CapacityCheck { place: *place, name: report.name.clone(), home, at, earlier: report.earlier.clone() })
    };
    status.volumes.iter().filter_map(look).collect()
}

/// The resident memory of a process, in bytes.
fn resident(pid: u32) -> Option<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let kilobytes = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(kilobytes.split_whitespace().next()?.parse::<f64>().ok()? * 1024.0)
}

/// A time in seconds since 1970.
fn since_1970(time: SystemTime) -> f64 {
    time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

fn as_number(is: bool) -> f64 {
    f64::from(u8::from(is))
}
