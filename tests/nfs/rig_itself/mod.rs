//! Tests of the rig for NFS tests.

mod network;
mod scripts;
mod servers;

use crate::nfs_rig::Ganesha;
use crate::nfs_rig::caller::{Caller, Handle};

/// A connection to the server's first export, and the export's root.
fn connect(server: &Ganesha) -> (Caller, Handle) {
    let root = Caller::mount(server.mount_address(), "/export").expect("an answer").expect("a root");
    (Caller::connect(server.address()).expect("connected"), root)
}
