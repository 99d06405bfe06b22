//! The daemon: its parts, put together and started.
//!
//! At its start, the daemon takes the locks of the run directory and of the root directory, so that it is their only daemon. Then it finds what earlier
//! daemons left, opens the sources, makes the manager, and opens the socket for agents last. So an agent that connects already
//! sees the pods of an earlier daemon.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::path::PathBuf;

use sd_notify::NotifyState;
use tracing::warn;

use super::csi::{self, CsiDriverServer, CsiSettings, CsiSockets};
use super::error::NodeError;
use super::feed::{Chosen, Feed, FeedSettings, PodSource};
use super::in_use;
use super::local_volumes::{self, ClassDirectory, LocalVolumeMetrics, ProvisionerSettings};
use super::manager::recovery::{RecoveredPod, recover};
use super::manager::{LostPod, Manager, ManagerSettings};
use super::metrics::{self, Recorder};
use super::nri::{self, NriPlugin, NriSettings};
use super::orphans::Orphans;
use super::pod::{NodePod, PodOrigin};
use super::publication::Publications;
use super::reconstruct::reconstruct;
use super::registrations;
use super::root_lock::RootLock;
use super::run_directory;
use super::service::DaemonLock;
use super::supervisors::{SupervisorSettings, Supervisors};

/// The settings of a daemon.
pub struct NodeOptions {
    /// Where pods and objects come from.
    pub feed: FeedSettings,
    /// The sources of pods. The manager unmounts nothing before each of them has listed its pods.
    pub sources: Vec<PodSource>,
    /// The settings of supervisors, with the directories of volumes.
    pub supervisors: SupervisorSettings,
    /// Whether podfs releases a pod that no source has any more, without waiting for an agent.
    pub release_when_gone: bool,
    /// Whether the daemon reports the volumes in use in the status of the Node object.
    pub report_volumes_in_use: bool,
    /// Whether the daemon registers CSI drivers of the node in the cluster.
    pub register_csi_drivers: bool,
    /// The directories whose entries the node offers as local volumes.
    pub discover: Vec<ClassDirectory>,
    /// The root directory of the kubelet, whose pods may use local volumes.
    pub kubelet_root: PathBuf,
    /// The listener on which the daemon serves metrics over HTTP.
    pub metrics: Option<TcpListener>,
    /// The settings of the CSI driver, if a kubelet decides which volumes there are. The kubelet is one of the
    /// `sources` then.
    pub csi: Option<CsiSettings>,
    /// The settings of the runtime's plugin, if podfs serves volumes in the place of the kubelet's. The runtime is one
    /// of the `sources` then.
    pub nri: Option<NriSettings>,
}

/// Serves the node until the future is dropped. The supervisors then keep running, and the volumes stay mounted.
///
/// # Errors
/// When the daemon cannot start.
pub async fn run(options: NodeOptions) -> Result<(), NodeError> {
    let NodeOptions { mut feed, sources, supervisors: settings, release_when_gone, .. } = options;
    let NodeOptions { report_volumes_in_use, register_csi_drivers, metrics, csi, nri, discover, kubelet_root, .. } =
        options;
    let (run_directory, root_directory) = (settings.run_directory().to_owned(), settings.root_directory().to_owned());
    let lock = DaemonLock::take(&run_directory)?;
    let _root_lock = RootLock::take(&root_directory)?;
    let left_pods = reconstruct(&run_directory, &root_directory)
        .map_err(|cause| NodeError::Reconstruct { path: root_directory.clone(), cause })?;
    let recorder = Recorder::default();
    let (supervisors, reports) = Supervisors::new(settings);
    left_pods.iter().for_each(|pod| supervisors.adopt(pod));
    let (mut recovered, mut lost) = (Vec::new(), BTreeMap::new());
    for pod in left_pods {
        match recover(pod, &recorder) {
            RecoveredPod::Pod(pod) => recovered.push(pod),
            RecoveredPod::Lost(uid) => drop(lost.insert(uid, LostPod::default())),
            RecoveredPod::Unknown(uid) => drop(lost.insert(uid, LostPod::of_other_version())),
            RecoveredPod::Nothing => {}
        }
    }
    feed.earlier = recovered.iter().map(|recovered| recovered.pod.clone()).collect();
    let node = feed.node.clone();
    let kubelet_pods = (csi.is_some() || nri.is_some()).then(|| kubelet_root.join("pods"));
    let csi = csi.map(|settings| CsiSockets::open(&settings).map(|sockets| (settings, sockets))).transpose()?;
    let plugin = match nri {
        Some(settings) => Some(NriPlugin::open(settings).await?),
        None => None,
    };
    let of_runtime = |pod: &&NodePod| pod.origin == PodOrigin::Runtime;
    let earlier_chosen: Vec<NodePod> = feed.earlier.iter().filter(of_runtime).cloned().collect();
    let mut feed = Feed::open(feed).await?;
    let supervisors_with_files = supervisors.clone();
    let orphans = Orphans::new(&run_directory, &root_directory);
    let (manager, handle) = Manager::new(
        recovered,
        ManagerSettings {
            sources,
            node: node.clone(),
            root_directory: root_directory.clone(),
            release_when_gone,
            lost,
            kubelet_pods,
        },
        &feed,
        supervisors,
        orphans,
        recorder.clone(),
    );
    let records = Publications::of(&run_directory);
    let take_over = |(settings, sockets)| {
        CsiDriverServer::take_over(settings, sockets, records, &mut feed, handle.clone(), recorder.clone())
    };
    let driver = csi.map(take_over).transpose()?;
    let plugin = plugin.map(|plugin| {
        let uids = earlier_chosen.iter().map(|pod| pod.pod.identity.uid.clone());
        let changes = Box::new(feed.follow_runtime(Chosen::new(plugin.settings().choice, uids), &earlier_chosen));
        nri::serve(plugin, root_directory.clone(), run_directory.clone(), handle.clone(), recorder.clone(), changes)
    });
    if let Some(listener) = metrics
        && let Err(error) = metrics::serve(listener, run_directory, handle.clone(), recorder.clone())
    {
        warn!("podfs cannot serve metrics: {error}");
    }
    if let (Some(client), Some(node)) = (feed.client(), node) {
        if report_volumes_in_use {
            tokio::spawn(in_use::report(client.clone(), node.clone(), handle.clone()));
        }
        if register_csi_drivers {
            let (client, node, root_directory) = (client.clone(), node.clone(), root_directory.clone());
            tokio::spawn(async move { registrations::serve(client, node, &root_directory).await });
        }
        if !discover.is_empty() {
            let (directories, handle) = (discover, handle.clone());
            let (root_directory, metrics) = (root_directory.clone(), LocalVolumeMetrics::default());
            recorder.local_volumes(metrics.clone());
            let settings =
                ProvisionerSettings { client, node, directories, root_directory, kubelet_root, handle, metrics };
            tokio::spawn(local_volumes::serve(settings));
        }
    }
    if let Err(error) = sd_notify::notify(&[NotifyState::Ready]) {
        warn!("cannot notify the service manager: {error}");
    }
    let serve_kubelet = async {
        match driver {
            Some(driver) => csi::serve(driver).await,
            None => std::future::pending().await,
        }
    };
    let serve_runtime = async {
        match plugin {
            Some(serving) => match serving.await {},
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        () = serve_runtime => Ok(()),
        served = serve_kubelet => served.map_err(NodeError::Csi),
        () = manager.run(feed, reports) => Ok(()),
        served = run_directory::serve(lock, handle, supervisors_with_files) => served,
    }
}
