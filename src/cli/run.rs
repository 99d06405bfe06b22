//! `podfs run`: the volumes of one pod, until told to stop.

use std::io::{self, Read};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use clap::Args;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use podfs_fuse::mount::private::open_device;
use podfs_fuse::server::secrecy;
use tracing::warn;

use super::block_on;
use super::exit::Failure;
use super::log::LogFormat;
use crate::source::{FileSource, PodInput};
use crate::supervisor::claim::Claim;
use crate::supervisor::report::{Report, Subject};
use crate::supervisor::site::Site;
use crate::supervisor::{self, Assignment};

/// Mount the volumes of a pod, and keep them up to date until SIGTERM or SIGINT.
#[derive(Args)]
pub(super) struct Run {
    /// The pod's manifest, in YAML or JSON; `-` reads standard input.
    #[arg(long, value_name = "FILE|-")]
    pod: PathBuf,
    /// A file or directory with the objects the pod refers to: ConfigMaps, Secrets, claims, PersistentVolumes; may be given several times.
    #[arg(long, value_name = "PATH")]
    objects: Vec<PathBuf>,
    /// Volumes appear below `pods/<uid>/volumes` of this directory.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/podfs")]
    root_dir: PathBuf,
    /// Where podfs keeps what is gone with a reboot.
    #[arg(long, value_name = "DIR", default_value = "/run/podfs")]
    run_dir: PathBuf,
    /// Write one JSON object to this open descriptor once every volume is visible, then close it.
    #[arg(long, value_name = "N")]
    ready_fd: Option<RawFd>,
    /// How log lines on standard error look.
    #[arg(long, value_enum, default_value_t)]
    log_format: LogFormat,
}

impl Run {
    pub(super) fn execute(self) -> Result<(), Failure> {
        self.log_format.start();
        let ready_fd = self.ready_fd.map(take_descriptor).transpose()?;
        check_machine()?;
        let (source, snapshot) = FileSource::open(Some(pod_input(&self.pod)?), &self.objects)?;
        let pod = snapshot.pod.clone().ok_or_else(|| Failure::input(anyhow!("there is no pod")))?;
        let (claim, inheritance) = Claim::take(&self.run_dir, &pod.identity.uid)?;
        let assignment = Assignment {
            identity: pod.identity.clone(),
            facts: pod.facts.clone(),
            volumes: pod.volumes.clone(),
            site: Site::of_pod(&self.root_dir, &pod.identity.uid),
            claim: Some(claim),
            inheritance,
            trace: false,
        };
        let report =
            Report::new(Subject::Pod, pod.identity.clone(), pod.volumes.len(), self.log_format.audience(), ready_fd);
        block_on(&pod.volumes, async { Ok(supervisor::run(assignment, source, snapshot, report).await?) })
    }
}

/// `-` is standard input.
pub(super) fn pod_input(path: &Path) -> Result<PodInput, Failure> {
    if path != Path::new("-") {
        return Ok(PodInput::File(path.to_owned()));
    }
    let mut bytes = Vec::new();
    io::stdin().read_to_end(&mut bytes).context("cannot read the pod from standard input").map_err(Failure::input)?;
    Ok(PodInput::Stdin(bytes))
}

/// What every command that mounts needs, checked before anything is made.
pub(super) fn check_machine() -> Result<(), Failure> {
    if !rustix::process::geteuid().is_root() {
        return Err(Failure::machine(anyhow!("podfs mounts file systems, so it must run as root")));
    }
    open_device()?;
    if let Err(error) = secrecy::protect_memory() {
        warn!("secrets may be swapped out: memory cannot be locked ({error}); give podfs CAP_IPC_LOCK");
    }
    raise_descriptor_limit();
    Ok(())
}

/// Each volume takes a few descriptors; the soft limit is often 1024.
fn raise_descriptor_limit() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        let _as_it_was = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
}

fn take_descriptor(number: RawFd) -> Result<OwnedFd, Failure> {
    // SAFETY: asking for the flags of a number that is no descriptor is an error, not harm.
    let known = unsafe { libc::fcntl(number, libc::F_GETFD) } >= 0;
    if !known {
        return Err(Failure::input(anyhow!("--ready-fd {number}: there is no such open descriptor")));
    }
    // SAFETY: the descriptor is open, and the caller gave it to this process for this purpose alone.
    let descriptor = unsafe { OwnedFd::from_raw_fd(number) };
    let only_here = fcntl(&descriptor, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC));
    only_here.context("--ready-fd cannot be used").map_err(Failure::input)?;
    Ok(descriptor)
}
