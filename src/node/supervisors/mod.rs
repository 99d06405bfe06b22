//! The supervisors of a node's pods: one `podfs run` for each.
//!
//! | module | owns |
//! |---|---|
//! | [`checkpoint`] | what is written down of a pod for the next daemon |

pub mod checkpoint;
