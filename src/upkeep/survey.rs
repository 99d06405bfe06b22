//! The pods of a run directory, each asked how it is. A pod that does not answer holds up no other.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use crate::supervisor::claim::{self, Record, SERVER};
use crate::supervisor::control::{self, Answer, AskError, Question};
use crate::supervisor::status::{PodState, PodStatus, ProcessStatus, ServerStatus};

/// How long all of them together may take. Asking one takes two seconds at most.
const PATIENCE: Duration = Duration::from_millis(2500);

/// The directories of all pods in the run directory, by uid. There are none when nothing was ever served here.
///
/// # Errors
/// When the run directory cannot be read.
pub fn pods(run_directory: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match std::fs::read_dir(run_directory) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut pods: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    pods.retain(|directory| Record::read(directory).is_some());
    pods.sort();
    Ok(pods)
}

/// How the pods of these directories are, in their order. One that has ended meanwhile is left out.
pub fn look_at(pods: &[PathBuf]) -> Vec<PodStatus> {
    let (found, findings) = channel();
    for (place, directory) in pods.iter().cloned().enumerate() {
        let found = found.clone();
        // Without a thread for it, it counts as one that does not answer.
        let _none = thread::Builder::new().spawn(move || drop(found.send((place, look(&directory)))));
    }
    drop(found);
    let mut statuses: Vec<_> = pods.iter().map(|directory| Some(silent(directory))).collect();
    let deadline = Instant::now() + PATIENCE;
    while let Ok((place, status)) = findings.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
        statuses[place] = status;
    }
    statuses.into_iter().flatten().collect()
}

fn look(directory: &Path) -> Option<PodStatus> {
    let record = Record::read(directory)?;
    let status = match control::ask(directory, &Question::Status, None) {
        Ok(Answer::Status(status)) if status.uid == uid(directory) => return Some(*status),
        Ok(Answer::Status(status)) => {
            let reason = format!("its control socket answers for another pod, {}", status.title());
            not_answering(directory, None, reason)
        }
        Ok(Answer::Refused(reason) | Answer::Busy(reason)) => not_answering(directory, None, reason),
        Ok(_) => not_answering(directory, None, "the answer is one to another question".to_owned()),
        Err(AskError::NobodyListens(_)) => nobody_listens(directory, &record),
        Err(error) => {
            let pid = match &error {
                AskError::Silent { pid, .. } | AskError::Nonsense { pid, .. } => Some(*pid),
                AskError::NobodyListens(_) | AskError::Failed { .. } => None,
            };
            not_answering(directory, pid, error.to_string())
        }
    };
    // What has ended by now is no pod any more.
    Record::read(directory)?;
    let named = Some(record.pod).filter(|pod| !pod.name.is_empty());
    let (namespace, name) = named.map(|pod| (pod.namespace, pod.name)).unzip();
    Some(PodStatus { namespace, name, ..status })
}

/// The lock tells whether there is a supervisor: the process id that was written down may be another program's by now.
fn nobody_listens(directory: &Path, record: &Record) -> PodStatus {
    if claim::is_held(directory) {
        let reason = "its supervisor does not listen: it starts or ends just now, or could not make its control socket";
        return not_answering(directory, Some(record.pid).filter(|pid| *pid != 0), reason.to_owned());
    }
    match control::call(directory, SERVER) {
        Ok(stream) => {
            let reason = "the volumes are served but not refreshed; podfs run of the pod takes them over";
            let process = control::peer(&stream).map(|pid| ProcessStatus { pid, version: None });
            let server = process.map(|process| ServerStatus { process, restarts: 0 });
            PodStatus { server, ..PodStatus::unspoken(uid(directory), PodState::NoSupervisor, reason) }
        }
        Err(_) => {
            let reason =
                "nobody serves it; podfs run of the pod goes on with what is left, podfs cleanup takes it away";
            PodStatus::unspoken(uid(directory), PodState::Dead, reason)
        }
    }
}

fn not_answering(directory: &Path, pid: Option<u32>, reason: String) -> PodStatus {
    let supervisor = pid.map(|pid| ProcessStatus { pid, version: None });
    PodStatus { supervisor, ..PodStatus::unspoken(uid(directory), PodState::NotAnswering, reason) }
}

fn silent(directory: &Path) -> PodStatus {
    not_answering(directory, None, format!("nothing was heard of it within {} ms", PATIENCE.as_millis()))
}

fn uid(directory: &Path) -> &str {
    directory.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}
