//! nfs volumes, as a user has them: a claim, its PersistentVolume, an NFS server, `podfs run`.
//!
//! The server is a real one, nfs-ganesha. [`crate::volume`] tests the file system itself.

mod pods;

mod away;
mod csi;
mod moved;
mod refused;
mod served;
mod shared;
mod user_namespace;
