//! Waking the queues of a successor's rings.
//!
//! Requests that come while no server lives wait in their queue. The kernel looks into a queue when an answer to one of its
//! requests is committed, but not when a new entry is registered. So after a takeover, one request is needed on each CPU. A
//! child process makes it: `fstatfs(2)` on the private mount, once on each CPU.
//!
//! It is a process of its own, with the mount as its only descriptor. If the server dies meanwhile, the child waits for the next
//! one like any caller, and neither the server's end nor the connection's depends on it.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::child;

/// Makes a request on each of `cpus`.
///
/// # Errors
/// When there are no more processes.
pub(super) fn wake(mount: BorrowedFd<'_>, cpus: &[usize]) -> io::Result<()> {
    let mount = mount.as_raw_fd();
    let ask = || {
        // SAFETY: system calls only, with memory that outlives them; this process has its own table of descriptors.
        unsafe {
            libc::prctl(libc::PR_SET_NAME, c"podfs-wake".as_ptr());
            if mount > 0 {
                libc::syscall(libc::SYS_close_range, 0, mount - 1, 0);
            }
            libc::syscall(libc::SYS_close_range, mount + 1, libc::c_uint::MAX, 0);
            for cpu in cpus {
                let mut own: libc::cpu_set_t = std::mem::zeroed();
                libc::CPU_SET(*cpu, &mut own);
                if libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const own) == 0 {
                    let mut found: libc::statfs = std::mem::zeroed();
                    libc::fstatfs(mount, &raw mut found);
                }
            }
        }
    };
    // SAFETY: the child makes system calls only.
    unsafe { child::start_alone(ask) }.map(drop)
}
