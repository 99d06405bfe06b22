//! The supervisor's side: the mounts of a server, and the state that survives the server.
//!
//! | module | owns |
//! |---|---|
//! | `succession` | takeovers and adoptions |
//! | `projection` | one mounted projection and its commits |
//! | `live` | the live parts of a projection, and their updates |
//! | `passthrough` | mounting a directory or file of the host |
//! | `nfs` | mounting an NFS export, and the address of its server |
//! | `mounted` | a mounted volume of any kind |
//! | `server_client` | the requests to a server, and their answers |
//! | `held` | the state that the supervisor holds of a volume, in one file for each kind |
//! | `connection` | one connection to one server process |
//! | `identity` | the name of a volume, and the record of the supervisor about it |
//! | `commit_error` | errors of commits |
//! | `affinity` | running a commit and the server's threads on one CPU |

mod affinity;
mod commit_error;
mod connection;
mod held;
mod identity;
mod live;
mod mounted;
mod nfs;
mod passthrough;
mod projection;
mod server_client;
mod succession;

pub use crate::protocol::VolumeNumber;
pub use crate::server::fd_keeper::successor::StartedSuccessor;
pub use commit_error::CommitError;
pub use identity::VolumeIdentity;
pub use live::LivePartError;
pub use mounted::MountedVolume;
pub use projection::{Commit, ProjectionMount};
pub use server_client::{ServerClient, VolumeActivity, VolumeObserver};
pub use succession::{AdoptedVolume, LastFdKeeper, Successor, TakeoverOutcome, UnloadableVolume};

#[cfg(test)]
mod tests;
