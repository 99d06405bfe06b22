//! NFS: podfs' client, NFS volumes, and pods with NFS volumes.

mod client;
#[path = "../common/mod.rs"]
mod common;
mod fuzz_seeds;
mod mounted;
#[path = "../nfs_rig/mod.rs"]
mod nfs_rig;
mod pod_volumes;
mod public_suites;
mod rig_itself;
#[path = "../suites/mod.rs"]
mod suites;
mod takeover;
mod volume;
