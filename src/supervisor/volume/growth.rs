//! The growth of a volume on the node, when its PersistentVolume has grown. A controller of the cluster makes the disk larger;
//! what is on the disk grows here, and then the claim's status may say the new size.

use super::Trouble;
use crate::binding::Bound;
use crate::driver::DriverError;
use crate::host::HostError;

/// What is known of the growth of a volume.
#[derive(Debug, Default)]
pub(super) struct Growth {
    /// The size of the PersistentVolume that the volume was grown for.
    grown_for: Option<u64>,
    /// How the last growth came out that the claim's status does not know of.
    outcome: Option<Expansion>,
}

/// How the growth of a volume on the node came out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expansion {
    /// The bytes that its PersistentVolume has.
    pub bytes: u64,
    /// Why the volume does not have them.
    pub failure: Option<ExpansionFailure>,
}

/// Why a volume did not grow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpansionFailure {
    /// In one sentence.
    pub sentence: String,
    /// Whether it cannot have this size at all.
    pub is_infeasible: bool,
}

impl Growth {
    /// Whether the PersistentVolume has another size than at the last growth.
    pub(super) fn is_due(&self, bound: &Bound) -> bool {
        bound.capacity != self.grown_for
    }

    /// How the last growth came out, if the claim's status does not say so.
    pub(super) fn outcome(&self) -> Option<&Expansion> {
        self.outcome.as_ref()
    }

    /// The volume has the bytes of its PersistentVolume. `by_node` says whether the node has seen to that, and not a controller.
    pub(super) fn succeed(&mut self, bound: &Bound, by_node: bool) {
        self.grown_for = bound.capacity;
        self.set_outcome(larger_than_claim(bound).filter(|_| by_node), None);
    }

    /// The driver did not grow the volume. It is called again.
    pub(super) fn refused(&mut self, bound: &Bound, error: DriverError) -> Trouble {
        // A driver that may be at it still has not failed.
        if !error.is_uncertain {
            let DriverError { sentence, is_infeasible, .. } = error.clone();
            self.set_outcome(larger_than_claim(bound), Some(ExpansionFailure { sentence, is_infeasible }));
        }
        error.into()
    }

    /// The file system did not grow. The volume is used as it is, until its PersistentVolume has yet another size.
    pub(super) fn give_up(&mut self, bound: &Bound, error: &HostError) {
        self.grown_for = bound.capacity;
        let failure = ExpansionFailure { sentence: error.to_string(), is_infeasible: false };
        self.set_outcome(larger_than_claim(bound), Some(failure));
    }

    fn set_outcome(&mut self, bytes: Option<u64>, failure: Option<ExpansionFailure>) {
        self.outcome = bytes.map(|bytes| Expansion { bytes, failure });
    }
}

/// The bytes of the PersistentVolume, if the claim's status says fewer. It says nothing where there is no controller.
fn larger_than_claim(bound: &Bound) -> Option<u64> {
    bound.capacity.filter(|bytes| bound.claimed.is_some_and(|claimed| claimed < *bytes))
}
