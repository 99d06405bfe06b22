//! NFS exports as volumes: a file system on top of the client in the crate [`podfs_nfs`].
//!
//! | module | owns |
//! |---|---|
//! | [`sockets`] | the sockets of connections, which the volumes of a pod share |
//! | [`options`] | how an export is served |
//! | [`thread`] | the one thread that serves all exports of a process |
//! | `busy_poll` | whether that thread sleeps between two calls |
//! | `volume` | the requests of one volume: read, answered, interrupted |
//! | `filesystem` | the answers to requests, by calls to the NFS server |
//! | `client_state` | nodes, open files and calls under way, as a successor finds them |
//! | `file_type` | types of files, of the protocol and of `st_mode` |
//! | [`writeback`] | data that podfs has accepted, until the NFS server has it on disk |

mod busy_poll;
mod client_state;
mod file_type;
mod filesystem;
pub mod options;
pub mod sockets;
pub mod thread;
mod volume;
pub mod writeback;
