//! The process behind a request: its ids in the request, and its files in `/proc` while it waits for the answer.
//!
//! | module | owns |
//! |---|---|
//! | [`ending`] | whether the process is being killed |
//! | [`credentials`] | its user and groups, for a source on another machine |
//! | [`privileges`] | whether it administers the system, whether it is in a group |
//! | [`cgroup`] | its cgroup |
//! | `status` | reading `/proc/<thread>/status` |
//!
//! podfs reads only files of `/proc/<thread>` that never wait for another process: `status`, the maps of ids, `cgroup`, `comm`. A
//! process in execve(2) closes files, and waits for the answer to FLUSH, while it has a lock that `stat`, `cmdline` and others
//! wait for. That is a deadlock.

pub mod cgroup;
pub mod credentials;
pub mod ending;
pub mod privileges;
pub(crate) mod status;

/// The ids of the calling process, from the header of a FUSE request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// The owner of new files.
    pub uid: u32,
    /// The group of new files.
    pub gid: u32,
    /// The thread's id in this process's pid namespace; 0 if the thread is not in it.
    pub pid: u32,
}
