//! NFS volumes while the server of the pod, the NFS server or both are killed.

mod again;
mod held;
mod pod;
mod storm;
mod worker;
mod writer;
