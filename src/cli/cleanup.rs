//! `podfs cleanup`: removes the remains of killed podfs processes.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::anyhow;
use clap::{Args, ValueHint};
use podfs_fuse::printable::printable_line;

use super::exit::Failure;
use super::status::pod_uid;
use crate::admin::cleanup::{Cleanup, CleanupLine, CleanupStep};
use crate::supervisor::program::options::{ROOT_DIRECTORY, RUN_DIRECTORY, directory};

/// Remove mounts and files that killed podfs processes have left.
///
/// These are dead mounts, which answer "Transport endpoint is not connected"; the directories and mount points that podfs
/// made for them; run files. podfs unmounts lazily, and removes only empty directories and empty mount point files. It removes
/// no file inside a volume, and does not follow mount points.
///
/// podfs leaves served pods alone, also those whose supervisor is gone while their server still serves. It keeps the content of
/// emptyDirs, too: the next podfs of the pod finds it. With --pod and --content, it deletes that content, which may be secret
/// and which takes memory if the emptyDir is in memory.
///
/// podfs run needs no cleanup before it: it continues with these leftovers. It mounts over a dead mount, and running containers
/// see the new mount; after a cleanup of the dead mount, they do not. So use this for pods that do not come back.
///
/// podfs prints one line for each path: "unmounted PATH", "removed PATH", "left PATH: reason". A second cleanup does nothing
/// more, and two at once are safe.
#[derive(Args)]
#[command(after_help = "\
EXIT STATUS:
  0  it could look at everything; with --content, the content is deleted
  1  something could not be looked at; with --content, content of its emptyDirs or a mount stays
  2  bad arguments or settings
  3  a privilege is missing

EXAMPLES:
  podfs cleanup --dry-run
  podfs cleanup
  podfs cleanup --pod c15b9f1e-0a47-5d0c-9b6c-3f1f5f1d7a10 --content")]
pub(super) struct Cleaning {
    /// The run directory of podfs run.
    #[arg(long, value_name = "DIR", default_value = RUN_DIRECTORY, value_parser = directory(), value_hint = ValueHint::DirPath)]
    run_dir: PathBuf,
    /// Unmount dead mounts below this directory even if the run directory does not have their pod; name other dead mounts.
    #[arg(long, value_name = "DIR", default_value = ROOT_DIRECTORY, value_parser = directory(), value_hint = ValueHint::DirPath)]
    root_dir: PathBuf,
    /// Clean up after this pod alone, which does not come back.
    #[arg(long, value_name = "UID", requires = "content")]
    pod: Option<String>,
    /// Delete the content of the pod's emptyDirs, too, unless a process serves the pod.
    #[arg(long, requires = "pod")]
    content: bool,
    /// Print the steps, and do nothing.
    #[arg(long)]
    dry_run: bool,
}

impl Cleaning {
    pub(super) fn execute(self) -> Result<(), Failure> {
        let Self { run_dir, root_dir, dry_run, pod, content: _ } = self;
        let pod = pod.as_deref().map(pod_uid).transpose()?;
        if !rustix::process::geteuid().is_root() {
            return Err(Failure::machine(anyhow!("podfs unmounts file systems, so it must run as root")));
        }
        let mut report = |step: &CleanupStep| {
            let line = CleanupLine(step, dry_run).to_string();
            // The cleanup continues after the reader closed standard output.
            let _ = writeln!(std::io::stdout(), "{}", printable_line(&line));
        };
        let cleanup = Cleanup::new(dry_run, &mut report);
        let failed = |directory: &Path, error: io::Error| {
            Failure::general(anyhow!("cannot look for leftovers in {}: {error}", directory.display()))
        };
        let Some(uid) = pod else { return cleanup.clean(&run_dir, &root_dir).map_err(|error| failed(&run_dir, error)) };
        match cleanup.clean_with_content(&run_dir, &root_dir, &uid) {
            Ok(true) => Ok(()),
            Ok(false) => Err(Failure::general(anyhow!("podfs leaves a part of pod {uid}"))),
            Err(error) => Err(failed(&run_dir.join(uid.as_str()), error)),
        }
    }
}
