//! The status of a pod and its volumes, as its supervisor and `podfs status` report it: these types are the JSON. A field that
//! does not apply is left out.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;

use podfs_fuse::region::OpenCount;
use serde::{Deserialize, Serialize};

use crate::host::fs_group::OwnershipNotice;
use crate::supervisor::volume::Expansion;

/// A pod on this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodStatus {
    /// The pod's namespace, if the supervisor or the pod's lock file still has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// The pod's name, if the supervisor or the pod's lock file still has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The pod's uid.
    pub uid: String,
    /// The pod's state.
    pub state: PodState,
    /// Why the state is not [`PodState::Running`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Since when the API server cannot be reached, or no longer has the pod (RFC 3339), if that is the reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_since: Option<String>,
    /// The process that owns the volumes, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub supervisor: Option<ProcessStatus>,
    /// The process that answers FUSE requests, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server: Option<ServerStatus>,
    /// The pod's volumes, in the order of the manifest; none if the supervisor does not answer.
    pub volumes: Vec<VolumeStatus>,
    /// The objects that the supervisor gets from an API server.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub objects: Vec<ObjectStatus>,
}

/// The state of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum PodState {
    /// Every volume is mounted and current.
    Running,
    /// podfs serves the pod, but there is a problem.
    Degraded,
    /// The API server has deleted the pod. podfs serves its volumes until a signal stops it.
    PodDeleted,
    /// The supervisor has ended, and the server goes on: no volume is refreshed until the next `podfs run` of the pod.
    NoSupervisor,
    /// A process holds the claim on the pod, but does not answer.
    NotAnswering,
    /// No process serves the pod, but files or mounts of the pod are left on the node.
    Dead,
}

/// A process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProcessStatus {
    /// The process id.
    pub pid: u32,
    /// The version of podfs that the process runs, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
}

/// The server of a pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServerStatus {
    /// The process.
    #[serde(flatten)]
    pub process: ProcessStatus,
    /// How many servers have replaced another one.
    pub restarts: u64,
}

/// A volume of the pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeStatus {
    /// The volume's name.
    pub name: String,
    /// The volume's kind, in the word of the manifest, such as `configMap`.
    pub kind: String,
    /// The path at which the volume is, or will be, mounted; absent until its PersistentVolume is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// The volume's state.
    pub state: VolumeState,
    /// Why the state is not [`VolumeState::Live`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// How podfs provides the volume: `zero-message`, `audited`, `passthrough`, `read-write`, `bind`, `device` or `nfs`; absent
    /// while the volume waits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// Why the volume has this mode, if the mode depends on its source: a bind mount.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode_reason: Option<String>,
    /// The NFS client of a volume of an NFS server: `user` is podfs's own, `kernel` the kernel's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend: Option<String>,
    /// How FUSE requests reach podfs: `/dev/fuse` or `io_uring`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<String>,
    /// The generation of files that the volume shows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub generation: Option<String>,
    /// How many seconds ago the volume began to show that generation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub generation_age_seconds: Option<u64>,
    /// How many earlier generations the volume keeps, for programs that have just resolved `..data`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub old_generations: Option<usize>,
    /// The memory of the earlier generations, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub old_generation_bytes: Option<u64>,
    /// The number of FUSE requests that servers have answered for the volume.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requests: Option<u64>,
    /// The costs and the counters of the access log of an audited volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub audit: Option<AuditStatus>,
    /// Whether containers can only read the volume; false until it is mounted.
    #[serde(default)]
    pub read_only: bool,
    /// A supplemental group that containers need to use the volume (PV-04).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub supplemental_group: Option<u32>,
    /// The outcome of the volume's last growth on the node, until the status of its claim reports that size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expansion: Option<ExpansionStatus>,
    /// A report about the group of the volume's files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ownership: Option<OwnershipNotice>,
    /// The calls that failed because of the volume's source, by errno.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub source_errors: BTreeMap<String, u64>,
    /// The errors that the kernel has counted on the disk of the source, by counter.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub disk_errors: BTreeMap<String, u64>,
    /// How many servers have been replaced since a server began to serve the volume.
    pub restarts: u64,
    /// The last error, even if the volume has recovered since.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
}

/// The growth of a volume on the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExpansionStatus {
    /// The size of the PersistentVolume, in bytes.
    pub bytes: u64,
    /// Why the volume does not have that size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Whether the volume can never have that size.
    #[serde(default)]
    pub infeasible: bool,
}

impl ExpansionStatus {
    /// The status of a growth with this outcome.
    pub(in crate::supervisor) fn of(Expansion { bytes, failure }: Expansion) -> Self {
        let infeasible = failure.as_ref().is_some_and(|failure| failure.is_infeasible);
        Self { bytes, error: failure.map(|failure| failure.sentence), infeasible }
    }
}

/// The access log of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AuditStatus {
    /// The number of FUSE messages for which an open waits.
    pub messages_per_open: u32,
    /// The number of FUSE messages at a close, for which no process waits.
    pub messages_per_close: u32,
    /// The number of opens since the volume was mounted.
    pub opens: u64,
    /// The number of opens whose lines the server could not write.
    pub lost: u64,
}

impl AuditStatus {
    /// The status of a volume with these counts.
    pub(in crate::supervisor) fn of(count: OpenCount) -> Self {
        Self { messages_per_open: 1, messages_per_close: 1, opens: count.opens, lost: count.lost }
    }
}

/// An object of an API server that the pod needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ObjectStatus {
    /// The object's kind, namespace and name, such as `ConfigMap default/app`.
    pub object: String,
    /// The `resourceVersion` of the API server up to which podfs knows all changes of the object, if it knows any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_version: Option<String>,
    /// How podfs follows the object: `listing`, `connecting`, `watching`, `polling`, `waiting` after an error, or `settled` when
    /// the object cannot change any more.
    pub watch: String,
    /// How many seconds ago the API server last sent data about the object.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub contact_age_seconds: Option<u64>,
    /// The problem with the object or the API server at this moment.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
}

/// The state of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum VolumeState {
    /// Not mounted yet.
    Waiting,
    /// Mounted, and current.
    Live,
    /// Mounted; the last refresh failed.
    Behind,
    /// Mounted; the source of the volume does not answer.
    Silent,
    /// Served, but not visible at its path: another process has unmounted the volume, or mounted a file system over it.
    Hidden,
}

impl PodStatus {
    /// The status of a pod whose supervisor does not answer.
    pub fn without_answer(uid: &str, state: PodState, reason: impl Into<String>) -> PodStatus {
        PodStatus {
            namespace: None,
            name: None,
            uid: uid.to_owned(),
            state,
            reason: Some(reason.into()),
            state_since: None,
            supervisor: None,
            server: None,
            volumes: Vec::new(),
            objects: Vec::new(),
        }
    }

    /// Namespace and name, such as `default/web`; the uid if they are unknown.
    pub fn title(&self) -> String {
        match (&self.namespace, &self.name) {
            (Some(namespace), Some(name)) => format!("{namespace}/{name}"),
            _ => self.uid.clone(),
        }
    }

    /// A hash of the status without ages, counts of requests, opens and errors, and old generations.
    pub(in crate::supervisor) fn digest(&self) -> u64 {
        let mut plain = self.clone();
        for volume in &mut plain.volumes {
            volume.generation_age_seconds = None;
            volume.requests = None;
            volume.audit = None;
            volume.source_errors.clear();
            volume.old_generations = None;
            volume.old_generation_bytes = None;
        }
        plain.objects.iter_mut().for_each(|object| object.contact_age_seconds = None);
        let mut hasher = DefaultHasher::new();
        serde_json::to_vec(&plain).unwrap_or_default().hash(&mut hasher);
        hasher.finish()
    }

    /// Whether the status may change without a notice from the supervisor's task: with time, or through an API server.
    pub(in crate::supervisor) fn may_recover_alone(&self) -> bool {
        self.state != PodState::Running || !self.objects.is_empty()
    }
}

impl VolumeState {
    /// All states.
    pub const ALL: [VolumeState; 5] =
        [VolumeState::Waiting, VolumeState::Live, VolumeState::Behind, VolumeState::Silent, VolumeState::Hidden];
}

impl PodState {
    /// All states.
    pub const ALL: [PodState; 6] = [
        PodState::Running,
        PodState::Degraded,
        PodState::PodDeleted,
        PodState::NoSupervisor,
        PodState::NotAnswering,
        PodState::Dead,
    ];

    /// The state in a word for people.
    pub fn word(self) -> &'static str {
        match self {
            PodState::Running => "running",
            PodState::Degraded => "degraded",
            PodState::PodDeleted => "pod deleted",
            PodState::NoSupervisor => "no supervisor",
            PodState::NotAnswering => "not answering",
            PodState::Dead => "dead",
        }
    }

    /// The state of a pod that podfs serves, and the reason: the problems of its volumes, and `trouble`, a problem of all of
    /// them.
    pub fn of(volumes: &[VolumeStatus], trouble: Option<&str>) -> (PodState, Option<String>) {
        let of_volumes = volumes.iter().filter_map(|volume| {
            let reason = volume.reason.as_deref().unwrap_or("for an unknown reason");
            match volume.state {
                VolumeState::Live => None,
                VolumeState::Waiting => Some(format!("volume {:?} waits: {reason}", volume.name)),
                VolumeState::Behind => Some(format!("volume {:?} is not refreshed: {reason}", volume.name)),
                VolumeState::Hidden => Some(format!("volume {:?} is not at its path: {reason}", volume.name)),
                VolumeState::Silent => {
                    let source = if volume.backend.is_some() { "its NFS server" } else { "the host" };
                    Some(format!("volume {:?} waits for {source}: {reason}", volume.name))
                }
            }
        });
        let reasons: Vec<_> = trouble.map(str::to_owned).into_iter().chain(of_volumes).collect();
        if reasons.is_empty() { (PodState::Running, None) } else { (PodState::Degraded, Some(reasons.join("; "))) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(state: VolumeState, reason: Option<&str>) -> VolumeStatus {
        VolumeStatus {
            name: "config".to_owned(),
            kind: "configMap".to_owned(),
            path: None,
            state,
            reason: reason.map(str::to_owned),
            mode: None,
            mode_reason: None,
            backend: None,
            transport: None,
            generation: None,
            generation_age_seconds: None,
            old_generations: None,
            old_generation_bytes: None,
            requests: None,
            audit: None,
            read_only: false,
            supplemental_group: None,
            expansion: None,
            ownership: None,
            source_errors: BTreeMap::new(),
            disk_errors: BTreeMap::new(),
            restarts: 0,
            last_error: None,
        }
    }

    #[test]
    fn a_pod_has_the_state_of_its_worst_volume() {
        let live = volume(VolumeState::Live, None);
        assert_eq!(PodState::of(&[], None), (PodState::Running, None));
        assert_eq!(PodState::of(std::slice::from_ref(&live), None), (PodState::Running, None));
        let (state, reason) =
            PodState::of(&[live, volume(VolumeState::Waiting, Some("no source"))], Some("it crashes"));
        assert_eq!(state, PodState::Degraded);
        assert_eq!(reason.as_deref(), Some(r#"it crashes; volume "config" waits: no source"#));
    }
}
