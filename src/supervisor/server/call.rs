//! The system call that a thread of a server is in, and the CPU time that it has used, from `/proc`.

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

/// The CPU time of a thread, in clock ticks (`proc_pid_stat(5)`: `utime`, `stime`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CpuTime {
    /// In the program.
    pub(super) user: u64,
    /// In the kernel.
    pub(super) system: u64,
}

impl CpuTime {
    /// The time that a thread of a process has used; `None` where `/proc` does not show it.
    pub(super) fn of(pid: i32, thread: i32) -> Option<CpuTime> {
        Self::parse(&fs::read_to_string(format!("/proc/{pid}/task/{thread}/stat")).ok()?)
    }

    fn parse(stat: &str) -> Option<CpuTime> {
        // The name of the thread, in parentheses before the state, may contain spaces and parentheses itself.
        let mut fields = stat.rsplit_once(") ")?.1.split_whitespace().skip(11).map(|field| field.parse().ok());
        Some(CpuTime { user: fields.next()??, system: fields.next()?? })
    }

    /// Whether the thread has worked in the kernel nearly all the time since it had used `before`.
    pub(super) fn is_in_kernel_since(self, before: CpuTime) -> bool {
        let (user, system) = (self.user.saturating_sub(before.user), self.system.saturating_sub(before.system));
        system > 0 && user * 10 <= system
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_in_a_long_system_call_works_in_the_kernel() {
        let time = |user, system| CpuTime { user, system };
        assert!(time(5, 200).is_in_kernel_since(time(5, 100)));
        assert!(!time(105, 100).is_in_kernel_since(time(5, 100)), "in the program");
        assert!(!time(45, 160).is_in_kernel_since(time(5, 100)), "one system call after the other");
        assert!(!time(5, 100).is_in_kernel_since(time(5, 100)), "it waits for a CPU");
    }

    #[test]
    fn the_time_of_a_thread_is_read() {
        let line = "7 (a ) b) R 1 7 7 0 -1 4194304 10 0 0 0 31 42 0 0 20 0 2 0 5 6 7";
        assert_eq!(CpuTime::parse(line), Some(CpuTime { user: 31, system: 42 }));
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        assert!(CpuTime::of(std::process::id().cast_signed(), thread).is_some());
    }
}
