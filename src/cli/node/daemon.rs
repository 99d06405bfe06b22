//! Starts the daemon, and runs it until a signal ends it.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::pin;

use anyhow::anyhow;
use clap::{Args, ValueEnum, ValueHint};
use sd_notify::NotifyState;
use tracing::info;

use crate::cli::exit::Failure;
use crate::cli::log::{LogFormat, LogOptions};
use crate::cli::metrics;
use crate::node::csi::{AllowList, CsiSettings};
use crate::node::feed::{Choice, FeedSettings, PodSource};
use crate::node::local_volumes::ClassDirectory;
use crate::node::nri::NriSettings;
use crate::node::service::DaemonError;
use crate::node::supervisors::SupervisorSettings;
use crate::node::{self, NodeError, NodeOptions, on_host};
use crate::source::SettingsSource;
use crate::supervisor::exec_state;
use crate::supervisor::installed::supervisor_program;
use crate::supervisor::program::machine::{IDLE_THREAD, check_machine, keep_a_blocking_thread};
use crate::supervisor::program::options::{
    DriverOptions, GenerationOptions, IoUring, MemoryOptions, ROOT_DIRECTORY, SubPathOptions, TransportOptions,
    directory, metrics_address,
};
use crate::supervisor::run::heartbeat::Heartbeat;
use crate::supervisor::run::signals::StopSignals;
use crate::supervisor::run_dir::trust;
use crate::supervisor::status::report::notify;

/// Most threads for blocking calls, such as starting processes and reading directories.
const BLOCKING_THREADS: usize = 16;

/// The default root directory of a kubelet.
const KUBELET_ROOT: &str = "/var/lib/kubelet";

/// The default NRI socket of a container runtime.
const NRI_SOCKET: &str = "/var/run/nri/nri.sock";

/// The default index of podfs among NRI plugins.
const NRI_INDEX: &str = "90";

/// Which pods are chosen for the runtime's containers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum NriPods {
    /// Pods with the label or annotation, and pods of namespaces with the label
    #[default]
    Labeled,
    /// All pods, except those with the value false
    All,
}

/// The credentials with which the objects of CSI volumes are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum CsiReadAs {
    /// Podfs, with its own credentials
    #[default]
    Podfs,
    /// The pod that has the volume, with the token of its service account
    Pod,
}

fn index(text: &str) -> Result<String, String> {
    match text.len() == 2 && text.bytes().all(|byte| byte.is_ascii_digit()) {
        true => Ok(text.to_owned()),
        false => Err("it has two digits, as 05 or 90".to_owned()),
    }
}

/// The options of the daemon.
#[derive(Args)]
pub(super) struct DaemonOptions {
    /// Serve the static pods of this directory. Its files hold manifests of pods and of the objects that they refer to; podfs
    /// follows files that appear, change and disappear.
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    manifests: Option<PathBuf>,
    /// Serve the pods that the API server of this kubeconfig's current context has for the node, and ask it for their
    /// objects.
    #[arg(long, value_name = "FILE", conflicts_with = "in_cluster", value_hint = ValueHint::FilePath)]
    kubeconfig: Option<PathBuf>,
    /// Ask the API server of the cluster that podfs itself runs in, as its service account.
    #[arg(long)]
    in_cluster: bool,
    /// The name of the node in the API server.
    #[arg(long, value_name = "NAME")]
    node_name: Option<String>,
    /// Serve as the CSI driver podfs.io of this node's kubelet, on this socket. The kubelet then decides which volumes podfs
    /// mounts, and the sources only describe pods and have their objects. Needs --node-name.
    #[arg(long, value_name = "SOCKET", value_hint = ValueHint::AnyPath)]
    csi: Option<PathBuf>,
    /// Serve as a plugin of the container runtime at this NRI socket: containers of chosen pods get podfs's volumes of the kinds
    /// configMap, secret, downwardAPI and projected instead of the kubelet's.
    #[arg(long, value_name = "SOCKET", num_args = 0..=1, default_missing_value = NRI_SOCKET, value_hint = ValueHint::AnyPath)]
    nri: Option<PathBuf>,
    /// Which pods podfs chooses for --nri: those with the label or annotation podfs.io/volumes "true" and those of namespaces with
    /// that label, or all except those with "false".
    #[arg(long, value_name = "WHICH", value_enum, default_value_t)]
    nri_pods: NriPods,
    /// The place of podfs among the plugins of the container runtime: two digits.
    #[arg(long, value_name = "NN", default_value = NRI_INDEX, value_parser = index)]
    nri_index: String,
    /// The --root-dir of the kubelet. Volumes of --csi appear below pods/UID/volumes/kubernetes.io~csi there, and --nri recognises
    /// the kubelet's volumes by it.
    #[arg(long, value_name = "DIR", default_value = KUBELET_ROOT, value_parser = directory(), value_hint = ValueHint::DirPath)]
    kubelet_root: PathBuf,
    /// The directories of the node, each with everything below it, and the NFS servers that CSI volumes may show, separated by
    /// commas. Without this option, none.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    csi_allow: Vec<String>,
    /// The reader of the ConfigMaps and Secrets of CSI volumes at the API server: podfs with its own credentials, or the pod with
    /// the token that the kubelet sends, for which the CSIDriver object needs tokenRequests.
    #[arg(long, value_name = "READER", value_enum, default_value_t)]
    csi_read_as: CsiReadAs,
    /// Offer each mount and each block device in DIR as a local PersistentVolume of the StorageClass CLASS. If the reclaim policy
    /// is Delete, erase the volume when its claim is deleted. May be given several times, or as a list separated by commas.
    #[arg(long, value_name = "CLASS=DIR", value_delimiter = ',')]
    discover: Vec<ClassDirectory>,
    /// In a privileged container that shares the node's process ids: continue on the node itself, from a copy of the programs in
    /// this directory of the node. Volumes then outlive the container, and paths are those of the node.
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    on_host: Option<PathBuf>,
    /// Unmount the volumes of a pod as soon as it is deleted or has ended, without an agent that releases it. Containers
    /// that still run lose the volumes.
    #[arg(long)]
    release_when_gone: bool,
    /// Report the volumes in use in the status of the Node object. Not for use beside a kubelet, which reports them itself.
    #[arg(long)]
    report_volumes_in_use: bool,
    /// Register the CSI drivers of the node in the cluster: write the CSINode object, and the drivers' ids of the node and their
    /// topology into the Node object. Not for use beside a kubelet, which does so itself.
    #[arg(long)]
    register_csi_drivers: bool,
    /// Volumes appear below pods/UID/volumes of this directory, and emptyDirs keep their content below pods/UID/plugins.
    #[arg(long, value_name = "DIR", default_value = ROOT_DIRECTORY, value_parser = directory(), value_hint = ValueHint::DirPath)]
    root_dir: PathBuf,
    /// Serve the metrics of the node and of all its pods at http://ADDR:PORT/metrics.
    #[arg(long, value_name = "ADDR:PORT", value_parser = metrics_address)]
    metrics_addr: Option<SocketAddr>,
    #[command(flatten)]
    drivers: DriverOptions,
    #[command(flatten)]
    memory: MemoryOptions,
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

impl DaemonOptions {
    pub(super) fn execute(self, run_directory: PathBuf) -> Result<(), Failure> {
        self.log.start(self.log_format);
        let api = self.api()?;
        if self.manifests.is_none() && api.is_none() {
            return Err(Failure::input(anyhow!(
                "podfs node knows no pods without a source; give --manifests, --kubeconfig or --in-cluster"
            )));
        }
        if !self.discover.is_empty() && api.is_none() {
            return Err(Failure::input(anyhow!(
                "--discover offers volumes at the API server; give --kubeconfig or --in-cluster, too"
            )));
        }
        ClassDirectory::check(&self.discover).map_err(Failure::input)?;
        self.check_companions()?;
        let csi = self.csi()?;
        let nri = self.nri()?;
        let arguments = self.arguments_of_supervisors();
        if let Some(directory) = self.on_host.as_ref().filter(|_| !on_host::has_left_container()) {
            // `config` has put the settings of the file into the environment.
            return on_host::continue_on_node(directory, exec_state::arguments(std::env::args_os()))
                .map_err(Failure::machine);
        }
        check_machine()?;
        for directory in [&run_directory, &self.root_dir] {
            trust::check(directory).map_err(Failure::input)?;
        }
        let metrics = self.metrics_addr.map(metrics::listen).transpose()?.map(|(listener, address)| {
            info!("metrics are served at http://{address}/metrics");
            listener
        });
        let (files, server) = (self.manifests.is_some(), api.is_some());
        let sources = [
            csi.is_some().then_some(PodSource::Kubelet),
            nri.is_some().then_some(PodSource::Runtime),
            // With --csi and without --nri, files and API server only describe pods.
            (files && (csi.is_none() || nri.is_some())).then_some(PodSource::Files),
            (server && (csi.is_none() || nri.is_some())).then_some(PodSource::Api),
        ];
        let program = supervisor_program().map_err(Failure::machine)?;
        let supervisors = SupervisorSettings::new(&run_directory, &self.root_dir, program);
        let supervisors = supervisors.map_err(|error| Failure::general(anyhow!("cannot start: {error}")))?;
        let supervisors = supervisors.with_arguments(arguments);
        let options = NodeOptions {
            sources: sources.into_iter().flatten().collect(),
            feed: FeedSettings {
                manifests: self.manifests,
                api,
                reads_as_pods: csi.is_some() && self.csi_read_as == CsiReadAs::Pod,
                node: self.node_name,
                earlier: Vec::new(),
            },
            supervisors,
            // The kubelet and the container runtime decide when volumes are unmounted.
            release_when_gone: self.release_when_gone || csi.is_some() || nri.is_some(),
            report_volumes_in_use: self.report_volumes_in_use,
            register_csi_drivers: self.register_csi_drivers,
            discover: self.discover,
            kubelet_root: self.kubelet_root,
            metrics,
            csi,
            nri,
        };
        serve(options)
    }

    /// The arguments for each pod's supervisor.
    fn arguments_of_supervisors(&self) -> Vec<OsString> {
        let mut arguments = self.log.arguments();
        arguments.extend(["--log-format", self.log_format.word(), "--keep-old-generations"].map(OsString::from));
        arguments.push(self.generations.keep_old_generations.as_secs_f64().to_string().into());
        arguments.push("--flexvolume-dir".into());
        arguments.push(self.drivers.flexvolume_dir.clone().into());
        arguments.extend(["--sub-path", self.sub_paths.sub_path.word()].map(OsString::from));
        // An earlier supervisor does not know the option.
        if self.transport.io_uring != IoUring::Auto {
            arguments.extend(["--io-uring", self.transport.io_uring.word()].map(OsString::from));
        }
        if let Some(bytes) = self.memory.server_memory_max {
            arguments.extend(["--server-memory-max".into(), bytes.to_string().into()]);
        }
        arguments
    }

    /// Refuses options that have no effect without another one.
    fn check_companions(&self) -> Result<(), Failure> {
        let (no_csi, no_nri) = (self.csi.is_none(), self.nri.is_none());
        let without_effect = [
            (no_csi && !self.csi_allow.is_empty(), "--csi-allow", "--csi"),
            (no_csi && self.csi_read_as != CsiReadAs::default(), "--csi-read-as", "--csi"),
            (no_nri && self.nri_pods != NriPods::default(), "--nri-pods", "--nri"),
            (no_nri && self.nri_index != NRI_INDEX, "--nri-index", "--nri"),
        ];
        match without_effect.into_iter().find(|(is_alone, ..)| *is_alone) {
            Some((_, option, companion)) => Err(Failure::input(anyhow!(
                "{option} has no effect without {companion}; give {companion}, too, or remove {option} from the arguments and settings"
            ))),
            None => Ok(()),
        }
    }

    /// The settings of the CSI driver; `None` without `--csi`.
    fn csi(&self) -> Result<Option<CsiSettings>, Failure> {
        let Some(socket) = self.csi.clone() else { return Ok(None) };
        let Some(node) = self.node_name.clone() else {
            return Err(Failure::input(anyhow!(
                "the kubelet asks the CSI driver for the node's name; give --node-name"
            )));
        };
        self.check_beside_kubelet()?;
        let allow = AllowList::new(self.csi_allow.iter().map(String::as_str));
        Ok(Some(CsiSettings { socket, kubelet_root: self.kubelet_root.clone(), node, allow }))
    }

    /// The settings of the NRI plugin; `None` without `--nri`.
    fn nri(&self) -> Result<Option<NriSettings>, Failure> {
        let Some(socket) = self.nri.clone() else { return Ok(None) };
        self.check_beside_kubelet()?;
        let choice = match self.nri_pods {
            NriPods::Labeled => Choice::Labeled,
            NriPods::All => Choice::All,
        };
        let (index, kubelet_root) = (self.nri_index.clone(), self.kubelet_root.clone());
        Ok(Some(NriSettings { socket, index, kubelet_root, choice }))
    }

    /// Refuses options that conflict with a kubelet.
    fn check_beside_kubelet(&self) -> Result<(), Failure> {
        if self.report_volumes_in_use {
            return Err(Failure::input(anyhow!(
                "the kubelet reports its volumes in use itself; leave out --report-volumes-in-use"
            )));
        }
        if self.register_csi_drivers {
            return Err(Failure::input(anyhow!(
                "the kubelet registers CSI drivers itself; leave out --register-csi-drivers"
            )));
        }
        if self.root_dir == self.kubelet_root {
            return Err(Failure::input(anyhow!(
                "--root-dir {} is the directory of the kubelet; podfs needs another one for itself",
                self.root_dir.display()
            )));
        }
        Ok(())
    }

    /// The access to the API server; `None` without `--kubeconfig` and `--in-cluster`.
    fn api(&self) -> Result<Option<SettingsSource>, Failure> {
        let kubeconfig = self.kubeconfig.clone().map(SettingsSource::Kubeconfig);
        let access = kubeconfig.or(self.in_cluster.then_some(SettingsSource::InCluster));
        match (&access, &self.node_name) {
            (Some(_), None) => Err(Failure::input(anyhow!(
                "the API server has the pods of all nodes; give --node-name, the name of this one's Node object"
            ))),
            (None, _) if self.report_volumes_in_use => Err(Failure::input(anyhow!(
                "--report-volumes-in-use reports to the API server; give --kubeconfig or --in-cluster, too"
            ))),
            (None, _) if self.register_csi_drivers => Err(Failure::input(anyhow!(
                "--register-csi-drivers writes to the API server; give --kubeconfig or --in-cluster, too"
            ))),
            _ => Ok(access),
        }
    }
}

/// Runs the daemon until a signal ends it.
fn serve(options: NodeOptions) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(BLOCKING_THREADS)
        .thread_keep_alive(IDLE_THREAD)
        .build()
        .map_err(|error| Failure::general(anyhow!("cannot start: {error}")))?;
    let ended = runtime.block_on(async {
        let mut stop = StopSignals::listen().map_err(|error| Failure::general(anyhow!("cannot start: {error}")))?;
        let mut heartbeat = Heartbeat::of_unit();
        tokio::spawn(keep_a_blocking_thread());
        let mut node = pin!(node::run(options));
        loop {
            tokio::select! {
                ended = &mut node => return Ok(ended?),
                signal = stop.received() => {
                    notify(&[NotifyState::Stopping]);
                    info!("{signal}: podfs node ends; the supervisors serve the volumes until the next podfs node adopts them");
                    return Ok(());
                }
                () = heartbeat.beat() => {}
            }
        }
    });
    // The process does not wait for threads that a source blocks.
    runtime.shutdown_background();
    ended
}

impl From<NodeError> for Failure {
    fn from(error: NodeError) -> Failure {
        match error {
            NodeError::Daemon(DaemonError::Untrusted(_)) => Failure::input(error),
            // The kubelet makes its directories when it starts for the first time, which may be later than podfs. So the exit code
            // lets systemd start podfs again (`NodeError::Csi`, `NodeError::Nri`).
            error => Failure::general(error),
        }
    }
}
