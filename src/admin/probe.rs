//! Whether the server of a mount answers, without blocking on it.
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

/// Longest wait for an answer of the mount's server.
const TIMEOUT: Duration = Duration::from_secs(2);

const ALIVE: i32 = 0;
const DEAD: i32 = 1;

/// The state of the server behind a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ServerState {
    /// It answers, with success or an error.
    Alive,
    /// The kernel has closed the connection, so no server can ever answer.
    Dead,
    /// It does not answer in time, or podfs could not call it.
    Silent,
}

/// Calls statfs(2) on `path` in a child process, which reaches the server of the mount there.
pub(super) fn server_state(path: &Path) -> ServerState {
    let Ok(path) = CString::new(path.as_os_str().as_bytes()) else { return ServerState::Silent };
    // SAFETY: the child makes system calls only, and ends. It does not allocate: the path already is a C string.
    match unsafe { fork() } {
        Ok(ForkResult::Child) => {
            let code = match statfs(path.as_c_str()) {
                Err(Errno::NOTCONN | Errno::CONNABORTED) => DEAD,
                _ => ALIVE,
            };
            // SAFETY: `_exit` runs no exit handler of the parent.
            unsafe { libc::_exit(code) }
        }
        Ok(ForkResult::Parent { child }) => wait(child),
        Err(_) => ServerState::Silent,
    }
}

fn wait(child: Pid) -> ServerState {
    let timeout = Timespec { tv_sec: TIMEOUT.as_secs() as i64, tv_nsec: 0 };
    let ended = rustix::process::Pid::from_raw(child.as_raw())
        .and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok())
        .is_some_and(|pid| poll(&mut [PollFd::from_borrowed_fd(pid.as_fd(), PollFlags::IN)], Some(&timeout)) == Ok(1));
    if !ended {
        // podfs does not wait for the child's end: the kernel may delay it until the server answers.
        let _ = kill(child, Signal::SIGKILL);
        return ServerState::Silent;
    }
    match waitpid(child, None) {
        Ok(WaitStatus::Exited(_, ALIVE)) => ServerState::Alive,
        Ok(WaitStatus::Exited(_, DEAD)) => ServerState::Dead,
        _ => ServerState::Silent,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_answers() {
        assert_eq!(server_state(Path::new("/")), ServerState::Alive);
        assert_eq!(server_state(Path::new("/no such file")), ServerState::Alive);
    }
}
