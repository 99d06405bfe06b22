//! `podfs status`: the state of the pods of this node.

use std::path::{Path, PathBuf};

use anyhow::anyhow;
use clap::{Args, ValueEnum, ValueHint};
use podfs_fuse::printable::printable;
use serde::Serialize;

use super::exit::{Failure, say};
use crate::admin::{survey, table};
use crate::manifest::pod::PodUid;
use crate::supervisor::program::options::{RUN_DIRECTORY, directory};
use crate::supervisor::status::{PodState, PodStatus};

/// Show the state of the pods of this node and of their volumes.
///
/// podfs asks the supervisors of all pods of the run directory at once, and waits at most two seconds for an answer.
///
/// The state of a pod is one of: running; degraded (a volume waits or shows an old generation, the API server cannot be
/// reached, or the server does not stay up); pod deleted (the API server no longer has the pod); no supervisor (the server
/// serves the volumes, but they are not refreshed); not answering; dead (no process serves the pod, but mounts or files of it
/// are left).
#[derive(Args)]
#[command(after_help = "\
EXIT STATUS:
  0  every pod is running, or there is none
  1  a pod is not running, or is not found
  2  bad arguments or settings
  3  a privilege is missing

EXAMPLES:
  podfs status
  podfs status --pod c15b9f1e-0a47-5d0c-9b6c-3f1f5f1d7a10
  podfs status --output json | jq '.pods[] | select(.state != \"running\")'")]
pub(super) struct Status {
    /// Show this pod only.
    #[arg(long, value_name = "UID")]
    pod: Option<String>,
    /// The run directory of podfs run.
    #[arg(long, value_name = "DIR", default_value = RUN_DIRECTORY, value_parser = directory(), value_hint = ValueHint::DirPath)]
    run_dir: PathBuf,
    /// A table for people, or JSON for programs.
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t)]
    output: StatusOutput,
}

#[derive(Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum StatusOutput {
    /// Aligned columns.
    #[default]
    Table,
    /// One JSON object.
    Json,
}

impl Status {
    pub(super) fn execute(self) -> Result<(), Failure> {
        let pods = match &self.pod {
            Some(uid) => vec![pod_directory(&self.run_dir, uid)?],
            None => pods(&self.run_dir)?,
        };
        let statuses = survey::statuses_of(&pods);
        match self.output {
            StatusOutput::Json => print(&json(&statuses)?)?,
            StatusOutput::Table if statuses.is_empty() => {
                say(&format!("no pod is served here ({})", self.run_dir.display()))
            }
            StatusOutput::Table => print(&table::table(&statuses))?,
        }
        check(&statuses)
    }
}

/// The pod's directory in the run directory.
///
/// # Errors
/// When the uid is invalid, or the run directory does not have the pod.
pub(super) fn pod_directory(run_directory: &Path, uid: &str) -> Result<PathBuf, Failure> {
    let uid = pod_uid(uid)?;
    let directory = run_directory.join(uid.as_str());
    if pods(run_directory)?.contains(&directory) {
        return Ok(directory);
    }
    let place = run_directory.display();
    Err(Failure::general(anyhow!(
        "pod {uid} is not served here: {place} has nothing of it; podfs status lists all pods"
    )))
}

/// The uid that `--pod` gives.
///
/// # Errors
/// When it is invalid.
pub(super) fn pod_uid(uid: &str) -> Result<PodUid, Failure> {
    PodUid::parse(uid).map_err(|_| {
        Failure::input(anyhow!("--pod {uid:?}: not the uid of a pod; podfs status lists all pods with their uids"))
    })
}

/// The directories of all pods.
pub(super) fn pods(run_directory: &Path) -> Result<Vec<PathBuf>, Failure> {
    if !rustix::process::geteuid().is_root() {
        return Err(Failure::machine(anyhow!("podfs answers only root; run this as root")));
    }
    let pods = survey::pods(run_directory);
    pods.map_err(|error| Failure::general(anyhow!("cannot read {}: {error}", run_directory.display())))
}

fn json(pods: &[PodStatus]) -> Result<String, Failure> {
    #[derive(Serialize)]
    struct StatusDocument<'a> {
        pods: &'a [PodStatus],
    }
    let text = serde_json::to_string_pretty(&StatusDocument { pods }).map_err(Failure::general)?;
    Ok(text + "\n")
}

/// Prints text for people, or JSON, with control characters escaped. Ignores that the reader has closed the pipe.
pub(super) fn print(text: &str) -> Result<(), Failure> {
    print_exactly(&printable(text))
}

/// Prints text for programs. Escapes control characters only if standard output is a terminal.
pub(super) fn print_for_programs(text: &str) -> Result<(), Failure> {
    use std::io::IsTerminal;
    if std::io::stdout().is_terminal() { print(text) } else { print_exactly(text) }
}

fn print_exactly(text: &str) -> Result<(), Failure> {
    use std::io::{ErrorKind, Write};
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::general(anyhow!("cannot write to standard output: {error}")))
        }
        _ => Ok(()),
    }
}

fn check(statuses: &[PodStatus]) -> Result<(), Failure> {
    let bad: Vec<_> = statuses.iter().filter(|pod| pod.state != PodState::Running).collect();
    match bad.as_slice() {
        [] => Ok(()),
        [pod] => Err(Failure::general(anyhow!("pod {} is {}", pod.title(), in_words(pod.state)))),
        _ => Err(Failure::general(anyhow!("{} of {} pods are not as they should be", bad.len(), statuses.len()))),
    }
}

fn in_words(state: PodState) -> &'static str {
    match state {
        PodState::NoSupervisor => "without a supervisor",
        PodState::PodDeleted => "deleted, and still served",
        other => other.word(),
    }
}
