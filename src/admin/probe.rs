//! Whether the server of a mount answers, without blocking on it.
//!
//! A mount whose server is gone fails at once with `ENOTCONN`. A mount whose server hangs does not answer, and once the server
//! has read the request, even SIGKILL does not end the calling process (`fuse_dev_do_read`). So a child process makes the call.
//! When it does not return, podfs goes on, and a thread waits for the child's end.

use std::ffi::CString;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::thread;
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
        Ok(ForkResult::Parent { child }) => wait(child, TIMEOUT),
        Err(_) => ServerState::Silent,
    }
}

fn wait(child: Pid, limit: Duration) -> ServerState {
    let timeout = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
    let ended = rustix::process::Pid::from_raw(child.as_raw())
        .and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok())
        .is_some_and(|pid| poll(&mut [PollFd::from_borrowed_fd(pid.as_fd(), PollFlags::IN)], Some(&timeout)) == Ok(1));
    if !ended {
        let _ = kill(child, Signal::SIGKILL);
        // The kernel may delay the child's end until the server answers. Without a thread, a zombie stays until podfs ends.
        let _no_thread = thread::Builder::new().name("probe".to_owned()).spawn(move || waitpid(child, None));
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
    fn no_zombie_of_a_silent_mount_stays() {
        // SAFETY: the child makes a system call only, and does not return.
        let child = match unsafe { fork() }.expect("a child") {
            ForkResult::Child => loop {
                // SAFETY: the call reads no memory.
                unsafe { libc::pause() };
            },
            ForkResult::Parent { child } => child,
        };
        assert_eq!(wait(child, Duration::ZERO), ServerState::Silent);
        let process = format!("/proc/{child}");
        let is_gone = (0..1000).any(|_| {
            thread::sleep(Duration::from_millis(10));
            !Path::new(&process).exists()
        });
        assert!(is_gone, "{:?}", std::fs::read_to_string(format!("{process}/status")));
    }

    #[test]
    fn the_root_answers() {
        assert_eq!(server_state(Path::new("/")), ServerState::Alive);
        assert_eq!(server_state(Path::new("/no such file")), ServerState::Alive);
    }
}
