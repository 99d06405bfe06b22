//! The paths of podfs's volumes, which replace the kubelet's volumes in a container, once they are mounted.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, timeout_at};
use tracing::debug;

use super::messages::nri::Container;
use super::places::PodVolumePath;
use crate::manifest::pod::PodUid;
use crate::mounts::{AgentFacts, MountSource};
use crate::node::NodeHandle;
use crate::node::state::{MountState, NodeState, VolumeEntry};
use crate::supervisor::control::{AskError, ContainerRequest, ControlAnswer, ControlQuestion, ask};

/// The pause before podfs asks a busy supervisor again.
const PAUSE: Duration = Duration::from_millis(20);

/// Why a container has a volume of the kubelet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reason {
    /// podfs does not know the pod.
    UnknownPod,
    /// podfs does not serve the volume.
    UnknownVolume,
    /// The volume was not mounted in time.
    NotReady,
    /// The part of the volume could not be prepared.
    SubPath,
    /// The mount needs the kubelet's source.
    Options,
}

impl Reason {
    /// Its value in the metric.
    pub(super) fn word(self) -> &'static str {
        match self {
            Reason::UnknownPod => "unknown_pod",
            Reason::UnknownVolume => "unknown_volume",
            Reason::NotReady => "not_ready",
            Reason::SubPath => "sub_path",
            Reason::Options => "mount_options",
        }
    }

    /// Its text in the log.
    pub(super) fn sentence(self) -> &'static str {
        match self {
            Reason::UnknownPod => "neither the API server nor a manifest file has the pod yet",
            Reason::UnknownVolume => "podfs does not serve this volume; podfs node state says more",
            Reason::NotReady => "podfs did not have it mounted in time; podfs node state says why",
            Reason::SubPath => "its subPath could not be prepared; the log of the pod's supervisor says why",
            Reason::Options => "the mount propagates or maps ids, which podfs leaves to the kubelet",
        }
    }
}

/// For each destination of a container's mounts, the source of podfs, or why podfs has no source.
pub(super) type Sources = BTreeMap<String, Result<String, Reason>>;

/// A mount of a container that podfs has to replace.
#[derive(Clone, Debug)]
pub(super) struct WantedMount {
    pub(super) destination: String,
    pub(super) place: PodVolumePath,
}

/// Finds the sources of a container's mounts. If `may_wait`, waits until `until` for volumes that are not mounted yet.
pub(super) async fn find_sources(
    node: &NodeHandle,
    run_directory: &Path,
    uid: &PodUid,
    container: &Container,
    wanted: &[WantedMount],
    until: Instant,
    may_wait: bool,
) -> Sources {
    let mut states = node.follow();
    let found = loop {
        let state = std::sync::Arc::clone(&states.borrow_and_update());
        let found: Vec<_> = wanted.iter().map(|one| (one, path_of_volume(&state, uid, &one.place.volume))).collect();
        let may_come = |found: &Result<PathBuf, Reason>| matches!(found, Err(Reason::NotReady | Reason::UnknownPod));
        if !may_wait || !found.iter().any(|(_, found)| may_come(found)) {
            break found;
        }
        match timeout_at(until, states.changed()).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) | Err(_) => break found,
        }
    };
    let has_parts = found.iter().any(|(one, found)| one.place.is_part && found.is_ok());
    let parts = match has_parts {
        true => prepare(run_directory.join(uid.as_str()), container, until).await,
        false => BTreeMap::new(),
    };
    let source = |(one, found): (&WantedMount, Result<PathBuf, Reason>)| {
        let path = match found {
            Ok(_) if one.place.is_part => parts.get(&normal(&one.destination)).cloned().ok_or(Reason::SubPath),
            found => found,
        };
        let absent = if one.place.is_part { Reason::SubPath } else { Reason::NotReady };
        let is_there = |path: PathBuf| path.to_str().filter(|_| is_mounted(&path)).map(str::to_owned).ok_or(absent);
        (one.destination.clone(), path.and_then(is_there))
    };
    found.into_iter().map(source).collect()
}

/// The path of a volume in the manager's state.
fn path_of_volume(state: &NodeState, uid: &PodUid, volume: &str) -> Result<PathBuf, Reason> {
    let pod = state.pods.get(uid).filter(|pod| pod.stage.is_some()).ok_or(Reason::UnknownPod)?;
    let is_wanted = |entry: &&VolumeEntry| entry.desired && entry.name == volume;
    let entry = pod.volumes.iter().find(is_wanted).ok_or(Reason::UnknownVolume)?;
    match (entry.mount, &entry.path) {
        (MountState::Mounted, Some(path)) => Ok(path.clone()),
        _ => Err(Reason::NotReady),
    }
}

/// Why the parts of volumes are not prepared.
#[derive(Debug, thiserror::Error)]
enum PrepareError {
    /// The supervisor refuses the request, with this reason.
    #[error("{0}")]
    Refused(String),
    #[error("the supervisor answered another question")]
    OtherAnswer,
    #[error(transparent)]
    Ask(#[from] AskError),
}

/// Makes the pod's supervisor prepare the parts of volumes (subPath) that a container mounts. Returns their paths on
/// the node, by their paths in the container.
async fn prepare(directory: PathBuf, container: &Container, until: Instant) -> BTreeMap<PathBuf, PathBuf> {
    let variable =
        |variable: &String| variable.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
    let environment =
        AgentFacts { variables: container.env.iter().filter_map(variable).collect(), ..AgentFacts::default() };
    let name = container.name.clone();
    let request =
        ContainerRequest { container: name.clone(), environment, recursive_read_only: false, only_volumes: true };
    let prepared = spawn_blocking(move || {
        let question = ControlQuestion::PrepareContainer(request);
        loop {
            match ask(&directory, &question, None) {
                Ok(ControlAnswer::Prepared(mounts)) => return Ok(mounts),
                Ok(ControlAnswer::Busy(reason)) if Instant::now() > until => return Err(PrepareError::Refused(reason)),
                Ok(ControlAnswer::Busy(_)) => std::thread::sleep(PAUSE),
                Ok(ControlAnswer::Refused(reason)) => return Err(PrepareError::Refused(reason)),
                Ok(_) => return Err(PrepareError::OtherAnswer),
                Err(error) => return Err(PrepareError::Ask(error)),
            }
        }
    });
    let mounts = match timeout_at(until, prepared).await {
        Ok(Ok(Ok(mounts))) => mounts,
        Ok(Ok(Err(error))) => {
            debug!("container {name:?}: its parts of volumes are not prepared: {error}");
            Vec::new()
        }
        Ok(Err(_)) | Err(_) => Vec::new(),
    };
    let place = |mount: crate::mounts::ContainerMount| match mount.source {
        MountSource::HostPath(path) => Some((normal(&mount.container_path), path)),
        _ => None,
    };
    mounts.into_iter().filter_map(place).collect()
}

/// A path of the container, normalized.
fn normal(path: &str) -> PathBuf {
    Path::new(path).components().collect()
}

/// Whether the path is a mount point. The kernel answers without a request to the server of the volume.
fn is_mounted(path: &Path) -> bool {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
    let looked = statx(CWD, path, flags, StatxFlags::empty());
    looked.is_ok_and(|found| found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}
