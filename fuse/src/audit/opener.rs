//! The process that opens a file, from the ids of the request and from `/proc` while the process waits.

use std::fs;

use serde::Serialize;

use crate::caller::credentials::UNSENT;
use crate::caller::status::ThreadStatus;
use crate::caller::{Caller, cgroup};

/// A process that opens a file. Unknown fields are `null` in JSON.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Opener {
    /// Its id in the server's pid namespace. Unknown if it is not in that namespace or one below it.
    pub(super) pid: Option<u32>,
    /// The ids with which the kernel checks its permissions (`fsuid`, `fsgid`).
    pub(super) uid: Option<u32>,
    pub(super) gid: Option<u32>,
    /// Its name for itself (`proc_pid_comm(5)`).
    pub(super) command: Option<String>,
    pub(super) cgroup: Option<String>,
}

impl Opener {
    /// The process of a thread that waits for the answer to a request.
    pub(super) fn of(caller: Caller) -> Self {
        let sent = |id: u32| (id != UNSENT).then_some(id);
        let known = Self { uid: sent(caller.uid), gid: sent(caller.gid), ..Self::default() };
        if caller.pid == 0 {
            return known;
        }
        let status = ThreadStatus::of(caller.pid);
        let number = |name, place| status.as_ref()?.numbers(name).nth(place);
        let pid = number("Tgid", 0).unwrap_or(caller.pid);
        // The fourth id is that for files, after the real, effective and saved ones.
        Self {
            pid: Some(pid),
            uid: known.uid.or_else(|| number("Uid", 3)),
            gid: known.gid.or_else(|| number("Gid", 3)),
            command: command(pid),
            cgroup: cgroup::of(caller.pid),
        }
    }
}

fn command(process: u32) -> Option<String> {
    let name = fs::read(format!("/proc/{process}/comm")).ok()?;
    Some(String::from_utf8_lossy(&name).trim_end_matches('\n').to_owned())
}
