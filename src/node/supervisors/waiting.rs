//! The operations of a pod that wait for its supervisor, and their results.

use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::{FailureKind, MountFailure, OperationError};
use crate::supervisor::status::{PodStatus, VolumeState};

/// The waiting operations.
#[derive(Default)]
pub(super) struct WaitingOperations {
    mounts: Vec<WaitingMount>,
    unmounts: Vec<Unmounting>,
    ends: Vec<oneshot::Sender<Result<(), OperationError>>>,
}

/// A mount that waits for its volume, or for the supervisor alone.
struct WaitingMount {
    volume: Option<String>,
    limit: Duration,
    deadline: Instant,
    answer: oneshot::Sender<Result<(), MountFailure>>,
}

/// An unmount that waits until its volume is unmounted.
struct Unmounting {
    volume: String,
    answer: oneshot::Sender<Result<(), OperationError>>,
}

impl WaitingOperations {
    pub(super) fn is_empty(&self) -> bool {
        self.mounts.is_empty() && !self.for_removal()
    }

    /// Whether an operation waits until a volume, or everything, is removed.
    pub(super) fn for_removal(&self) -> bool {
        !self.unmounts.is_empty() || self.for_end()
    }

    /// Whether an operation waits until everything of the pod is removed.
    pub(super) fn for_end(&self) -> bool {
        !self.ends.is_empty()
    }

    /// When the time limit of a mount is over next.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.mounts.iter().map(|mount| mount.deadline).min()
    }

    /// Adds a mount. Without a volume, it waits for the supervisor alone.
    pub(super) fn add_mount(
        &mut self,
        volume: Option<String>,
        limit: Duration,
        answer: oneshot::Sender<Result<(), MountFailure>>,
    ) {
        self.mounts.push(WaitingMount { volume, limit, deadline: Instant::now() + limit, answer });
    }

    /// Restarts the time limits of mounts: the supervisor has just been started.
    pub(super) fn begin(&mut self) {
        let now = Instant::now();
        self.mounts.iter_mut().for_each(|mount| mount.deadline = now + mount.limit);
    }

    /// Adds an unmount. Fails mounts of the same volume.
    pub(super) fn add_unmount(&mut self, volume: String, answer: oneshot::Sender<Result<(), OperationError>>) {
        for mount in self.mounts.extract_if(.., |mount| mount.volume.as_ref() == Some(&volume)) {
            let _ = mount.answer.send(Err(MountFailure::transient("the volume is being unmounted")));
        }
        self.unmounts.push(Unmounting { volume, answer });
    }

    /// Adds a removal of the pod. Fails all mounts.
    pub(super) fn add_end(&mut self, answer: oneshot::Sender<Result<(), OperationError>>) {
        self.fail_mounts(FailureKind::Transient, "podfs is unmounting the volumes of the pod");
        self.ends.push(answer);
    }

    /// Answers the mounts of volumes that the supervisor has and that are mounted, and those that wait for the
    /// supervisor alone.
    pub(super) fn mounted(&mut self, status: &PodStatus, is_published: impl Fn(&str) -> bool) {
        let is_there = |name: &str| {
            let is_mounted = |state| matches!(state, VolumeState::Live | VolumeState::Silent);
            status.volumes.iter().any(|volume| volume.name == name && is_mounted(volume.state))
        };
        let is_done = |volume: &str| is_published(volume) && is_there(volume);
        for mount in self.mounts.extract_if(.., |mount| mount.volume.as_deref().is_none_or(is_done)) {
            let _ = mount.answer.send(Ok(()));
        }
    }

    /// Answers the mounts that wait for the supervisor alone.
    pub(super) fn up(&mut self) {
        for mount in self.mounts.extract_if(.., |mount| mount.volume.is_none()) {
            let _ = mount.answer.send(Ok(()));
        }
    }

    /// Answers the mounts whose time limit is over, with the reason why their volumes wait.
    pub(super) fn expire(&mut self, status: Option<&PodStatus>) {
        let now = Instant::now();
        for mount in self.mounts.extract_if(.., |mount| mount.deadline <= now) {
            let of_volume = status
                .and_then(|status| status.volumes.iter().find(|volume| Some(&volume.name) == mount.volume.as_ref()));
            let reason = of_volume.and_then(|volume| volume.reason.clone());
            let reason = reason.or_else(|| status.and_then(|status| status.reason.clone()));
            let reason = reason.unwrap_or_else(|| {
                let problem = if status.is_some() { "has not mounted the volume yet" } else { "does not answer yet" };
                format!("the supervisor of the pod {problem}")
            });
            let _ = mount.answer.send(Err(MountFailure { reason, kind: FailureKind::Uncertain }));
        }
    }

    /// The volumes that mounts wait for.
    pub(super) fn mounting(&self) -> impl Iterator<Item = &String> {
        self.mounts.iter().filter_map(|mount| mount.volume.as_ref())
    }

    /// Whether a mount waits for the supervisor alone.
    pub(super) fn for_supervisor(&self) -> bool {
        self.mounts.iter().any(|mount| mount.volume.is_none())
    }

    /// Fails all mounts.
    pub(super) fn fail_mounts(&mut self, kind: FailureKind, reason: &str) {
        for mount in self.mounts.drain(..) {
            let _ = mount.answer.send(Err(MountFailure { reason: reason.to_owned(), kind }));
        }
    }

    /// Answers the unmounts of these volumes.
    pub(super) fn unmounted(&mut self, is_unmounted: impl Fn(&str) -> bool, outcome: &Result<(), OperationError>) {
        for unmount in self.unmounts.extract_if(.., |unmount| is_unmounted(&unmount.volume)) {
            let _ = unmount.answer.send(outcome.clone());
        }
    }

    /// Answers all removals, after everything of the pod is removed or something stays.
    pub(super) fn removed(&mut self, outcome: &Result<(), OperationError>) {
        self.unmounted(|_| true, outcome);
        for answer in self.ends.drain(..) {
            let _ = answer.send(outcome.clone());
        }
    }
}
