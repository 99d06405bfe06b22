//! Whether a mount answers, without waiting for it.
//!
//! A mount whose server is gone fails at once with `ENOTCONN`. A mount whose server hangs does not answer, and once the server
//! has read the request, even SIGKILL does not end the calling process (`fuse_dev_do_read`). So a child process makes the call,
//! and podfs abandons it when it does not return.

use std::ffi::CString;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::statfs;
use rustix::io::Errno;
use rustix::process::{PidfdFlags, pidfd_open};

/// How long a mount may take to answer.
const TIMEOUT: Duration = Duration::from_secs(2);

const ALIVE: i32 = 0;
const DEAD: i32 = 1;

/// The state of the server behind a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pulse {
    /// It answers, with success or an error.
    Alive,
    /// The kernel has closed the connection, so no server can ever answer.
    Dead,
    /// It does not answer in time, or could not be asked.
    Silent,
}

/// Asks what is mounted at `path`.
pub(super) fn pulse(path: &Path) -> Pulse {
    let Ok(path) = CString::new(path.as_os_str().as_bytes()) else { return Pulse::Silent };
    // SAFETY: the child makes system calls only, and ends. It allocates nothing: the path is a C string already.
    match unsafe { fork() } {
        Ok(ForkResult::Child) => {
            let code = match statfs(path.as_c_str()) {
                Err(Errno::NOTCONN | Errno::CONNABORTED) => DEAD,
                _ => ALIVE,
            };
            // SAFETY: nothing of the parent's is cleaned up on the way.
            unsafe { libc::_exit(code) }
        }
        Ok(ForkResult::Parent { child }) => wait(child),
        Err(_) => Pulse::Silent,
    }
}

fn wait(child: Pid) -> Pulse {
    let timeout = Timespec { tv_sec: TIMEOUT.as_secs() as i64, tv_nsec: 0 };
    let ended = rustix::process::Pid::from_raw(child.as_raw())
        .and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok())
        .is_some_and(|pid| poll(&mut [PollFd::from_borrowed_fd(pid.as_fd(), PollFlags::IN)], Some(&timeout)) == Ok(1));
    if !ended {
        // No wait for its end: the kernel may delay that as long as the mount is silent.
        let _ = kill(child, Signal::SIGKILL);
        return Pulse::Silent;
    }
    match waitpid(child, None) {
        Ok(WaitStatus::Exited(_, ALIVE)) => Pulse::Alive,
        Ok(WaitStatus::Exited(_, DEAD)) => Pulse::Dead,
        _ => Pulse::Silent,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_answers() {
        assert_eq!(pulse(Path::new("/")), Pulse::Alive);
        assert_eq!(pulse(Path::new("/no such file")), Pulse::Alive);
    }
}
