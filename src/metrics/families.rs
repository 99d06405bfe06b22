//! All metrics by name: the only place where a metric is named.
//!
//! Names and labels are those of the kubelet where the meaning is the same. Every metric of a pod has the labels of the pod
//! ([`POD_LABELS`]) before its other labels; metrics of `podfs node` itself have no labels of a pod. The values of labels are
//! bounded: names of the pod's volumes and claims, audiences of its tokens, and words of this program. Reasons and generations are
//! no labels: each new one would be a new series.

/// The labels that every metric of a pod has: the pod it is about.
pub const POD_LABELS: [&str; 3] = ["namespace", "pod", "uid"];

/// A metric, with all its series.
#[derive(Debug, PartialEq, Eq)]
pub struct Family {
    /// Its name as in queries; for a counter, with `_total`.
    pub name: &'static str,
    /// The type of its samples.
    pub kind: FamilyType,
    /// Its labels, which follow those of the pod.
    pub labels: &'static [&'static str],
    /// Its meaning: one sentence, without a full stop.
    pub help: &'static str,
}

/// The type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FamilyType {
    /// A number that rises and falls.
    Gauge,
    /// A number that rises, and restarts at 0. The name ends in `_total`.
    Counter,
    /// Counts of observations, by size. Each count is like a counter.
    Histogram,
}

impl FamilyType {
    /// The word of the text formats.
    pub fn word(self) -> &'static str {
        match self {
            FamilyType::Gauge => "gauge",
            FamilyType::Counter => "counter",
            FamilyType::Histogram => "histogram",
        }
    }
}

impl Family {
    /// The metric of this name.
    pub fn find(name: &str) -> Option<&'static Family> {
        FAMILIES.iter().copied().find(|family| family.name == name)
    }
}

macro_rules! families {
    ($($constant:ident: $kind:ident $name:literal [$($label:literal)*] $help:literal;)*) => {
        $(
            #[doc = concat!("`", $name, "`: ", $help, ".")]
            pub const $constant: Family =
                Family { name: $name, kind: FamilyType::$kind, labels: &[$($label),*], help: $help };
        )*

        /// All metrics, in the order of the text.
        pub const FAMILIES: &[&Family] = &[$(&$constant),*];
    };
}

families! {
    UP: Gauge "podfs_up" []
        "Whether the supervisor of the pod answers; if not, the pod has only this metric and podfs_pod_state";
    POD_STATE: Gauge "podfs_pod_state" ["state"]
        "1 for the state that the pod is in, in the words of podfs status --output json, and 0 for the others";
    BUILD_INFO: Gauge "podfs_build_info" ["process" "version"]
        "Always 1; the version of podfs that each process of the pod is";
    START_TIME: Gauge "podfs_supervisor_start_time_seconds" []
        "When the supervisor began to serve the pod, in seconds since 1970";
    RESIDENT_MEMORY: Gauge "podfs_resident_memory_bytes" ["process"]
        "Memory that a process of the pod has at this moment, shared memory included";
    SERVER_UP: Gauge "podfs_server_up" []
        "Whether the pod has a server process";
    SERVER_RESTARTS: Counter "podfs_server_restarts_total" []
        "How often podfs replaced a server that had ended";
    VOLUMES: Gauge "podfs_volumes" ["state"]
        "How many volumes of the pod are in each state, in the words of podfs status --output json";
    VOLUME_CURRENT: Gauge "podfs_volume_current" ["volume"]
        "Whether the volume is mounted and shows the current content";
    REFRESH_ERRORS: Counter "podfs_volume_refresh_errors_total" ["volume"]
        "How often podfs could not mount or refresh the volume";
    LAST_REFRESH_ERROR: Gauge "podfs_volume_last_refresh_error_timestamp_seconds" ["volume"]
        "When podfs last could not mount or refresh the volume, in seconds since 1970; podfs status has the reason";
    SOURCE_ANSWERING: Gauge "podfs_volume_source_answering" ["volume"]
        "Whether the source of the volume on the host answers";
    SOURCE_ERRORS: Counter "podfs_volume_source_errors_total" ["volume" "errno"]
        "Calls on the volume that failed because of its source, by errno; what the kernel reads and writes by itself does not count";
    DISK_ERRORS: Gauge "podfs_volume_disk_errors" ["volume" "counter"]
        "Errors that the kernel has counted on the disk of the volume's source: ext4, btrfs, or the device; zero has no series";
    GENERATION: Gauge "podfs_generation" ["volume"]
        "How many generations of files the volume has shown since it was mounted";
    GENERATION_TIME: Gauge "podfs_generation_timestamp_seconds" ["volume"]
        "When podfs made the current generation of the volume, in seconds since 1970";
    OLD_GENERATIONS: Gauge "podfs_old_generations" ["volume"]
        "How many earlier generations the volume keeps, for programs that just resolved ..data";
    OLD_GENERATION_BYTES: Gauge "podfs_old_generation_bytes" ["volume"]
        "Memory of the earlier generations, in bytes";
    COMMIT_DURATION: Histogram "podfs_commit_duration_seconds" ["volume"]
        "Time from the assembled files of a new generation to the switch to it";
    PROPAGATION: Histogram "podfs_propagation_seconds" ["volume"]
        "Time from when podfs received a change until it was visible";
    FUSE_REQUESTS: Counter "podfs_fuse_requests_total" ["volume" "op"]
        "Requests of the kernel, by operation; an operation has a series from its first request on";
    CAPACITY_BYTES: Gauge "podfs_volume_stats_capacity_bytes" ["volume" "persistentvolumeclaim"]
        "Bytes that the volume of a claim or an emptyDir can hold, as df prints them in the container";
    AVAILABLE_BYTES: Gauge "podfs_volume_stats_available_bytes" ["volume" "persistentvolumeclaim"]
        "Available bytes of the volume";
    USED_BYTES: Gauge "podfs_volume_stats_used_bytes" ["volume" "persistentvolumeclaim"]
        "Used bytes of the volume";
    INODES: Gauge "podfs_volume_stats_inodes" ["volume" "persistentvolumeclaim"]
        "Files that the volume's file system can hold, if that is limited";
    INODES_FREE: Gauge "podfs_volume_stats_inodes_free" ["volume" "persistentvolumeclaim"]
        "Files that can still be made in the file system";
    INODES_USED: Gauge "podfs_volume_stats_inodes_used" ["volume" "persistentvolumeclaim"]
        "Files in the file system";
    ABNORMAL: Gauge "podfs_volume_stats_health_status_abnormal" ["volume" "persistentvolumeclaim"]
        "Whether the CSI driver reports the volume as abnormal, if it checks that; podfs logs the driver's message";
    TOKEN_EXPIRATION: Gauge "podfs_token_expiration_timestamp_seconds" ["audience" "expiration_seconds"]
        "When the token that volumes show expires, in seconds since 1970";
    SOURCE_CONNECTED: Gauge "podfs_source_connected" []
        "Whether the API server answers; an error counts as an answer";
    SOURCE_OBJECTS: Gauge "podfs_source_objects" []
        "Objects that podfs reads from the API server";
    SOURCE_OBJECTS_IN_TROUBLE: Gauge "podfs_source_objects_in_trouble" []
        "Objects of the API server that podfs cannot read or watch";
    STORAGE_OPERATIONS: Histogram "storage_operation_duration_seconds"
        ["operation_name" "volume_plugin" "status" "migrated"]
        "Duration of operations; the metric of the kubelet, for volume_mount and volume_unmount";
    OVERALL_OPERATIONS: Histogram "volume_operation_total_seconds" ["plugin_name" "operation_name"]
        "Time from when a pod wanted a volume until it was mounted; a metric of podfs node, as of the kubelet";
    TOTAL_VOLUMES: Gauge "volume_manager_total_volumes" ["plugin_name" "state"]
        "Volumes in the desired and in the actual state of the world; a metric of podfs node, as of the kubelet";
    CSI_OPERATIONS: Histogram "csi_operations_seconds" ["driver_name" "method_name" "grpc_status_code"]
        "Duration of the kubelet's calls of podfs node as a CSI driver";
    NRI_CONNECTED: Gauge "podfs_nri_connected" []
        "Whether the container runtime knows podfs node as its plugin";
    NRI_REQUESTS: Histogram "podfs_nri_request_duration_seconds" ["method"]
        "How long podfs node took to answer a request of the container runtime";
    NRI_MOUNTS: Counter "podfs_nri_mounts_total" ["source" "reason"]
        "Mounts of volumes in new containers of chosen pods: from podfs, or from the kubelet for a reason";
    NRI_CONTAINERS: Gauge "podfs_nri_containers" ["source"]
        "Containers of the runtime with volumes from podfs, and containers of chosen pods with volumes from the kubelet";
    RECONSTRUCTIONS: Counter "reconstruct_volume_operations_total" []
        "Volumes of an earlier daemon that podfs node has found; also a metric of the kubelet";
    RECONSTRUCTION_ERRORS: Counter "reconstruct_volume_operations_errors_total" []
        "Volumes of an earlier daemon that podfs node could not identify; also a metric of the kubelet";
    LOCAL_VOLUMES: Gauge "podfs_local_volumes" ["state"]
        "Local volumes that podfs node has offered, by state, entries that it cannot offer, and steps that fail";
    LOCAL_VOLUME_SIZE: Gauge "podfs_local_volume_to_erase_bytes" ["persistentvolume"]
        "Size of a device that is being erased";
    LOCAL_VOLUME_ERASED: Gauge "podfs_local_volume_erased_bytes" ["persistentvolume"]
        "Bytes of that device that are erased";
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// The table of docs/reference/metrics.md.
    fn table() -> String {
        let row = |family: &&Family| {
            let labels: Vec<_> = family.labels.iter().map(|label| format!("`{label}`")).collect();
            format!("| `{}` | {} | {} | {} |\n", family.name, family.kind.word(), labels.join(", "), family.help)
        };
        FAMILIES.iter().map(row).collect()
    }

    #[test]
    fn the_documentation_has_every_metric_and_no_other() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/reference/metrics.md");
        let page = std::fs::read_to_string(page).expect("the page");
        let table = table();
        assert!(page.contains(&table), "this is not in docs/reference/metrics.md:\n{table}");
    }

    #[test]
    fn names_follow_the_conventions_of_prometheus() {
        let names: BTreeSet<_> = FAMILIES.iter().map(|family| family.name).collect();
        assert_eq!(names.len(), FAMILIES.len(), "a name is given twice");
        for Family { name, kind, help, labels } in FAMILIES {
            assert_eq!(*kind == FamilyType::Counter, name.ends_with("_total"), "{name}");
            let kubelets = ["csi_operations_", "storage_", "volume_", "reconstruct_"];
            assert!(name.starts_with("podfs_") || kubelets.iter().any(|begin| name.starts_with(begin)), "{name}");
            assert!(!help.contains(['\\', '\n', '|']) && !help.ends_with('.'), "{help}");
            assert!(!labels.iter().any(|label| POD_LABELS.contains(label) || *label == "le"), "{labels:?}");
        }
    }
}
