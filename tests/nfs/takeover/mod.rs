//! NFS volumes whose server process is killed, whose NFS server is killed, and both.

mod again;
mod held;
mod pod;
mod storm;
mod worker;
mod writer;
