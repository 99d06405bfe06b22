//! Asks the supervisors of all pods of a run directory for their status. A supervisor that does not answer delays no other.
//!
//! The threads that ask are not those of a runtime: `spawn_blocking` panics when no thread can be started, and a panic would end
//! `podfs node`. If no thread can be started here, the supervisor counts as one that does not answer.

use std::io::{self, ErrorKind};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use super::process_delay::ProcessDelay;
use crate::metrics::PodReading;
use crate::supervisor::control::{self, AskError, ControlAnswer, ControlQuestion};
use crate::supervisor::run_dir::claim;
use crate::supervisor::run_dir::record::PodLockRecord;
use crate::supervisor::run_dir::server_socket;
use crate::supervisor::run_dir::trust;
use crate::supervisor::status::{PodState, PodStatus, ProcessStatus, ServerStatus, kept_restarts};

/// Longest time for the pods that the threads ask at the same time. One request takes two seconds at most.
const TIMEOUT: Duration = Duration::from_millis(2500);
/// Most threads. Each asks one pod after another.
const MOST_THREADS: usize = 64;

/// The directories of all pods in the run directory, by uid. It is empty if the run directory does
/// not exist.
///
/// # Errors
/// When the run directory cannot be read, or users other than root can change it.
pub fn pods(run_directory: &Path) -> io::Result<Vec<PathBuf>> {
    trust::check(run_directory)?;
    let entries = match std::fs::read_dir(run_directory) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut pods: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    pods.retain(|directory| record_of(directory).is_some());
    pods.sort();
    Ok(pods)
}

/// The status of the pods of these directories, in their order, without those that have ended meanwhile.
pub fn statuses_of(pods: &[PathBuf]) -> Vec<PodStatus> {
    look_at_each(pods, status_of, silent)
}

/// The metrics of the pods of these directories, in their order, without those that have ended meanwhile. If a supervisor does
/// not send metrics, its entry is the status of the pod.
pub fn metrics_of(pods: &[PathBuf]) -> Vec<Result<PodReading, Box<PodStatus>>> {
    look_at_each(pods, reading_of, |directory, limit| Err(Box::new(silent(directory, limit))))
}

/// Calls `look` for each pod, on at most [`MOST_THREADS`] threads. If it takes too long, `silent` makes the result, with the time
/// that it took.
fn look_at_each<T: Send + 'static>(
    pods: &[PathBuf],
    look: fn(&Path) -> Option<T>,
    silent: fn(&Path, Duration) -> T,
) -> Vec<T> {
    let (sender, results) = channel();
    let (all_pods, next): (Arc<[PathBuf]>, _) = (pods.into(), Arc::new(AtomicUsize::new(0)));
    for _ in 0..pods.len().min(MOST_THREADS) {
        let (sender, pods, next) = (sender.clone(), Arc::clone(&all_pods), Arc::clone(&next));
        let work = move || {
            while let Some((place, directory)) = pick(&pods, &next) {
                if sender.send((place, look(directory))).is_err() {
                    return;
                }
            }
        };
        // If no thread starts, all pods count as not answering.
        let _none = thread::Builder::new().spawn(work);
    }
    drop(sender);
    let mut all: Vec<_> = pods.iter().map(|_| None).collect();
    // Even if no pod answers, the last ones have as much time as the first.
    let rounds = u32::try_from(pods.len().div_ceil(MOST_THREADS)).unwrap_or(u32::MAX);
    let limit = TIMEOUT * rounds;
    let deadline = Instant::now() + limit;
    while let Ok((place, result)) = results.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
        all[place] = Some(result);
    }
    let result = |(directory, result): (&PathBuf, Option<Option<T>>)| match result {
        Some(result) => result,
        None => Some(silent(directory, limit)),
    };
    pods.iter().zip(all).filter_map(result).collect()
}

fn pick<'a>(pods: &'a [PathBuf], next: &AtomicUsize) -> Option<(usize, &'a Path)> {
    let place = next.fetch_add(1, Ordering::Relaxed);
    pods.get(place).map(|directory| (place, directory.as_path()))
}

fn status_of(directory: &Path) -> Option<PodStatus> {
    let status = ask(directory, &ControlQuestion::Status, |answer| match answer {
        ControlAnswer::Status(status) if status.uid == uid(directory) => Ok(*status),
        ControlAnswer::Status(status) => Err(AnswerError::OtherPod(status.title())),
        other => Err(answer_error(other)),
    });
    status.map(|status| status.unwrap_or_else(|instead| *instead))
}

fn reading_of(directory: &Path) -> Option<Result<PodReading, Box<PodStatus>>> {
    ask(directory, &ControlQuestion::Metrics, |answer| match answer {
        ControlAnswer::Metrics(reading) => match reading.pod.as_ref().map(|pod| pod.uid.as_str()) {
            Some(pod) if pod == uid(directory) => Ok(*reading),
            other => Err(AnswerError::OtherPod(other.unwrap_or_default().to_owned())),
        },
        other => Err(answer_error(other)),
    })
}

/// Why the answer of a supervisor is not one to the question.
#[derive(Debug, thiserror::Error)]
enum AnswerError {
    #[error("its control socket answers for another pod, {0}")]
    OtherPod(String),
    #[error("{0}")]
    Refused(String),
    #[error("it answered another question")]
    OtherQuestion,
}

fn answer_error(answer: ControlAnswer) -> AnswerError {
    match answer {
        ControlAnswer::Refused(reason) | ControlAnswer::Busy(reason) => AnswerError::Refused(reason),
        _ => AnswerError::OtherQuestion,
    }
}

/// Asks a pod's supervisor, and returns what `take` makes of the answer. If there is no answer, or `take` rejects it, returns
/// the pod's status instead; `None` if the pod has ended.
fn ask<T>(
    directory: &Path,
    question: &ControlQuestion,
    take: impl FnOnce(ControlAnswer) -> Result<T, AnswerError>,
) -> Option<Result<T, Box<PodStatus>>> {
    let record = record_of(directory)?;
    let status = match control::ask(directory, question, None) {
        Ok(answer) => match take(answer) {
            Ok(taken) => return Some(Ok(taken)),
            Err(error) => not_answering(directory, None, error.to_string()),
        },
        Err(AskError::NotListening(_)) => not_listening(directory, &record),
        Err(error) => {
            let pid = match &error {
                AskError::Silent { pid, .. } | AskError::InvalidAnswer { pid, .. } | AskError::Refused { pid, .. } => {
                    Some(*pid)
                }
                AskError::NotListening(_)
                | AskError::TooLong { .. }
                | AskError::OtherUser { .. }
                | AskError::Failed { .. } => None,
            };
            let why = pid.and_then(ProcessDelay::of).filter(|_| matches!(error, AskError::Silent { .. }));
            let why = why.map(|why| format!("; {}", why.sentence())).unwrap_or_default();
            not_answering(directory, pid, format!("{error}{why}"))
        }
    };
    // The pod may have ended meanwhile.
    record_of(directory)?;
    Some(Err(Box::new(named(status, record))))
}

/// The record of a pod; an empty one if only another version of podfs can read it.
fn record_of(directory: &Path) -> Option<PodLockRecord> {
    let is_of_other_version = || PodLockRecord::check_version(directory).is_err();
    PodLockRecord::read(directory).or_else(|| is_of_other_version().then(PodLockRecord::default))
}

/// The status with the recorded name of the pod, for a supervisor that does not answer.
fn named(status: PodStatus, record: PodLockRecord) -> PodStatus {
    let named = Some(record.pod).filter(|pod| !pod.name.is_empty());
    let (namespace, name) = named.map(|pod| (pod.namespace, pod.name)).unzip();
    PodStatus { namespace, name, ..status }
}

/// The status of a pod whose supervisor does not listen. The lock shows whether there is a supervisor: another process may have
/// the recorded process id by now.
fn not_listening(directory: &Path, record: &PodLockRecord) -> PodStatus {
    if claim::is_held(directory) {
        let pid = Some(record.pid).filter(|pid| *pid != 0);
        let or_that = "it starts or ends just now, or could not make its control socket";
        let why = pid.and_then(ProcessDelay::of).map_or(or_that, ProcessDelay::sentence);
        return not_answering(directory, pid, format!("its supervisor does not listen: {why}"));
    }
    match server_socket::connect(directory).map(UnixStream::from) {
        Ok(stream) => {
            let reason = "the volumes are served but not refreshed; podfs run of the pod takes them over";
            let process = control::peer(&stream).map(|pid| ProcessStatus { pid, version: None });
            let server = process.map(|process| ServerStatus { process, restarts: kept_restarts(directory) });
            PodStatus { server, ..PodStatus::without_answer(uid(directory), PodState::NoSupervisor, reason) }
        }
        Err(_) => {
            let reason = match PodLockRecord::check_version(directory) {
                Ok(()) => "podfs run of the pod takes over its mounts and files, podfs cleanup removes them".to_owned(),
                Err(error) => format!("podfs cannot use the record of the pod: {error}"),
            };
            PodStatus::without_answer(uid(directory), PodState::Dead, format!("no process serves the pod; {reason}"))
        }
    }
}

fn not_answering(directory: &Path, pid: Option<u32>, reason: String) -> PodStatus {
    let supervisor = pid.map(|pid| ProcessStatus { pid, version: None });
    PodStatus { supervisor, ..PodStatus::without_answer(uid(directory), PodState::NotAnswering, reason) }
}

fn silent(directory: &Path, limit: Duration) -> PodStatus {
    let reason = format!("it did not answer within {} ms", limit.as_millis());
    named(not_answering(directory, None, reason), PodLockRecord::read(directory).unwrap_or_default())
}

fn uid(directory: &Path) -> &str {
    directory.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Mutex;

    use super::*;

    static THREADS: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

    #[test]
    fn many_pods_are_asked_by_few_threads_and_none_is_left_out() {
        let pods: Vec<_> = (0..1000).map(|number| PathBuf::from(number.to_string())).collect();
        let look = |directory: &Path| {
            THREADS.lock().expect("no panic").insert(format!("{:?}", thread::current().id()));
            (!directory.ends_with("7")).then(|| directory.to_owned())
        };
        let looked = look_at_each(&pods, look, |_, _| panic!("none takes long"));
        let expected: Vec<_> = pods.iter().filter(|pod| !pod.ends_with("7")).cloned().collect();
        assert_eq!(looked, expected);
        assert!(THREADS.lock().expect("no panic").len() <= MOST_THREADS);
    }
}
