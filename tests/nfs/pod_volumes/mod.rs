//! NFS volumes as users have them: a claim, its PersistentVolume, an NFS server, and `podfs run`.
//!
//! The NFS server is nfs-ganesha. [`crate::volume`] has the tests of the file system.

mod pods;

mod away;
mod csi;
mod moved;
mod refused;
mod served;
mod shared;
mod user_namespace;
