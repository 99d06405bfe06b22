//! NFS exports as volumes. The tests use real mounts and mostly a real server, and compare the mount with the exported
//! directory.

mod at_once;
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
