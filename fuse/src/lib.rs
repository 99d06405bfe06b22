//! The file systems of podfs, and the process that serves them. This crate does not depend on Kubernetes.
//!
//! | module | owns |
//! |---|---|
//! | [`audit`] | the access log: one line for each open, with the process |
//! | [`caller`] | the process behind a request: ids, groups, cgroup, pending SIGKILL |
//! | `child` | children that share the process's descriptors |
//! | [`client`] | the supervisor's side: the mounts of a server |
//! | [`confinement`] | the rights that the server gives up before its first request |
//! | [`label`] | the name of a volume in the server |
//! | [`live`] | paths of a payload that change in place, for containers that mount only such a path |
//! | [`log`] | the server's log, in the format of the supervisor's |
//! | [`memory_lock`] | keeping memory out of swap and core dumps, and zeroing freed memory |
//! | [`mount`] | the mounts: a private read-write one to commit through, a visible read-only one for containers |
//! | [`nfs`] | NFS exports, shown as they are |
//! | [`passthrough`] | directories of the host, shown as they are |
//! | [`printable`] | text for terminals |
//! | [`program`] | the program podfs-fuse |
//! | [`projection`] | generations of immutable payloads, the tree they form, and the switch from one to the next |
//! | [`protocol`] | the messages between supervisor and server, with their descriptors |
//! | [`region`] | the state of a volume that a successor needs |
//! | [`session`] | the FUSE protocol, and its threads |
//! | [`server`] | the process that answers FUSE requests, and the keeper of its descriptors |
//! | `shortage` | errors that pass by themselves |
//! | [`trace`] | one line for each request |
//! | `utc` | dates and times in UTC |
//!
//! Two processes take part. The *supervisor* opens `/dev/fuse`, makes the mounts and commits
//! generations with ordinary system calls on the private mount. The *server* answers the kernel's requests, and
//! changes a tree only by steps that the supervisor has announced.

pub mod audit;
pub mod caller;
mod child;
pub mod client;
pub mod confinement;
pub mod label;
pub mod live;
pub mod log;
pub mod memory_lock;
pub mod mount;
pub mod nfs;
pub mod passthrough;
pub mod printable;
pub mod program;
pub mod projection;
pub mod protocol;
pub mod region;
pub mod server;
pub mod session;
mod shortage;
pub mod trace;
mod utc;

pub use podfs_nfs::{Backoff, DoublingPause};
