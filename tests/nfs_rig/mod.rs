//! The rig for tests of NFS: good and bad servers, faults of the network, and clients other than podfs.
//!
//! | module | stands for | does not show |
//! |---|---|---|
//! | [`ganesha`] | a real NFS server, killed, stopped and restarted at will | Linux' own server |
//! | [`scripted`] | a server that fails, lies and falls silent | a real one |
//! | `rpcbind` | the port mapper that ganesha wants to register with | a port mapper that answers questions |
//! | `portmapper` | one that says where a server's services are | registration |
//! | [`proxy`] | a network that is slow, torn or wrong | lost packets, narrow links |
//! | [`caller`] | a client that makes one call at a time, byte by byte | a client of everyday use |
//! | [`libnfs`] | the programs of libnfs, an independent client | errors other than an exit code |
//!
//! Test programs include it as `nfs_rig`, at their root.
//!
//! `xdr`, `rpc` and `protocol` are this rig's own reading of the wire, shared with no product, so that both sides cannot be
//! wrong in the same way. `children` and `ports` keep the machine clean: nothing outlives the test program, and test programs
//! can run side by side.
#![allow(dead_code, unused_imports, reason = "each test program uses its part")]

pub mod caller;
mod children;
pub mod ganesha;
pub mod libnfs;
mod portmapper;
mod ports;
pub mod protocol;
pub mod proxy;
pub mod rpc;
mod rpcbind;
pub mod scripted;
pub mod xdr;

use std::time::{Duration, Instant};

pub use ganesha::Ganesha;
pub use portmapper::Portmapper;
pub use proxy::Proxy;
pub use scripted::Scripted;

/// The time limit for each wait of a test. On an idle machine, such waits take milliseconds.
pub const TIMEOUT: Duration = Duration::from_secs(20);

/// Waits until `condition` holds.
#[track_caller]
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !condition() {
        assert!(Instant::now() < deadline, "still not true: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
