//! Work on volumes, on blocking threads: at most one for each volume, which owns the volume meanwhile.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{self, Duration};

use podfs_fuse::mount::MountError;
use tokio::task::JoinError;
use tokio::time::Instant;

use super::{Supervisor, SupervisorError};
use crate::supervisor::volume::sub_path::PartError;
use crate::supervisor::volume::{PodVolume, RefreshOutcome, VolumeLife};
use crate::volume::VolumeSource;

/// When the supervisor refreshes a volume.
#[derive(Default)]
pub(super) struct RefreshTime {
    /// The version of the pod's view with which the volume was last refreshed.
    refreshed: u64,
    /// When podfs saw the oldest change since then.
    pub(super) noticed_at: Option<time::Instant>,
    pub(super) retry_at: Option<Instant>,
    /// Whether a client has asked for a refresh while a thread had the volume. The refresh begins when that thread has ended.
    is_requested: bool,
}

impl RefreshTime {
    /// Whether the volume lacks a change up to this version, or has to be retried.
    fn is_due(&self, version: u64, now: Instant) -> bool {
        self.refreshed < version || self.retry_at.is_some_and(|at| at <= now)
    }
}

/// Work that a blocking thread has done.
pub(in crate::supervisor) struct FinishedWork {
    pub(super) place: usize,
    pub(super) volume: PodVolume,
    pub(super) outcome: WorkOutcome,
}

pub(super) enum WorkOutcome {
    /// The volume was refreshed.
    Refreshed {
        attempt: RefreshOutcome,
        /// How long the refresh took, if the volume was not mounted before.
        mounting: Option<Duration>,
    },
    /// The thread has removed old generations.
    Cleared,
    /// The thread has done the volume's part of an operation.
    ContainerOperation(ContainerOperationPartOutcome),
}

/// The outcome of a volume's part of an operation.
pub(super) struct ContainerOperationPartOutcome {
    /// The number of the operation.
    pub(super) number: u64,
    /// The mount point of each subPath that was mounted, with the index of the container's mount.
    pub(super) outcome: Result<Vec<(usize, PathBuf)>, PartError>,
}

impl Supervisor {
    /// Sends every idle volume that is behind, or due for a retry, to a blocking thread.
    pub(in crate::supervisor) fn start_work(&mut self) {
        let now = Instant::now();
        let due: Vec<_> = self
            .idle
            .keys()
            .copied()
            .filter(|place| self.refresh_times.get(place).is_none_or(|time| time.is_due(self.version, now)))
            .collect();
        for place in due {
            let Some(mut volume) = self.idle.remove(&place) else { continue };
            if let Some(VolumeSource::EmptyDir(source)) = self.volumes.get(&place).map(|spec| &spec.source) {
                volume.describe(*source);
            }
            let time = self.refresh_times.entry(place).or_default();
            time.refreshed = self.version;
            time.retry_at = None;
            let (view, noticed_at) = (Arc::clone(&self.view), time.noticed_at.take());
            self.working.spawn_blocking(move || {
                let (began, waits) = (Instant::now(), matches!(volume.state(), VolumeLife::Waiting(_)));
                let attempt = volume.refresh(&view, noticed_at);
                let outcome = WorkOutcome::Refreshed { attempt, mounting: waits.then(|| began.elapsed()) };
                FinishedWork { place, volume, outcome }
            });
        }
        self.start_clearing(now);
    }

    /// Sends every idle volume with an old generation whose time is over to a blocking thread.
    fn start_clearing(&mut self, now: Instant) {
        let is_due = |volume: &PodVolume| volume.next_removal().is_some_and(|at| at <= now.into_std());
        let due: Vec<_> = self.idle.iter().filter(|(_, volume)| is_due(volume)).map(|(place, _)| *place).collect();
        for place in due {
            let Some(mut volume) = self.idle.remove(&place) else { continue };
            self.working.spawn_blocking(move || {
                volume.remove_old_generations();
                FinishedWork { place, volume, outcome: WorkOutcome::Cleared }
            });
        }
    }

    /// When the next retry, the next removal of an old generation, or the end of an operation's wait for a busy volume is due.
    pub(in crate::supervisor) fn next_work(&self) -> Option<Instant> {
        // The end of work on a volume looks at its retry, too.
        let is_idle = |place: &usize| self.idle.contains_key(place);
        let retries =
            self.refresh_times.iter().filter(|(place, _)| is_idle(place)).filter_map(|(_, time)| time.retry_at);
        let removals = self.idle.values().filter_map(PodVolume::next_removal).map(Instant::from_std);
        retries.chain(removals).chain(self.containers.next_to_go_on()).min()
    }

    /// Takes a volume back from its thread.
    pub(in crate::supervisor) fn finish_work(
        &mut self,
        finished: Result<FinishedWork, JoinError>,
    ) -> Result<(), SupervisorError> {
        let finished = finished.expect("a blocking thread that panics ends the process");
        let FinishedWork { place, mut volume, outcome } = finished;
        match outcome {
            WorkOutcome::Refreshed { attempt, mounting } => {
                if let Err(cause) = self.record_refresh(place, &volume, attempt, mounting) {
                    let name = volume.spec().name.to_string();
                    self.idle.insert(place, volume);
                    return Err(SupervisorError::Mount { volume: name, cause });
                }
            }
            WorkOutcome::Cleared => {}
            WorkOutcome::ContainerOperation(part) => self.containers.take(part),
        }
        if self.is_unmounting(place) {
            self.start_unmount(place, volume);
            return Ok(());
        }
        if std::mem::take(&mut self.refresh_times.entry(place).or_default().is_requested) {
            volume.hurry();
            self.retry_at(place, Duration::ZERO);
        }
        self.report_volume(place, &volume);
        self.idle.insert(place, volume);
        self.look_again();
        Ok(())
    }

    /// Records the outcome of a refresh.
    ///
    /// # Errors
    /// When the volume can never be mounted.
    fn record_refresh(
        &mut self,
        place: usize,
        volume: &PodVolume,
        attempt: RefreshOutcome,
        mounting: Option<Duration>,
    ) -> Result<(), MountError> {
        let succeeded = volume.state().reason().is_none();
        if let Some(took) = mounting.filter(|_| !volume.is_settling()) {
            self.report.operated("volume_mount", &volume.plugin(), succeeded, took);
        }
        if volume.problem().is_some() {
            let volumes = self.sharing.places(place).filter_map(|place| self.volumes.get(&place));
            volumes.for_each(|volume| self.report.failed(volume));
        }
        match attempt {
            RefreshOutcome::Settled => {}
            RefreshOutcome::RetryIn(delay) => self.retry_at(place, delay),
            RefreshOutcome::Permanent(cause) => return Err(cause),
        }
        Ok(())
    }

    /// Refreshes the volume now, or when the thread that has it has ended. The pauses between tries begin short again.
    pub(super) fn refresh_now(&mut self, place: usize) {
        match self.idle.get_mut(&place) {
            Some(volume) => {
                volume.hurry();
                self.retry_at(place, Duration::ZERO);
            }
            None => self.refresh_times.entry(place).or_default().is_requested = true,
        }
    }

    /// Schedules a retry of the volume.
    pub(super) fn retry_at(&mut self, place: usize, delay: Duration) {
        self.refresh_times.entry(place).or_default().retry_at = Some(Instant::now() + delay);
    }

    /// Waits for the end of all work on blocking threads. Starts no further work, except unmounts that waited for work to end.
    /// Ignores the outcomes of refreshes.
    pub(in crate::supervisor) async fn finish_all(&mut self) {
        loop {
            tokio::select! {
                Some(unmounted) = self.unmounting.join_next() => self.finish_unmount(unmounted),
                Some(finished) = self.working.join_next() => {
                    let finished = finished.expect("a blocking thread that panics ends the process");
                    let FinishedWork { place, volume, outcome } = finished;
                    if let WorkOutcome::ContainerOperation(part) = outcome {
                        self.containers.take(part);
                    }
                    match self.is_unmounting(place) {
                        true => self.start_unmount(place, volume),
                        false => drop(self.idle.insert(place, volume)),
                    }
                }
                else => break,
            }
        }
        self.containers.finish().await;
    }
}
