//! The status of a pod and its volumes, as podfs reports it.
//!
//! | module | owns |
//! |---|---|
//! | `pod_status` | the status as JSON: the types |
//! | `store` | the state of the pod at this moment, for `podfs status` and metrics |
//! | [`report`] | readiness and state, reported to people, to the node agent and to systemd |
//! | `progress` | the lines below the log of a terminal until all volumes are mounted |
//! | `health` | whether the history of the servers is a problem |
//! | [`metrics`] | the metrics of the pod |
//! | `counters` | the events that the supervisor counts |
//! | `counter_store` | the counters, shared between threads, and kept for the next supervisor |
//! | `capacity` | the capacity of volumes whose sources may not answer |

mod capacity;
mod counter_store;
mod counters;
mod health;
pub mod metrics;
mod pod_status;
pub(crate) mod progress;
pub mod report;
pub(in crate::supervisor) mod store;

pub(in crate::supervisor) use counter_store::CounterStore;
pub use counter_store::kept_restarts;
pub use counters::OPERATION_BOUNDS;
pub use pod_status::{
    AuditStatus, ExpansionStatus, ObjectStatus, PodState, PodStatus, ProcessStatus, ServerStatus, VolumeState,
    VolumeStatus,
};
