//! What a person does with the pods of this node, from outside of the processes that serve them.
//!
//! | module | owns |
//! |---|---|
//! | [`survey`] | finding the pods of a run directory, and asking each how it is, in words or in numbers |
//! | [`readings`] | the numbers of all pods, again and again |
//! | [`table`] | the answer, for people |
//! | [`cleanup`] | what podfs that are gone have left: found, judged, taken away |
//! | `leftovers` | directories and files of a pod: what can go, and why the rest stays |
//! | `probe` | whether a mount answers, without waiting for it |

pub mod cleanup;
pub(crate) mod leftovers;
mod probe;
pub mod readings;
pub mod survey;
pub mod table;
