//! NFS exports as volumes: real mounts on a real server, looked at through the mount and in the exported directory.

#[path = "../nfs_rig/mod.rs"]
mod nfs_rig;

mod coherence;
mod listing;
mod locking;
mod looking;
mod mounted;
mod moved;
mod names;
mod removed;
mod rights;
mod silence;
mod trouble;
