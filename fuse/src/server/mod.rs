//! The server: the process that answers FUSE requests for one pod.
//!
//! It is started by the supervisor with one end of a socket pair as its standard input, and does what
//! the [`protocol`] says. It opens nothing by itself: every device and every payload reaches it as a
//! descriptor. What else it could do it gives up when it starts ([`confinement`](crate::confinement)).
//! Each volume is one [`session`](crate::session); the control thread only takes a projection's tree for
//! moments.
//!
//! Either process may die. The supervisor holds what the server holds, as descriptors and as shared memory
//! ([`region`](crate::region)), so another server can go on; the server can tell another supervisor all that the first one
//! knew.
//!
//! | module | owns |
//! |---|---|
//! | [`protocol`] | the messages, and how descriptors travel with them |
//! | [`process`] | the server's own loop |
//! | `volumes` | the server's volumes |
//! | [`keeper`] | the process that keeps the server's descriptors when it is killed |
//! | [`client`] | the supervisor's end |
//! | `exports` | the same for NFS volumes: their exports, and where their servers are |
//! | `connection` | one connection to one server process |
//! | `held` | what the supervisor holds of a volume |
//! | [`succession`] | one server after another, one supervisor after another |
//! | `affinity` | letting a commit and its answers share a CPU |
//! | [`allocator`] | zeros in memory that was freed |
//! | [`secrecy`] | keeping a process's memory out of swap and core dumps |
//! | [`trace`] | one line per request |
//! | [`audit`] | one line per open, with who it was |

mod affinity;
pub mod allocator;
pub mod audit;
pub mod client;
mod connection;
mod exports;
pub(crate) mod held;
pub mod keeper;
pub mod process;
pub mod protocol;
pub mod secrecy;
pub mod succession;
pub mod trace;
mod volumes;

pub use audit::Subject;
pub use client::{Doing, Server, Watch};
pub use protocol::Reporting;
pub use succession::{Adopted, AdoptedVolume, LastKeeper, Succession, Successor};
