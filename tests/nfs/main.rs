//! nfs volumes, as a user has them: a claim, its PersistentVolume, an NFS server, `podfs run`.
//!
//! The server is a real one, nfs-ganesha. The file system itself has tests of its own in the crate `podfs-fuse`.

#[path = "../common/mod.rs"]
mod common;
#[path = "../../fuse/tests/nfs_rig/mod.rs"]
mod nfs_rig;

mod pods;

mod away;
mod moved;
mod refused;
mod served;
mod shared;
mod user_namespace;
