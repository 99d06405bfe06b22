//! The control socket: `control.sock` in the pod's run directory, on which commands and agents ask the supervisor.
//!
//! A connection carries one question and its answer, or the statuses for a program that follows the pod, or the pushes
//! of a program that keeps the connection open. Messages are framed like those between supervisor and server
//! ([`podfs_fuse::protocol`]). Each message is in an `Envelope` with the version of the control protocol.
//!
//! | module | owns |
//! |---|---|
//! | `protocol` | questions and answers, and their bytes |
//! | `client` | a client that asks a supervisor |
//! | `container_operation` | questions that take work on volumes, which the supervisor's task does |
//! | `server` | the supervisor's threads that answer, without the supervisor's task |
//! | `follow`, `follower` | sending the status after each change, and receiving it |
//! | `pushes`, `pusher` | receiving pushes on a connection that stays open, and sending them |
//! | `frames` | the messages of a connection that stays open |
//! | `questions` | the thread that asks a server which may not answer |

mod client;
mod container_operation;
mod follow;
mod follower;
mod frames;
mod protocol;
mod pusher;
mod pushes;
mod questions;
mod server;

pub(crate) use client::peer_user;
pub use client::{AskError, ask, ask_for_upgrade, ask_within, connect, peer};
pub(in crate::supervisor) use container_operation::{ContainerOperation, ContainerTask};
pub use follower::{StatusFollower, follow};
pub use protocol::{ContainerRequest, ControlAnswer, ControlQuestion, LONGEST_PUSH, Publish, Upgrade, VolumeNames};
pub use pusher::PushConnection;
pub(in crate::supervisor) use server::{Control, PendingClient, RequestedChange, TaskQueues};
