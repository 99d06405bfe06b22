//! The system call that a thread of a server is in, from `/proc`.

use std::fs;

/// What a thread is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    /// Its own code, or it is about to go on with that.
    Running,
    /// The system call of this number.
    In(libc::c_long),
}

/// What a thread of a process is doing; none where `/proc` does not say.
pub(super) fn call(pid: i32, thread: i32) -> Option<Call> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{thread}/syscall")).ok()?;
    match text.split_whitespace().next()? {
        "running" => Some(Call::Running),
        number => number.parse().ok().map(Call::In),
    }
}
