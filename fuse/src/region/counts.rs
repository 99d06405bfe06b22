//! Counters of a volume, for status and metrics. A count lives as long as the volume is mounted, across all its servers.
//!
//! No successor depends on a count, so the counters have no layout version: a program that does not know them leaves them as they
//! are, and counts nothing while it serves.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::shared::shared;

/// The number of request counters. The kernel's opcodes are smaller than this.
const OPERATIONS: usize = 64;
/// The upper bounds of the groups of durations, in seconds. Regions that outlive this program have counts in these groups, so
/// other bounds need other counters.
pub(crate) const BOUNDS: [f64; 12] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0];

/// The errnos of calls that fail because of their source, with their names. Regions that outlive this program have counts at these
/// places, so later errnos come behind these.
const SOURCE_ERRORS: [(Errno, &str); 8] = [
    (Errno::IO, "EIO"),
    (Errno::UCLEAN, "EUCLEAN"),
    (Errno::BADMSG, "EBADMSG"),
    (Errno::ROFS, "EROFS"),
    (Errno::NOTCONN, "ENOTCONN"),
    (Errno::TIMEDOUT, "ETIMEDOUT"),
    (Errno::REMOTEIO, "EREMOTEIO"),
    (Errno::NODEV, "ENODEV"),
];

shared! {
    /// All counters of a volume.
    pub(crate) struct Counts {
        /// Requests by FUSE opcode. Index 0 counts the requests with an unknown opcode.
        requests: [AtomicU64; OPERATIONS],
        /// Commits of generations, by the time from their start until `..data` pointed to the new generation.
        commits: Durations,
        /// Changes, by the time from podfs's first notice of a change until containers see it.
        propagations: Durations,
        /// Answers with the errnos of [`SOURCE_ERRORS`].
        errors: [AtomicU64; SOURCE_ERRORS.len()],
    }
    /// A histogram of durations.
    pub(crate) struct Durations {
        groups: [AtomicU64; BOUNDS.len() + 1],
        nanoseconds: AtomicU64,
    }
}

/// A histogram of durations.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Distribution {
    /// The upper bounds of all groups but the last, in seconds. A group includes its upper bound.
    pub bounds: Vec<f64>,
    /// The number of durations in each group. The last group has all longer ones.
    pub groups: Vec<u64>,
    /// The sum of the durations, in nanoseconds. It is an integer, so that no format of messages rounds it.
    pub nanoseconds: u64,
}

impl Distribution {
    /// An empty histogram, in groups with these upper bounds.
    pub fn new(bounds: &[f64]) -> Distribution {
        Distribution { bounds: bounds.to_vec(), groups: vec![0; bounds.len() + 1], nanoseconds: 0 }
    }

    /// Counts a duration.
    pub fn add(&mut self, took: Duration) {
        if let Some(group) = self.groups.get_mut(group(&self.bounds, took)) {
            *group += 1;
        }
        self.nanoseconds = self.nanoseconds.wrapping_add(nanoseconds(took));
    }

    /// The sum of the durations, in seconds.
    pub fn seconds(&self) -> f64 {
        Duration::from_nanos(self.nanoseconds).as_secs_f64()
    }

    /// The number of durations.
    pub fn count(&self) -> u64 {
        self.groups.iter().copied().fold(0, u64::wrapping_add)
    }
}

impl Counts {
    /// Counts a request. This is the whole cost of the counters for a request.
    pub(crate) fn request(&self, opcode: u32) {
        let place = self.requests.get(opcode as usize).unwrap_or(&self.requests[0]);
        place.fetch_add(1, Relaxed);
    }

    /// Counts an answer, if it is an error of the source. An answer without an error costs nothing.
    pub(crate) fn answer<T>(&self, outcome: &Result<T, Errno>) {
        if let Err(errno) = outcome
            && let Some(place) = SOURCE_ERRORS.iter().position(|(known, _)| known == errno)
        {
            self.errors[place].fetch_add(1, Relaxed);
        }
    }

    /// The answers with an error of the source, by the errno's name. Leaves out errnos without answers.
    pub(crate) fn errors(&self) -> BTreeMap<&'static str, u64> {
        let counts = SOURCE_ERRORS.iter().zip(&self.errors).map(|((_, name), count)| (*name, count.load(Relaxed)));
        counts.filter(|(_, count)| *count > 0).collect()
    }

    /// Requests by FUSE opcode. Opcode 0 has the requests with an unknown opcode.
    pub(crate) fn requests(&self) -> impl Iterator<Item = (u32, u64)> {
        (0..).zip(&self.requests).map(|(opcode, count)| (opcode, count.load(Relaxed)))
    }
}

impl Durations {
    /// Counts a duration.
    pub(crate) fn add(&self, took: Duration) {
        self.groups[group(&BOUNDS, took)].fetch_add(1, Relaxed);
        self.nanoseconds.fetch_add(nanoseconds(took), Relaxed);
    }

    /// The histogram of all durations so far.
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
