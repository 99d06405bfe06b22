//! The growth of a volume on the node, when its PersistentVolume has grown. A controller of the cluster enlarges the
//! disk. podfs grows the file system on the disk, or makes a CSI driver do so. Then the claim's status may report the
//! new size.

use super::RefreshFailure;
use crate::binding::BoundVolume;
use crate::driver::DriverError;
use crate::host::HostError;

/// The state of a volume's growth.
#[derive(Debug, Default)]
pub(super) struct ExpansionState {
    /// The size of the PersistentVolume at the last growth.
    grown_for: Option<u64>,
    /// The outcome of the last growth, until the claim's status reports it.
    outcome: Option<Expansion>,
}

/// The outcome of a volume's growth on the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expansion {
    /// The size of the PersistentVolume, in bytes.
    pub bytes: u64,
    /// Why the volume does not have that size.
    pub failure: Option<ExpansionFailure>,
}

/// Why a volume did not grow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpansionFailure {
    /// The reason, in one sentence.
    pub sentence: String,
    /// Whether the volume can never have this size.
    pub is_infeasible: bool,
}

impl ExpansionState {
    /// Whether the PersistentVolume has another size than at the last growth.
    pub(super) fn is_due(&self, bound: &BoundVolume) -> bool {
        bound.capacity != self.grown_for
    }

    /// The outcome of the last growth, if the claim's status does not report it.
    pub(super) fn outcome(&self) -> Option<&Expansion> {
        self.outcome.as_ref()
    }

    /// Notes that the volume has the size of its PersistentVolume. `by_node` is false if a controller of the cluster
    /// has grown the volume, and the node had nothing to do.
    pub(super) fn succeed(&mut self, bound: &BoundVolume, by_node: bool) {
        self.grown_for = bound.capacity;
        self.set_outcome(larger_than_claim(bound).filter(|_| by_node), None);
    }

    /// Notes that the driver did not grow the volume. podfs calls the driver again.
    pub(super) fn refused(&mut self, bound: &BoundVolume, error: DriverError) -> RefreshFailure {
        // If the outcome is uncertain, the driver may still be growing the volume.
        if !error.is_uncertain {
            let DriverError { sentence, is_infeasible, .. } = error.clone();
            self.set_outcome(larger_than_claim(bound), Some(ExpansionFailure { sentence, is_infeasible }));
        }
        error.into()
    }

    /// Notes that the file system did not grow. podfs tries again only when the PersistentVolume has yet another size.
    pub(super) fn give_up(&mut self, bound: &BoundVolume, error: &HostError) {
        self.grown_for = bound.capacity;
        let failure = ExpansionFailure { sentence: error.to_string(), is_infeasible: false };
        self.set_outcome(larger_than_claim(bound), Some(failure));
    }

    fn set_outcome(&mut self, bytes: Option<u64>, failure: Option<ExpansionFailure>) {
        self.outcome = bytes.map(|bytes| Expansion { bytes, failure });
    }
}

/// The size of the PersistentVolume, if the claim's status reports a smaller size; `None` if the status reports none.
fn larger_than_claim(bound: &BoundVolume) -> Option<u64> {
    bound.capacity.filter(|bytes| bound.claimed.is_some_and(|claimed| claimed < *bytes))
}
