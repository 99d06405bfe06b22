//! The status of a pod and its volumes, as its supervisor and `podfs status` report it: these types are the JSON. A field that
//! does not apply is left out.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;

use podfs_fuse::region::OpenCount;
use serde::{Deserialize, Serialize};

use crate::supervisor::volume::Expansion;

/// A pod on this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodStatus {
    /// Its namespace, if a process or a file still has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Its name, likewise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Its uid.
    pub uid: String,
    /// Its state.
    pub state: PodState,
    /// Why it is not [`PodState::Running`].
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
    /// Its volumes, in the order of the manifest, if its supervisor answers; otherwise none.
    pub volumes: Vec<VolumeStatus>,
    /// The objects that its supervisor gets from an API server.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub objects: Vec<ObjectStatus>,
}

/// The state of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum PodState {
    /// Every volume is mounted and current.
    Running,
    /// podfs serves it, but something is wrong.
    Degraded,
    /// The API server has deleted the pod. podfs serves its volumes until a signal stops it.
    PodDeleted,
    /// Its supervisor has ended, and its server goes on: nothing is refreshed until the next `podfs run` of the pod.
    NoSupervisor,
    /// A process holds the claim on the pod, but does not answer.
    NotAnswering,
    /// No process serves it, but something of it is left on the node.
    Dead,
}

/// A process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProcessStatus {
    /// Its process id.
    pub pid: u32,
    /// The version of its podfs, if known.
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
    /// Its name.
    pub name: String,
    /// Its kind, as the manifest says it: `configMap`.
    pub kind: String,
    /// Where it is, or is going to be, mounted; absent until its PersistentVolume is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// Its state.
    pub state: VolumeState,
    /// Why it is not [`VolumeState::Live`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// How podfs serves it, once it does: `zero-message`, `audited`, `passthrough`, `read-write`, `bind` or `nfs`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// The NFS client of a volume of an NFS server: `user` is podfs's own, `kernel` the kernel's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend: Option<String>,
    /// How requests reach podfs: `/dev/fuse` or `io_uring`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<String>,
    /// The generation of files that it shows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub generation: Option<String>,
    /// For how many seconds it has shown that generation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub generation_age_seconds: Option<u64>,
    /// How many earlier generations it keeps, for programs that have just resolved `..data`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub old_generations: Option<usize>,
    /// The memory that they take, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub old_generation_bytes: Option<u64>,
    /// FUSE requests served so far, as far as they are known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requests: Option<u64>,
    /// What the access log of an audited volume costs, and its counters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub audit: Option<AuditStatus>,
    /// Whether containers can only read it, once it is mounted.
    #[serde(default)]
    pub read_only: bool,
    /// A supplemental group that containers need to use it (PV-04).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub supplemental_group: Option<u32>,
    /// The outcome of its last growth on the node, until its claim has that size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expansion: Option<ExpansionStatus>,
    /// How many servers have been replaced since it was mounted.
    pub restarts: u64,
    /// The last error, even if the volume has recovered since.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
}

/// The growth of a volume on the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExpansionStatus {
    /// The bytes that its PersistentVolume has.
    pub bytes: u64,
    /// Why the volume does not have them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Whether the volume cannot have that size at all.
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
    /// FUSE messages that an open waits for.
    pub messages_per_open: u32,
    /// FUSE messages at its close, for which no process waits.
    pub messages_per_close: u32,
    /// Opens since it was mounted.
    pub opens: u64,
    /// Opens whose lines could not be written.
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
    /// Its kind, namespace and name: `ConfigMap default/app`.
    pub object: String,
    /// The server's version up to which podfs knows all changes of it, if it knows any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_version: Option<String>,
    /// What podfs does about it: `listing`, `connecting`, `watching`, `polling`, `waiting` after something failed, or
    /// `settled` when it cannot change any more.
    pub watch: String,
    /// How many seconds ago the server last sent something about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub contact_age_seconds: Option<u64>,
    /// The problem at this moment.
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
    /// Mounted; its source does not answer.
    Silent,
    /// Served, but its path does not show it: another process has unmounted it or mounted something over it.
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

    /// `default/web`, or the uid when the name is unknown.
    pub fn title(&self) -> String {
        match (&self.namespace, &self.name) {
            (Some(namespace), Some(name)) => format!("{namespace}/{name}"),
            _ => self.uid.clone(),
        }
    }

    /// A hash of the status without ages, counts of requests and the memory of old generations.
    pub(in crate::supervisor) fn digest(&self) -> u64 {
        let mut plain = self.clone();
        for volume in &mut plain.volumes {
            volume.generation_age_seconds = None;
            volume.requests = None;
            volume.audit = None;
            volume.old_generations = None;
            volume.old_generation_bytes = None;
        }
        plain.objects.iter_mut().for_each(|object| object.contact_age_seconds = None);
        let mut hasher = DefaultHasher::new();
        serde_json::to_vec(&plain).unwrap_or_default().hash(&mut hasher);
        hasher.finish()
    }

    /// Whether the status may change without the supervisor's task: with time, or through an API server.
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

    /// The state of a pod that podfs serves, and the reason: the problems of its volumes, and `trouble`, which concerns
    /// all of them.
    pub fn of(volumes: &[VolumeStatus], trouble: Option<&str>) -> (PodState, Option<String>) {
        let each = volumes.iter().filter_map(|volume| {
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
        let reasons: Vec<_> = trouble.map(str::to_owned).into_iter().chain(each).collect();
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
