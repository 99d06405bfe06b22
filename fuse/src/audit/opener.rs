//! The process that opens: the caller in the request, and what `/proc` says of it while it waits.
//!
//! What is read here never waits for a lock that a process may hold while it opens or executes a file: neither its memory
//! nor its credentials are asked for (`proc_pid_status(5)`, `proc_pid_cgroup(5)`).

use std::fs::File;
use std::io::Read;

use serde::Serialize;

use crate::session::Caller;

/// The id in requests that name no caller: of ID-mapped mounts.
const NOBODY: u32 = u32::MAX;
/// Most bytes of a file in `/proc`. The fields that are read are in the first lines.
const MOST: u64 = 16 << 10;

/// A process that opens a file. What is not known is null.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Opener {
    /// Its number, as the server's pid namespace has it. Unknown if it is in none below that.
    pub(super) pid: Option<u32>,
    /// Whose permissions it has.
    pub(super) uid: Option<u32>,
    pub(super) gid: Option<u32>,
    /// Its name for itself (`proc_pid_comm(5)`).
    pub(super) command: Option<String>,
    pub(super) cgroup: Option<String>,
}

impl Opener {
    /// The process of a thread that waits for the answer to a request.
    pub(super) fn of(caller: Caller) -> Self {
        let told = |id: u32| (id != NOBODY).then_some(id);
        let known = Self { uid: told(caller.uid), gid: told(caller.gid), ..Self::default() };
        if caller.pid == 0 {
            return known;
        }
        let status = read(caller.pid, "status").unwrap_or_default();
        let pid = field(&status, "Tgid", 0).unwrap_or(caller.pid);
        // Real, effective and saved ids come before those that files are opened with.
        Self {
            pid: Some(pid),
            uid: known.uid.or_else(|| field(&status, "Uid", 3)),
            gid: known.gid.or_else(|| field(&status, "Gid", 3)),
            command: read(pid, "comm").map(|name| name.trim_end_matches('\n').to_owned()),
            cgroup: read(caller.pid, "cgroup").as_deref().and_then(cgroup),
        }
    }
}

fn read(thread: u32, name: &str) -> Option<String> {
    let mut bytes = Vec::new();
    File::open(format!("/proc/{thread}/{name}")).ok()?.take(MOST).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// A number of a line of `status`. The name of a process stands there, too, but not with a line break in it.
fn field(status: &str, name: &str, place: usize) -> Option<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.split_whitespace().nth(place)?.parse().ok()
}

/// That of version 2; where it is the root, the one of version 1 that is none.
fn cgroup(lines: &str) -> Option<String> {
    let path = |line: &str| line.splitn(3, ':').nth(2).map(str::to_owned);
    let unified = lines.lines().filter(|line| line.starts_with("0::"));
    let others = lines.lines().filter(|line| !line.starts_with("0::"));
    let paths: Vec<_> = unified.chain(others).filter_map(path).collect();
    paths.iter().find(|path| *path != "/").or(paths.first()).cloned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cgroup_is_that_of_version_2_or_else_of_a_container() {
        assert_eq!(cgroup("0::/kubepods/pod1/c1\n").as_deref(), Some("/kubepods/pod1/c1"));
        assert_eq!(cgroup("12:pids:/docker/a:b\n0::/\n").as_deref(), Some("/docker/a:b"));
        assert_eq!(cgroup("1:name=systemd:/user.slice\n0::/init\n").as_deref(), Some("/init"));
        assert_eq!(cgroup("0::/\n").as_deref(), Some("/"));
        assert_eq!(cgroup("").as_deref(), None);
    }

    #[test]
    fn ids_are_those_that_files_are_opened_with() {
        let status = "Name:\tUid: 7\nTgid:\t12\nUid:\t0\t1\t2\t3\nGid:\t4\t5\t6\t7\n";
        assert_eq!(
            (field(status, "Tgid", 0), field(status, "Uid", 3), field(status, "Gid", 3)),
            (Some(12), Some(3), Some(7))
        );
        assert_eq!(field("", "Tgid", 0), None);
    }
}
