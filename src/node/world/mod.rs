//! The desired and the actual state of the world. Plain data; nothing here does I/O or reads a clock.
//!
//! | module | owns |
//! |---|---|
//! | [`desired`] | the volumes that pods want |
//! | [`actual`] | the volumes that are mounted, or may be |
//! | [`sentences`] | the errors or the notes of a pod, at most ten |

pub mod actual;
pub mod desired;
pub mod sentences;

use std::fmt;

use crate::manifest::pod::PodUid;

/// A volume of a pod: the key of both worlds, and of operations.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeId {
    /// The pod.
    pub pod: PodUid,
    /// The volume's name in the pod.
    pub volume: String,
}

impl fmt::Display for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "volume {:?} of pod {}", self.volume, self.pod)
    }
}
