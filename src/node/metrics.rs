//! The daemon's own metrics, with the kubelet's names, and its port for Prometheus: metrics of the node and of all pods.

use std::collections::BTreeMap;
use std::io;
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

use podfs_fuse::region::Distribution;
use tokio::time::Instant;
use tracing::warn;

use super::local_volumes::LocalVolumeMetrics;
use super::publication::DRIVER;
use super::{MountState, NodeHandle, NodeState, VolumeEntry, spans};
use crate::admin::readings::Readings;
use crate::admin::survey;
use crate::metrics::families::{
    CSI_OPERATIONS, NRI_CONNECTED, NRI_CONTAINERS, NRI_MOUNTS, NRI_REQUESTS, OVERALL_OPERATIONS, RECONSTRUCTION_ERRORS,
    RECONSTRUCTIONS, STORAGE_OPERATIONS, TOTAL_VOLUMES,
};
use crate::metrics::{Exposition, PodReading, exporter};
use crate::supervisor::status::OPERATION_BOUNDS;

/// Counts operations. Cheap to clone; all clones count together.
#[derive(Clone, Debug, Default)]
pub struct Recorder(Arc<Mutex<NodeCounters>>);

#[derive(Debug, Default)]
struct NodeCounters {
    /// By operation, plugin and status.
    operations: BTreeMap<(String, String, &'static str), Distribution>,
    /// By plugin and operation.
    overall: BTreeMap<(String, &'static str), Distribution>,
    /// By method and status of gRPC.
    csi: BTreeMap<(&'static str, String), Distribution>,
    nri: Nri,
    reconstructions: u64,
    reconstruction_errors: u64,
    local_volumes: Option<LocalVolumeMetrics>,
}

/// The metrics of the container runtime.
#[derive(Debug, Default)]
struct Nri {
    /// `None` if podfs node is not a plugin of a container runtime.
    is_connected: Option<bool>,
    /// By method.
    requests: BTreeMap<String, Distribution>,
    /// By source and reason.
    mounts: BTreeMap<(&'static str, &'static str), u64>,
    /// By source.
    containers: BTreeMap<&'static str, usize>,
}

impl Recorder {
    /// Counts an operation that began at `started` and has ended. `operation` is the kubelet's name: `volume_mount`.
    pub fn operation(&self, plugin: &str, operation: &str, started: Instant, has_succeeded: bool) {
        let status = if has_succeeded { "success" } else { "fail-unknown" };
        let key = (operation.to_owned(), plugin.to_owned(), status);
        count(self.counts().operations.entry(key).or_insert_with(empty), started);
    }

    /// Counts a mount of a volume that a pod has wanted since `wanted`.
    pub fn mounted(&self, plugin: &str, wanted: Instant) {
        count(self.counts().overall.entry((plugin.to_owned(), "overall_volume_mount")).or_insert_with(empty), wanted);
    }

    /// Counts a call of the CSI driver by a kubelet that began at `started`.
    pub fn csi(&self, method: &'static str, status: &str, started: Instant) {
        count(self.counts().csi.entry((method, status.to_owned())).or_insert_with(empty), started);
    }

    /// Sets whether the daemon is registered as a plugin of a container runtime.
    pub fn nri_connected(&self, is_connected: bool) {
        self.counts().nri.is_connected = Some(is_connected);
    }

    /// Counts a request of the container runtime that began at `started`.
    pub fn nri(&self, method: &str, started: Instant) {
        count(self.counts().nri.requests.entry(method.to_owned()).or_insert_with(empty), started);
    }

    /// Counts a mount of a container from this source, `podfs` or `kubelet`, for this reason.
    pub fn nri_mount(&self, source: &'static str, reason: &'static str) {
        *self.counts().nri.mounts.entry((source, reason)).or_default() += 1;
    }

    /// Sets how many containers have volumes from this source.
    pub fn nri_containers(&self, source: &'static str, containers: usize) {
        self.counts().nri.containers.insert(source, containers);
    }

    /// Counts a pod of an earlier daemon that was found.
    pub fn reconstructed(&self, has_succeeded: bool) {
        let mut counts = self.counts();
        counts.reconstructions += 1;
        counts.reconstruction_errors += u64::from(!has_succeeded);
    }

    /// Adds these metrics of local volumes to all later readings.
    pub fn local_volumes(&self, metrics: LocalVolumeMetrics) {
        self.counts().local_volumes = Some(metrics);
    }

    /// The metrics of the node at this moment.
    pub fn reading(&self, state: &NodeState) -> PodReading {
        let mut reading = PodReading::of_node();
        let counts = self.counts();
        for ((operation, plugin, status), durations) in &counts.operations {
            reading.add_durations(&STORAGE_OPERATIONS, &[operation, plugin, status, "false"], durations);
        }
        for ((plugin, operation), durations) in &counts.overall {
            reading.add_durations(&OVERALL_OPERATIONS, &[plugin, operation], durations);
        }
        for ((method, status), durations) in &counts.csi {
            reading.add_durations(&CSI_OPERATIONS, &[DRIVER, method, status], durations);
        }
        let Nri { is_connected, requests, mounts, containers } = &counts.nri;
        if let Some(is_connected) = is_connected {
            reading.add(&NRI_CONNECTED, &[], f64::from(u8::from(*is_connected)));
        }
        for (method, durations) in requests {
            reading.add_durations(&NRI_REQUESTS, &[method], durations);
        }
        for ((source, reason), mounts) in mounts {
            reading.add(&NRI_MOUNTS, &[source, reason], *mounts as f64);
        }
        for (source, containers) in containers {
            reading.add(&NRI_CONTAINERS, &[source], *containers as f64);
        }
        for ((plugin, world), volumes) in volumes(state) {
            reading.add(&TOTAL_VOLUMES, &[plugin, world], f64::from(volumes));
        }
        reading.add(&RECONSTRUCTIONS, &[], counts.reconstructions as f64);
        reading.add(&RECONSTRUCTION_ERRORS, &[], counts.reconstruction_errors as f64);
        if let Some(metrics) = &counts.local_volumes {
            metrics.add_to(&mut reading);
        }
        reading
    }

    fn counts(&self) -> MutexGuard<'_, NodeCounters> {
        self.0.lock().expect("no count panics")
    }
}

/// Serves the metrics of the node and of all pods of the run directory, for as long as this process lives.
///
/// # Errors
/// When no thread can be started.
pub fn serve(listener: TcpListener, run_directory: PathBuf, node: NodeHandle, recorder: Recorder) -> io::Result<()> {
    let readings = Readings::default();
    exporter::start(listener, move || {
        let directories = survey::pods(&run_directory).unwrap_or_else(|error| {
            warn!("there are no metrics of pods: cannot read {}: {error}", run_directory.display());
            Vec::new()
        });
        let pods = readings.take(&directories, |pod, sentence| spans::of_status(pod).in_scope(|| warn!("{sentence}")));
        // The node has this metric for all pods together.
        let pods = pods.into_iter().map(|reading| reading.without(&STORAGE_OPERATIONS));
        Exposition::of(pods.chain([recorder.reading(&node.state())]).collect())
    })
}

/// How many volumes of each plugin are in each state of the world.
fn volumes(state: &NodeState) -> BTreeMap<(&str, &'static str), u32> {
    let mut count = BTreeMap::new();
    let all = state.pods.values().flat_map(|pod| &pod.volumes);
    for VolumeEntry { plugin, desired, mount, .. } in all {
        let is_actual = *mount != MountState::NotMounted;
        for (world, is_in) in [("desired_state_of_world", *desired), ("actual_state_of_world", is_actual)] {
            *count.entry((plugin.as_str(), world)).or_default() += u32::from(is_in);
        }
    }
    count
}

fn empty() -> Distribution {
    Distribution::new(&OPERATION_BOUNDS)
}

fn count(durations: &mut Distribution, began: Instant) {
    durations.add(began.elapsed());
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::manifest::pod::PodUid;
    use crate::metrics::ExpositionFormat;
    use crate::node::PodEntry;

    fn pod(uid: &str, volumes: &[(&str, bool, MountState)]) -> (PodUid, Arc<PodEntry>) {
        let volume = |(plugin, desired, mount): &(&str, bool, MountState)| VolumeEntry {
            name: "a".to_owned(),
            unique_name: format!("{plugin}/{uid}-a"),
            plugin: (*plugin).to_owned(),
            kind: "secret".to_owned(),
            desired: *desired,
            mount: *mount,
            path: None,
            read_only: true,
            selinux: None,
            group: None,
            attachable: Some(false),
            size: None,
            remount_required: false,
            reason: None,
        };
        let entry = PodEntry {
            namespace: None,
            name: None,
            uid: uid.to_owned(),
            origin: None,
            stage: None,
            released: false,
            processed: true,
            volumes: volumes.iter().map(volume).collect(),
            errors: Vec::new(),
            notes: Vec::new(),
            supervisor: None,
            containers: Vec::new(),
        };
        (PodUid::parse(uid).expect("a uid"), Arc::new(entry))
    }

    #[test]
    fn me_01_the_node_has_the_metrics_of_a_kubelets_volume_manager() {
        use MountState::{Mounted, NotMounted, Uncertain};
        let (secret, nfs) = ("kubernetes.io/secret", "kubernetes.io/nfs");
        let pods = [
            pod("one", &[(secret, true, Mounted), (secret, true, NotMounted), (nfs, false, Uncertain)]),
            pod("two", &[(secret, true, Mounted)]),
        ];
        let state = NodeState { pods: pods.into(), ..NodeState::default() };
        let recorder = Recorder::default();
        let began = Instant::now().checked_sub(Duration::from_secs(2)).expect("the machine runs for longer");
        recorder.clone().operation(secret, "volume_mount", began, true);
        recorder.operation(secret, "volume_mount", began, true);
        recorder.operation(nfs, "volume_unmount", began, false);
        recorder.mounted(secret, began);
        recorder.reconstructed(true);
        recorder.reconstructed(false);
        let text = Exposition::of(vec![recorder.reading(&state)]).text(ExpositionFormat::Prometheus);
        let lines: Vec<_> = text.lines().collect();
        for line in [
            r#"storage_operation_duration_seconds_count{operation_name="volume_mount",volume_plugin="kubernetes.io/secret",status="success",migrated="false"} 2"#,
            r#"storage_operation_duration_seconds_bucket{le="2.5",operation_name="volume_unmount",volume_plugin="kubernetes.io/nfs",status="fail-unknown",migrated="false"} 1"#,
            r#"storage_operation_duration_seconds_bucket{le="1.0",operation_name="volume_unmount",volume_plugin="kubernetes.io/nfs",status="fail-unknown",migrated="false"} 0"#,
            r#"volume_operation_total_seconds_count{plugin_name="kubernetes.io/secret",operation_name="overall_volume_mount"} 1"#,
            r#"volume_manager_total_volumes{plugin_name="kubernetes.io/secret",state="desired_state_of_world"} 3"#,
            r#"volume_manager_total_volumes{plugin_name="kubernetes.io/secret",state="actual_state_of_world"} 2"#,
            r#"volume_manager_total_volumes{plugin_name="kubernetes.io/nfs",state="desired_state_of_world"} 0"#,
            r#"volume_manager_total_volumes{plugin_name="kubernetes.io/nfs",state="actual_state_of_world"} 1"#,
            "reconstruct_volume_operations_total 2",
            "reconstruct_volume_operations_errors_total 1",
        ] {
            assert!(lines.contains(&line), "{line} is not in:\n{text}");
        }
    }
}
