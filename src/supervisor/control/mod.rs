//! The control socket: `control.sock` in the pod's run directory, on which commands and agents ask the supervisor.
//!
//! A connection is one question and its answer, framed as the messages to the server are
//! ([`podfs_fuse::protocol`]), each in an `Envelope` with the version of this protocol.
//!
//! | module | owns |
//! |---|---|
//! | `protocol` | questions and answers, and their bytes |
//! | `client` | asking a supervisor |
//! | `errand` | questions that take work on volumes, which the supervisor's task does |
//! | `server` | answering, without the supervisor's task |
//! | `questions` | asking a server that may not answer |

mod client;
mod errand;
mod protocol;
mod questions;
mod server;

pub(crate) use client::peer_user;
pub use client::{AskError, ask, ask_for_upgrade, call, peer};
pub(in crate::supervisor) use errand::{Errand, Task};
pub use protocol::{Answer, ContainerRequest, LONGEST_PUSH, Question, Upgrade};
pub(in crate::supervisor) use server::{Control, Desks, Upgrading};
