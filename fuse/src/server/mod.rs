//! The server: the process that answers FUSE requests for one pod.
//!
//! It is started by the supervisor with one end of a socket pair as its standard input, and does what
//! the [`protocol`] says. It opens nothing by itself: every device and every payload reaches it as a
//! descriptor. Each volume is one [`session`](crate::session); the control thread only takes a
//! projection's tree for moments. When the supervisor closes the socket, the server ends.
//!
//! | module | owns |
//! |---|---|
//! | [`protocol`] | the messages, and how descriptors travel with them |
//! | [`process`] | the server's own loop |
//! | [`client`] | the supervisor's end |
//! | `activity` | counting requests |
//! | `affinity` | letting a commit and its answers share a CPU |
//! | [`secrecy`] | keeping a process's memory out of swap and core dumps |
//! | [`trace`] | one line per request |

pub(crate) mod activity;
mod affinity;
pub mod client;
pub mod process;
pub mod protocol;
pub mod secrecy;
pub mod trace;

pub use client::Server;
