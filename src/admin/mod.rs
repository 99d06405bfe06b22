//! Commands of an operator for the pods of this node, outside of the processes that serve them.
//!
//! | module | owns |
//! |---|---|
//! | [`survey`] | finding the pods of a run directory, and asking each for its status or metrics |
//! | [`readings`] | the metrics of all pods, for each scrape |
//! | [`table`] | the status as a table |
//! | [`cleanup`] | removing what killed podfs processes have left |
//! | `leftovers` | directories and files of a pod: what can go, and why the rest stays |
//! | `probe` | whether a mount answers, without waiting for it |

pub mod cleanup;
pub(crate) mod leftovers;
mod probe;
pub mod readings;
pub mod survey;
pub mod table;
