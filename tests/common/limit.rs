//! Limits of running processes.

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
