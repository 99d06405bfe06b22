//! The supervisor's side: mounts that a server answers for, and the state that has to survive that server.
//!
//! | module | owns |
//! |---|---|
//! | `server_client` | the requests to a server, and their answers |
//! | `connection` | one connection to one server process |
//! | `held` | the state that the supervisor holds of a volume, in one file for each kind |
//! | `mounted` | a mounted volume of any kind |
//! | `succession` | takeovers and adoptions |
//! | `projection` | one mounted projection and its commits |
//! | `live` | the live parts of a projection, and their updates |
//! | `affinity` | letting a commit and its answers share a CPU |

mod affinity;
mod connection;
mod held;
mod live;
mod mounted;
mod projection;
mod server_client;
mod succession;

pub use crate::server::successor::StartedSuccessor;
pub use live::LivePartError;
pub use mounted::MountedVolume;
pub use projection::{Commit, CommitError, Projection};
pub use server_client::{Doing, ServerClient, Watch};
pub use succession::{AdoptedVolume, LastKeeper, Succession, Successor};
