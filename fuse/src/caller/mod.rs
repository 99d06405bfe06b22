//! The process behind a request: its ids in the request, and its files in `/proc` while it waits for the answer.
//!
//! | module | owns |
//! |---|---|
//! | [`ending`] | whether it is being killed |
//! | [`credentials`] | its user and groups, for a source on another machine |
//! | [`privileges`] | whether it administers the system, whether it is in a group |
//! | [`cgroup`] | its cgroup |
//! | `status` | reading `/proc/<thread>/status` |
//!
//! Of `/proc/<thread>` this reads only files that wait for no other process: `status`, `uid_map` and its like, `cgroup`, `comm`.
//! A process that executes a program closes files, and waits for the answer to FLUSH, while it holds a lock that `stat`,
//! `cmdline` and others wait for. The answer would never come.

pub mod cgroup;
pub mod credentials;
pub mod ending;
pub mod privileges;
pub(crate) mod status;

/// The ids of the calling process, from the header of a FUSE request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Owner of what it creates.
    pub uid: u32,
    /// Group of what it creates.
    pub gid: u32,
    /// Its thread, as this process's pid namespace numbers it; 0 if that cannot see it.
    pub pid: u32,
}
