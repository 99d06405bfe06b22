//! The operation executor: at most one operation for a volume at a time, and a pause after an operation that failed.
//!
//! Operations for different volumes run at the same time (VM-06). After a failure, the executor refuses the operation until a pause
//! is over; the pause doubles with each failure in a row, and is reset when the next operation has another name (VM-05).

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::{Duration, SystemTime};

use k8s_openapi::jiff::Timestamp;
use podfs_fuse::{Backoff, DoublingPause};
use tokio::time::Instant;

use super::world::VolumeId;
use crate::manifest::pod::PodUid;

/// The pauses after failures.
pub const PAUSE: DoublingPause = DoublingPause::new(Duration::from_millis(500), Duration::from_secs(122));

/// The running operations and the last failures, by volume. Only the manager's task changes them.
#[derive(Debug, Default)]
pub struct Executor(BTreeMap<VolumeId, OperationRecord>);

/// An operation that runs, or that failed.
#[derive(Debug)]
struct OperationRecord {
    name: &'static str,
    is_running: bool,
    failure: Option<LastFailure>,
}

/// The last failure of an operation.
#[derive(Clone, Debug)]
struct LastFailure {
    backoff: Backoff,
    pause: Duration,
    at: Instant,
    /// The same moment in wall-clock time, for messages.
    time: SystemTime,
    error: String,
}

/// Why an operation does not start. The texts are those of the kubelet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StartRefusal {
    /// An operation for the volume runs already.
    Running {
        /// Its name.
        name: &'static str,
    },
    /// The last operation failed, and the pause after it is not over.
    Pausing {
        /// The end of the pause.
        until: SystemTime,
        /// The length of the pause.
        pause: Duration,
        /// Why it failed.
        error: String,
    },
}

impl fmt::Display for StartRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StartRefusal::Running { name } => write!(
                f,
                "Failed to create operation with name {name:?}. An operation with that name is already executing."
            ),
            StartRefusal::Pausing { until, pause, error } => {
                let until = Timestamp::try_from(*until).unwrap_or_default();
                write!(f, "No retries permitted until {until} (durationBeforeRetry {pause:?}). Error: {error}")
            }
        }
    }
}

impl Executor {
    /// Begins an operation, which the caller ends with [`Executor::end`].
    ///
    /// # Errors
    /// When an operation for the volume runs, or when the pause after a failed operation of the same name is not over.
    pub fn begin(&mut self, id: &VolumeId, name: &'static str) -> Result<(), StartRefusal> {
        match self.0.entry(id.clone()) {
            Entry::Vacant(entry) => drop(entry.insert(OperationRecord { name, is_running: true, failure: None })),
            Entry::Occupied(mut entry) => {
                let known = entry.get_mut();
                if known.is_running {
                    return Err(StartRefusal::Running { name: known.name });
                }
                if known.name != name {
                    known.failure = None;
                } else if let Some(LastFailure { pause, at, time, error, .. }) = &known.failure
                    && at.elapsed() < *pause
                {
                    return Err(StartRefusal::Pausing { until: *time + *pause, pause: *pause, error: error.clone() });
                }
                (known.name, known.is_running) = (name, true);
            }
        }
        Ok(())
    }

    /// Ends the operation of the volume, with its error if it failed.
    pub fn end(&mut self, id: &VolumeId, error: Option<String>) {
        match error {
            None => drop(self.0.remove(id)),
            Some(error) => {
                if let Some(known) = self.0.get_mut(id) {
                    let mut backoff = known.failure.as_ref().map_or(PAUSE.backoff(), |failure| failure.backoff);
                    let (pause, at, time) = (backoff.fail(), Instant::now(), SystemTime::now());
                    known.is_running = false;
                    known.failure = Some(LastFailure { backoff, pause, at, time, error });
                }
            }
        }
    }

    /// Forgets the failures of the volume: it is in the desired state, or no pod wants it. A running operation stays.
    pub fn forget(&mut self, id: &VolumeId) {
        if self.0.get(id).is_some_and(|known| !known.is_running) {
            self.0.remove(id);
        }
    }

    /// Forgets the failures of volumes of a pod that is gone.
    pub fn forget_pod(&mut self, pod: &PodUid) {
        self.0.retain(|id, known| known.is_running || id.pod != *pod);
    }

    /// Whether this operation runs for the volume.
    pub fn runs(&self, id: &VolumeId, name: &str) -> bool {
        self.0.get(id).is_some_and(|known| known.is_running && known.name == name)
    }

    /// The volumes for which an operation runs.
    pub fn running(&self) -> BTreeSet<VolumeId> {
        self.0.iter().filter(|(_, known)| known.is_running).map(|(id, _)| id.clone()).collect()
    }

    /// When the next pause ends, of those that end after `before`. A pause that has ended earlier belongs to a volume that no
    /// longer needs an operation.
    pub fn next_retry(&self, before: Instant) -> Option<Instant> {
        let pauses = self.0.values().filter(|known| !known.is_running);
        let ends = pauses.filter_map(|known| known.failure.as_ref().map(|failure| failure.at + failure.pause));
        ends.filter(|end| *end > before).min()
    }
}

#[cfg(test)]
mod tests;
