//! `podfs node`: the volume manager of a node.
//!
//! | module | owns |
//! |---|---|
//! | [`pod`] | a pod of the node as its source describes it |
//! | [`state`] | what the manager knows at one moment, for commands and agents |
//! | [`handle`] | asking the manager, and telling it what an agent wants |
//!
//! The daemon owns no mount and no FUSE descriptor: each pod has a supervisor of its own (`podfs run`), which goes on when
//! the daemon is killed.

pub mod handle;
pub mod pod;
pub mod state;

pub use handle::{Command, NodeHandle, Refusal};
pub use pod::{NodePod, PodOrigin, PodStage};
pub use state::{NodeState, PodEntry, VolumeEntry, VolumeMount};
