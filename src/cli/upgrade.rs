//! `podfs upgrade`: switches the pods of this node to the program that is on disk now.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::anyhow;
use clap::{ArgGroup, Args, ValueHint};
use podfs_fuse::printable::printable;

use super::exit::{Failure, say};
use super::status::{pod_directory, pods};
use crate::admin::process_delay::ProcessDelay;
use crate::supervisor::control::{self, AskError};
use crate::supervisor::program::options::{RUN_DIRECTORY, directory};
use crate::supervisor::run_dir::record::PodLockRecord;

/// Longest duration of the upgrade of a pod.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Switch pods to the podfs that is on disk now, without unmounting anything.
///
/// First replace the old program on disk. Then the supervisor of each pod starts the new one, and hands over mounts, open
/// files and locks. Containers wait for a moment and notice nothing else. If the new podfs does not start, the old one
/// continues to serve the pod.
///
/// podfs upgrades one pod after another, and prints one line for each: "done", "refused" (podfs changed nothing), "rolled
/// back" (the old podfs serves the pod) or "failed" (the outcome is unknown; podfs status shows the pod). Pods keep the flags
/// and settings that they were started with.
#[derive(Args)]
#[command(group = ArgGroup::new("pods").args(["pod", "all"]).required(true))]
#[command(after_help = "\
EXIT STATUS:
  0  all pods are upgraded, or there is none
  1  a pod is not upgraded, or is not found
  2  bad arguments or settings
  3  a privilege is missing

EXAMPLES:
  podfs upgrade --all
  podfs upgrade --pod c15b9f1e-0a47-5d0c-9b6c-3f1f5f1d7a10")]
pub(super) struct Upgrade {
    /// This pod; podfs status lists all.
    #[arg(long, value_name = "UID")]
    pod: Option<String>,
    /// Every pod of this node, one after another.
    #[arg(long)]
    all: bool,
    /// The run directory of podfs run.
    #[arg(long, value_name = "DIR", default_value = RUN_DIRECTORY, value_parser = directory(), value_hint = ValueHint::DirPath)]
    run_dir: PathBuf,
}

impl Upgrade {
    pub(super) fn execute(self) -> Result<(), Failure> {
        let pods = match &self.pod {
            Some(uid) => vec![pod_directory(&self.run_dir, uid)?],
            None => pods(&self.run_dir)?,
        };
        if pods.is_empty() {
            say(&format!("no pod is served here ({})", self.run_dir.display()));
        }
        let failed = pods.iter().filter(|directory| !upgrade(directory)).count();
        match failed {
            0 => Ok(()),
            _ => Err(Failure::general(anyhow!("{failed} of {} pods are not upgraded", pods.len()))),
        }
    }
}

/// Upgrades a pod, and prints its line. Returns whether the new podfs serves the pod.
fn upgrade(directory: &Path) -> bool {
    use control::Upgrade;
    print(&format!("{}: ", title(directory)));
    let waits = |pid| report_wait(directory, pid);
    let outcome = control::ask_for_upgrade(directory, TIMEOUT, || print("started, "), waits);
    let (line, is_done) = match outcome {
        Ok(Upgrade::Done { version }) => (format!("done, podfs {version} serves it"), true),
        Ok(Upgrade::Refused { reason }) => (format!("refused: {reason}"), false),
        Ok(Upgrade::RolledBack { reason }) => (format!("rolled back: {reason}"), false),
        Ok(Upgrade::Started) => {
            ("failed: the supervisor did not report how the upgrade ended; see podfs status".to_owned(), false)
        }
        Err(AskError::NotListening(_)) => {
            ("refused: it has no supervisor; podfs run of the pod takes it over".to_owned(), false)
        }
        Err(error) => (format!("failed: {error}"), false),
    };
    // A reason may have line breaks.
    print(&line.split_whitespace().collect::<Vec<_>>().join(" "));
    print("\n");
    is_done
}

/// Reports on standard error that the supervisor with this process id is silent.
fn report_wait(directory: &Path, pid: u32) {
    let (title, limit) = (title(directory), TIMEOUT.as_secs());
    let why = ProcessDelay::of(pid).map(|why| format!(": {}", why.sentence())).unwrap_or_default();
    let shares_line = std::io::stdout().is_terminal();
    if shares_line {
        print("\n");
    }
    say(&format!("{title}: the supervisor (pid {pid}) does not answer yet{why}; podfs waits for it, up to {limit} s"));
    if shares_line {
        print(&format!("{title}: "));
    }
}

/// The pod's name, such as `default/web`, or its uid if the record has no name.
fn title(directory: &Path) -> String {
    let named = PodLockRecord::read(directory).map(|record| record.pod).filter(|pod| !pod.name.is_empty());
    let uid = || directory.file_name().unwrap_or_default().display().to_string();
    named.map_or_else(uid, |pod| format!("{}/{}", pod.namespace, pod.name))
}

/// Prints a part of a line, with control characters escaped. Ignores errors: the upgrade continues after the reader closed
/// standard output.
fn print(text: &str) {
    let mut out = std::io::stdout();
    let _ = out.write_all(printable(text).as_bytes()).and_then(|()| out.flush());
}
