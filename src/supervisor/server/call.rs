//! The system call that a thread of a server is in, from `/proc`.

use std::fs;

/// The system call of a thread, if it is in one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    /// The thread is in no system call: it runs, or waits for a CPU.
    Running,
    /// The thread waits in the system call of this number.
    In(libc::c_long),
}

/// The system call of a thread of a process; `None` where `/proc` does not show it.
pub(super) fn call(pid: i32, thread: i32) -> Option<Call> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{thread}/syscall")).ok()?;
    match text.split_whitespace().next()? {
        "running" => Some(Call::Running),
        number => number.parse().ok().map(Call::In),
    }
}
