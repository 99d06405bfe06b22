//! The cgroup of a thread (`proc_pid_cgroup(5)`).

use std::fs::File;
use std::io::Read;

/// Most bytes to read. The needed lines are the first ones.
const MOST: u64 = 16 << 10;

/// The path of a thread's cgroup; `None` if this process cannot read it.
pub fn of(thread: u32) -> Option<String> {
    let mut bytes = Vec::new();
    File::open(format!("/proc/{thread}/cgroup")).ok()?.take(MOST).read_to_end(&mut bytes).ok()?;
    cgroup_path(&String::from_utf8_lossy(&bytes))
}

/// The path in the hierarchy of version 2. If that is the root, the first path of version 1 that is not the root.
fn cgroup_path(lines: &str) -> Option<String> {
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
        assert_eq!(cgroup_path("0::/kubepods/pod1/c1\n").as_deref(), Some("/kubepods/pod1/c1"));
        assert_eq!(cgroup_path("12:pids:/docker/a:b\n0::/\n").as_deref(), Some("/docker/a:b"));
        assert_eq!(cgroup_path("1:name=systemd:/user.slice\n0::/init\n").as_deref(), Some("/init"));
        assert_eq!(cgroup_path("0::/\n").as_deref(), Some("/"));
        assert_eq!(cgroup_path("").as_deref(), None);
    }
}
