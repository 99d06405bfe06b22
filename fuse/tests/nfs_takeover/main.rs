//! NFS volumes whose server process is killed, whose NFS server is killed, and both.

#[path = "../nfs_volume/mounted.rs"]
mod mounted;
#[path = "../nfs_rig/mod.rs"]
mod nfs_rig;

mod again;
mod held;
mod pod;
mod storm;
mod worker;
mod writer;
