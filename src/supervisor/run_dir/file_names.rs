//! The names of the files in a pod's run directory.

/// The locked file.
pub const LOCK: &str = "lock";
/// The supervisor's control socket.
pub const CONTROL: &str = "control.sock";
/// The socket on which the next supervisor finds the server.
pub const SERVER: &str = "server.sock";
/// A socket that becomes [`SERVER`] when the server listens on it.
pub const NEXT_SERVER: &str = "server.new";
/// The pod's counters for the next supervisor.
pub const COUNTS: &str = "counts.json";
/// The file for new counters. podfs renames it to [`COUNTS`] when it is written.
pub const NEXT_COUNTS: &str = "counts.json.new";
/// The record of the disks of the pod's hostPath volumes for the next supervisor.
pub const DISKS: &str = "disks.json";
/// The content of a lock file that podfs could not read.
pub const UNREADABLE: &str = "lock.unreadable";
