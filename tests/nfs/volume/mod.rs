//! NFS exports as volumes: real mounts on a real server, looked at through the mount and in the exported directory.

mod coherence;
mod listing;
mod locking;
mod looking;
mod moved;
mod names;
mod removed;
mod rights;
mod silence;
mod trouble;
