//! Limits of running processes.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::sys::resource::{Resource, rlim_t};
use nix::unistd::Pid;

/// Sets the limit of open files of a running process. Returns the previous limit.
pub fn limit_files(process: Pid, number: rlim_t) -> rlim_t {
    let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let resource = Resource::RLIMIT_NOFILE as libc::__rlimit_resource_t;
    // SAFETY: the structs outlive the calls.
    unsafe {
        assert_eq!(libc::prlimit(process.as_raw(), resource, std::ptr::null(), &raw mut before), 0);
        let limit = libc::rlimit { rlim_cur: number, ..before };
        assert_eq!(libc::prlimit(process.as_raw(), resource, &raw const limit, std::ptr::null_mut()), 0);
    }
    before.rlim_cur
}

/// Sets a soft limit of a running server, such as `--nproc=3:`, as an option of prlimit(1). A server has ids of its own, and only a
/// process with the same ids may do this without further capabilities.
pub fn limit_server(server: Pid, option: &str) {
    let status = fs::read_to_string(format!("/proc/{server}/status")).expect("the server exists");
    let id = |field: &str| {
        let values = status.lines().find_map(|line| line.strip_prefix(field)).expect(field);
        values.split_whitespace().next().expect(field).parse().expect("a number")
    };
    let mut command = Command::new("prlimit");
    command.args(["--pid", &server.to_string(), option]).uid(id("Uid:")).gid(id("Gid:"));
    assert!(command.status().expect("prlimit is installed").success());
}
