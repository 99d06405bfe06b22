//! The supervisor's side: mounts that a server answers for, and what has to survive that server.
//!
//! | module | owns |
//! |---|---|
//! | `server_client` | the requests to a server, and their answers |
//! | `exports` | requests about NFS volumes: their exports, and where their servers are |
//! | `connection` | one connection to one server process |
//! | `held` | what the supervisor holds of a volume |
//! | `succession` | one server after another, one supervisor after another |
//! | `projection` | one mounted projection and its commits |
//! | `live` | the live parts of a projection, and their updates |
//! | `passthrough` | one mounted source of the host |
//! | `nfs` | one mounted NFS export, and its log |
//! | `affinity` | letting a commit and its answers share a CPU |

mod affinity;
mod connection;
mod exports;
mod held;
mod live;
mod nfs;
mod passthrough;
mod projection;
mod server_client;
mod succession;

pub use live::LivePartError;
pub use nfs::NfsVolume;
pub use passthrough::Passthrough;
pub use projection::{Commit, CommitError, Projection};
pub use server_client::{Doing, ServerClient, Watch};
pub use succession::{Adopted, AdoptedVolume, LastKeeper, Succession, Successor};
