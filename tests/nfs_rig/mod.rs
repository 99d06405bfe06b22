//! The rig for tests of NFS: correct and faulty servers, faults of the network, and clients other than podfs.
//!
//! | module | simulates | does not simulate |
//! |---|---|---|
//! | [`ganesha`] | a real NFS server, which a test can kill, stop and restart | the kernel's NFS server |
//! | [`scripted`] | a server that fails, sends wrong answers or does not answer | a real server |
//! | `rpcbind` | the port mapper with which ganesha registers | a port mapper that answers `GETPORT` |
//! | `portmapper` | a port mapper that answers `GETPORT` | registration |
//! | [`proxy`] | a network that is slow, breaks connections or changes records | lost packets, low bandwidth |
//! | [`caller`] | a client that makes one call at a time | a client of everyday use |
//! | [`libnfs`] | the programs of libnfs, an independent client | errors other than an exit code |
//!
//! Test programs include this module as `nfs_rig`, at their root.
//!
//! `xdr`, `rpc` and `protocol` implement the protocols again and share no code with podfs, so that a mistake of podfs is not
//! repeated here. `children` ends all child processes with the test program, and `ports` lets several test programs run at the
//! same time.
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

/// The time limit for a wait of a test for something that must happen. On an idle machine, such waits take milliseconds.
pub const TIMEOUT: Duration = Duration::from_secs(180);

/// Waits until `condition` holds, which `sentence` describes.
#[track_caller]
pub fn eventually(sentence: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !condition() {
        assert!(Instant::now() < deadline, "still not true: {sentence}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
