//! Commands of an operator for the pods of this node, outside of the processes that serve them.
//!
//! | module | owns |
//! |---|---|
//! | [`survey`] | finding the pods of a run directory, and asking each for its status or metrics |
//! | [`readings`] | the metrics of all pods, for each scrape |
//! | [`table`] | the status as a table |
//! | [`cleanup`] | removing the remains of killed podfs processes |
//! | `leftovers` | directories and files of a pod: which cleanup removes, and why the others stay |
//! | `probe` | whether a mount answers, without waiting for it |

pub mod cleanup;
pub(crate) mod leftovers;
mod probe;
pub mod readings;
pub mod survey;
pub mod table;
