//! The events that the supervisor counts for its pod. They are few and rare. The counters of a volume, such as its FUSE
//! requests, are in its region.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use podfs_fuse::region::Distribution;
use serde::{Deserialize, Serialize};

/// The kubelet's histogram buckets for the duration of operations, in seconds.
pub const OPERATION_BOUNDS: [f64; 13] = [0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 120.0, 300.0, 600.0];

/// The counts of a pod, including those of earlier supervisors.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(in crate::supervisor) struct PodCounters {
    /// Servers that replaced a dead one.
    pub(in crate::supervisor) server_restarts: u64,
    pub(in crate::supervisor) operations: Vec<OperationCounts>,
    /// Mounts and refreshes that failed, by the name of the volume.
    pub(in crate::supervisor) refresh_errors: BTreeMap<String, Errors>,
    /// For each volume that a server serves now, by name: the count of `server_restarts` when a server began to serve
    /// it.
    restarts_before: BTreeMap<String, u64>,
}

/// The operations of one kind and outcome, by their durations.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::supervisor) struct OperationCounts {
    /// The kubelet's name of the operation, such as `volume_mount`.
    pub(in crate::supervisor) name: String,
    /// The kubelet's name of the volume plugin, such as `kubernetes.io/secret`.
    pub(in crate::supervisor) plugin: String,
    pub(in crate::supervisor) succeeded: bool,
    pub(in crate::supervisor) durations: Distribution,
}

/// The errors of a volume.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::supervisor) struct Errors {
    pub(in crate::supervisor) count: u64,
    /// The time of the last error.
    pub(in crate::supervisor) last: SystemTime,
}

impl PodCounters {
    /// How many servers have replaced a dead one since this volume was mounted.
    pub(in crate::supervisor) fn restarts_of(&self, volume: &str) -> u64 {
        self.restarts_before.get(volume).map_or(0, |before| self.server_restarts.saturating_sub(*before))
    }

    /// Counts an operation on a volume.
    pub(super) fn operated(&mut self, name: &str, plugin: &str, succeeded: bool, took: Duration) {
        let is_same = |counts: &&mut OperationCounts| {
            counts.name == name && counts.plugin == plugin && counts.succeeded == succeeded
        };
        match self.operations.iter_mut().find(is_same) {
            Some(operations) => operations.durations.add(took),
            None => {
                let mut durations = Distribution::new(&OPERATION_BOUNDS);
                durations.add(took);
                let (name, plugin) = (name.to_owned(), plugin.to_owned());
                self.operations.push(OperationCounts { name, plugin, succeeded, durations });
            }
        }
    }

    /// Counts a mount or refresh that failed.
    pub(super) fn failed(&mut self, volume: &str) {
        let now = SystemTime::now();
        let errors = self.refresh_errors.entry(volume.to_owned()).or_insert(Errors { count: 0, last: now });
        *errors = Errors { count: errors.count + 1, last: now };
    }

    /// Notes whether a server serves this volume now. Returns whether the counters have changed: an earlier supervisor
    /// may have noted the same.
    pub(super) fn served(&mut self, volume: &str, is_served: bool) -> bool {
        if self.restarts_before.contains_key(volume) == is_served {
            return false;
        }
        match is_served {
            true => drop(self.restarts_before.insert(volume.to_owned(), self.server_restarts)),
            false => drop(self.restarts_before.remove(volume)),
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::golden::{golden, values};

    #[test]
    fn operations_of_one_kind_and_outcome_are_counted_together_by_how_long_they_took() {
        let mut counters = PodCounters::default();
        for (succeeded, milliseconds) in [(true, 1), (true, 300), (false, 700_000)] {
            counters.operated("volume_mount", "kubernetes.io/secret", succeeded, Duration::from_millis(milliseconds));
        }
        assert_eq!(counters.operations.len(), 2);
        assert_eq!(counters.operations[0].durations.groups[..4], [1, 0, 1, 0]);
        assert_eq!(counters.operations[1].durations.groups[13], 1, "beyond all bounds");
    }

    #[test]
    fn the_restarts_of_a_volume_are_those_since_it_was_mounted() {
        let mut counters = PodCounters { server_restarts: 2, ..PodCounters::default() };
        assert_eq!(counters.restarts_of("config"), 0);
        assert!(counters.served("config", true), "it is mounted");
        counters.server_restarts = 5;
        assert!(!counters.served("config", true), "it was mounted before");
        assert_eq!(counters.restarts_of("config"), 3);
        assert!(counters.served("config", false), "it waits");
        assert!(counters.served("config", true), "it is mounted anew");
        assert_eq!(counters.restarts_of("config"), 0);
    }

    #[test]
    fn counts_have_the_bytes_that_other_versions_read() {
        let [counters] = &values::<PodCounters>(golden!("counts.json"))[..] else { panic!("one line") };
        assert_eq!((counters.server_restarts, counters.restarts_of("config")), (3, 1));
    }
}
