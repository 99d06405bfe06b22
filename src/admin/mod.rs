//! Commands of an operator for the pods of this node. They run outside of the processes that serve the pods.
//!
//! | module | owns |
//! |---|---|
//! | [`survey`] | finding the pods of a run directory, and asking each for its status or metrics |
//! | [`readings`] | the metrics of all pods, for each scrape |
//! | [`table`] | the status as a table |
//! | [`cleanup`] | removing the remains of killed podfs processes |
//! | `leftovers` | removing recorded directories and files of a pod, and the reasons why some stay |
//! | `probe` | whether the server of a mount answers, without blocking on it |
//! | [`process_delay`] | why a process does not answer, as far as the kernel shows it |

pub mod cleanup;
pub(crate) mod leftovers;
mod probe;
pub mod process_delay;
pub mod readings;
pub mod survey;
pub mod table;
