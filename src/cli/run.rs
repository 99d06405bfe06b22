//! `podfs run`: the volumes of one pod, until a signal stops it.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::anyhow;
use clap::{ArgGroup, Args, ValueHint};
use tracing::{info, warn};

use super::exit::Failure;
use super::log::{LogFormat, LogOptions};
use super::metrics;
use super::source::SourceOptions;
use crate::manifest::pod::PodIdentity;
use crate::source::{AcceptedDocuments, PushSource, Source};
use crate::supervisor::program::machine::check_machine;
use crate::supervisor::program::options::{
    DriverOptions, GenerationOptions, MemoryOptions, ROOT_DIRECTORY, RUN_DIRECTORY, SubPathOptions, TransportOptions,
    directory, metrics_address,
};
use crate::supervisor::program::service::PodService;
use crate::supervisor::run::upgrade::roll_back;
use crate::supervisor::{exec_state, ready_fd};
use crate::types::PodName;

/// Mount the volumes of a pod, and keep them up to date until SIGTERM, SIGINT or SIGHUP.
///
/// Volumes appear where the kubelet would have put them, below the root directory. A volume whose objects are missing
/// waits; podfs mounts the others. When all are visible, podfs announces readiness on standard error, on --ready-fd and to
/// systemd. It shows changes of objects at once, all files of a volume together. A mounted volume never loses its content
/// because an object was deleted or does not parse any more.
///
/// At SIGTERM, SIGINT and SIGHUP, podfs unmounts the volumes, deletes the content of emptyDirs, and removes the directories that it made.
/// If podfs is killed instead, its server continues to serve; start podfs again with the same arguments, and it takes them over.
///
/// Manifests, annotations and the layout of volumes are described in podfs-pod(5); how a node agent starts podfs, waits for
/// it, and hands volumes to containers in podfs-agent(7).
#[derive(Args)]
#[command(group = ArgGroup::new("of_pod").args(["pod", "pod_name"]).required(true))]
#[command(after_help = "\
EXIT STATUS:
  0  stopped by a signal
  1  failed; the last line on standard error says what, where and what to do
  2  bad arguments, settings or manifests
  3  a privilege, a kernel feature or the program podfs-fuse is missing

EXAMPLES:
  podfs run --pod pod.yaml --objects objects/
  podfs run --pod-name default/web --kubeconfig /etc/kubernetes/kubelet.conf --node-name worker-1
  podfs run --pod pod.json --push --ready-fd 3 3>ready.json")]
pub(super) struct Run {
    /// The pod's manifest, in YAML or JSON; - reads standard input.
    #[arg(long, value_name = "FILE|-", value_hint = ValueHint::FilePath)]
    pod: Option<PathBuf>,
    /// Ask the API server for this pod, and follow it.
    #[arg(long, value_name = "NAMESPACE/NAME")]
    pod_name: Option<PodName>,
    /// Refuse a pod with another uid.
    #[arg(long, value_name = "UID")]
    uid: Option<String>,
    #[command(flatten)]
    source: SourceOptions,
    /// Take objects from an agent of the node, which gives them to podfs push. Objects in --objects win over pushed ones.
    #[arg(long, conflicts_with_all = ["kubeconfig", "in_cluster"])]
    push: bool,
    /// Volumes appear below pods/UID/volumes of this directory, and emptyDirs keep their content below pods/UID/plugins.
    #[arg(long, value_name = "DIR", default_value = ROOT_DIRECTORY, value_parser = directory(), value_hint = ValueHint::DirPath)]
    root_dir: PathBuf,
    /// State that a reboot may erase: for each pod, the lock by which it has only one podfs, and its sockets.
    #[arg(long, value_name = "DIR", default_value = RUN_DIRECTORY, value_parser = directory(), value_hint = ValueHint::DirPath)]
    run_dir: PathBuf,
    /// Write one JSON object to this open descriptor once every volume is visible, then close it.
    #[arg(long, value_name = "N")]
    ready_fd: Option<RawFd>,
    #[command(flatten)]
    drivers: DriverOptions,
    #[command(flatten)]
    memory: MemoryOptions,
    /// Serve the metrics of this pod at http://ADDR:PORT/metrics. podfs metrics --all --metrics-addr serves those of all pods of
    /// the node on one port.
    #[arg(long, value_name = "ADDR:PORT", value_parser = metrics_address)]
    metrics_addr: Option<SocketAddr>,
    #[command(flatten)]
    generations: GenerationOptions,
    #[command(flatten)]
    sub_paths: SubPathOptions,
    #[command(flatten)]
    transport: TransportOptions,
    #[command(flatten)]
    log: LogOptions,
    /// The format of log lines on standard error.
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t)]
    log_format: LogFormat,
}

impl Run {
    pub(super) fn execute(self) -> Result<(), Failure> {
        // In an upgrade, the program before the upgrade goes on if this one fails before it serves the pod.
        self.serve().inspect_err(|failure| roll_back(&failure.to_string()))
    }

    fn serve(self) -> Result<(), Failure> {
        self.log.start(self.log_format);
        exec_state::check().map_err(Failure::general)?;
        self.ready_fd.map(take_ready_fd).transpose()?;
        let server_program = check_machine()?;
        // The podfs before the upgrade has accepted the pod.
        let is_known = exec_state::upgrade_is_under_way();
        let accepted = if is_known { AcceptedDocuments::KnownPods } else { AcceptedDocuments::Pods };
        let (pod, name) = (self.pod.as_deref(), self.pod_name.as_ref());
        let (source, snapshot) = self.source.open_accepting(accepted, pod, name, None)?;
        let pod = snapshot.pod.clone().ok_or_else(|| Failure::input(anyhow!("there is no pod")))?;
        self.check_uid(&pod.identity)?;
        let (source, snapshot) = match source {
            Source::Files(files) if self.push => {
                let (source, snapshot) = PushSource::new(files, snapshot, Arc::clone(&pod));
                (Source::Push(source), snapshot)
            }
            source => (source, snapshot),
        };
        let metrics = self.metrics_addr.map(listen_for_scrapers).transpose()?.flatten();
        let service = PodService {
            root_dir: self.root_dir,
            run_dir: self.run_dir,
            server_program,
            drivers: self.drivers,
            memory: self.memory,
            generations: self.generations,
            sub_paths: self.sub_paths,
            transport: self.transport,
            log_format: self.log_format,
            manifest_of_node: None,
            metrics,
        };
        service.run(&pod, source, snapshot)
    }

    /// Refuses a pod whose uid is not `--uid`, for example after an agent confused two files.
    fn check_uid(&self, pod: &PodIdentity) -> Result<(), Failure> {
        match &self.uid {
            Some(wanted) if wanted != pod.uid.as_str() => Err(Failure::input(anyhow!(
                "pod {pod} has the uid {}, and not {wanted} as asked for; correct its metadata.uid, or ask for that one",
                pod.uid
            ))),
            _ => Ok(()),
        }
    }
}

/// Listens for Prometheus. During an upgrade, podfs serves the pod even if it cannot listen there.
fn listen_for_scrapers(address: SocketAddr) -> Result<Option<TcpListener>, Failure> {
    match metrics::listen(address) {
        Ok((listener, address)) => {
            info!("metrics are served at http://{address}/metrics");
            Ok(Some(listener))
        }
        Err(failure) if exec_state::upgrade_is_under_way() => {
            warn!("{failure}; podfs serves the pod without metrics");
            Ok(None)
        }
        Err(failure) => Err(failure),
    }
}

fn take_ready_fd(number: RawFd) -> Result<(), Failure> {
    // SAFETY: fcntl(2) returns an error for a number that is not an open descriptor.
    let is_open = unsafe { libc::fcntl(number, libc::F_GETFD) } >= 0;
    if !is_open {
        return Err(Failure::input(anyhow!("--ready-fd {number}: there is no such open descriptor")));
    }
    // SAFETY: the descriptor is open, and the caller gave it to this process for this purpose alone.
    let descriptor = unsafe { OwnedFd::from_raw_fd(number) };
    ready_fd::take(descriptor).map_err(|error| Failure::input(anyhow!("--ready-fd {number} cannot be used: {error}")))
}
