//! Counters of a volume, for status and metrics. A count lives as long as the volume is mounted, across all its servers.
//!
//! No successor depends on it, so it has no layout version: a program that does not know the counters leaves them as they are,
//! and counts nothing while it serves.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::shared::shared;

/// How many opcodes have a counter of their own. The kernel's opcodes are smaller.
const OPERATIONS: usize = 64;
/// The upper ends of the groups that durations are counted in, in seconds. They are in use in memory that outlives
/// programs, so they cannot change without another place for them.
pub(crate) const BOUNDS: [f64; 12] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0];

shared! {
    /// All of it.
    pub(crate) struct Counts {
        /// Requests, by the number of what was asked; those of no known number are in the first place.
        requests: [AtomicU64; OPERATIONS],
        /// Generations, by how long it took to switch to them.
        commits: Durations,
        /// Changes, by how long it took from when podfs saw them until containers could.
        propagations: Durations,
    }
    /// How many took how long.
    pub(crate) struct Durations {
        groups: [AtomicU64; BOUNDS.len() + 1],
        nanoseconds: AtomicU64,
    }
}

/// How many took how long.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Distribution {
    /// The upper ends of all groups but the last, in seconds; each belongs to its group.
    pub bounds: Vec<f64>,
    /// How many are in each group. The last one is for all that took longer.
    pub groups: Vec<u64>,
    /// How long they took all together. A whole number stays what it is wherever it is written.
    pub nanoseconds: u64,
}

impl Distribution {
    /// Of nothing yet, in groups with these upper ends.
    pub fn new(bounds: &[f64]) -> Distribution {
        Distribution { bounds: bounds.to_vec(), groups: vec![0; bounds.len() + 1], nanoseconds: 0 }
    }

    /// One more, that took so long.
    pub fn add(&mut self, took: Duration) {
        if let Some(group) = self.groups.get_mut(group(&self.bounds, took)) {
            *group += 1;
        }
        self.nanoseconds = self.nanoseconds.wrapping_add(nanoseconds(took));
    }

    /// How many seconds they took all together.
    pub fn seconds(&self) -> f64 {
        Duration::from_nanos(self.nanoseconds).as_secs_f64()
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.groups.iter().copied().fold(0, u64::wrapping_add)
    }
}

impl Counts {
    /// One more request. This is all that a request costs.
    pub(crate) fn request(&self, opcode: u32) {
        let place = self.requests.get(opcode as usize).unwrap_or(&self.requests[0]);
        place.fetch_add(1, Relaxed);
    }

    /// Requests, by the number of what was asked; 0 for all others.
    pub(crate) fn requests(&self) -> impl Iterator<Item = (u32, u64)> {
        (0..).zip(&self.requests).map(|(opcode, count)| (opcode, count.load(Relaxed)))
    }
}

impl Durations {
    /// One more, that took so long.
    pub(crate) fn add(&self, took: Duration) {
        self.groups[group(&BOUNDS, took)].fetch_add(1, Relaxed);
        self.nanoseconds.fetch_add(nanoseconds(took), Relaxed);
    }

    /// All so far.
    pub(crate) fn distribution(&self) -> Distribution {
        Distribution {
            bounds: BOUNDS.to_vec(),
            groups: self.groups.iter().map(|count| count.load(Relaxed)).collect(),
            nanoseconds: self.nanoseconds.load(Relaxed),
        }
    }
}

/// The group that a duration belongs to.
fn group(bounds: &[f64], took: Duration) -> usize {
    bounds.iter().position(|bound| took.as_secs_f64() <= *bound).unwrap_or(bounds.len())
}

fn nanoseconds(took: Duration) -> u64 {
    u64::try_from(took.as_nanos()).unwrap_or(u64::MAX)
}
