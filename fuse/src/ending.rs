//! Threads that are ending: being killed, or past that.
//!
//! The kernel sends INTERRUPT for a caller that gets a signal, whatever the signal. As with Linux' own client, only a signal that
//! ends the process interrupts the call: the kernel turns such a signal into SIGKILL for each of the process's threads
//! (`complete_signal`), where it is seen in `SigPnd`. The kernel sends INTERRUPT for the first signal only, so podfs looks at an
//! interrupted caller again until it has its answer.
//!
//! Both are read from `/proc/<thread>/status`, which never blocks. Other files there do: a program that is executed closes files,
//! and waits for the answer to FLUSH, while it holds what `stat`, `cmdline` and others wait for.

use std::fs;

/// `SIGKILL` in a set of signals.
const KILL: u64 = 1 << (libc::SIGKILL - 1);

/// Whether a thread is being killed. A thread that cannot be seen from here (`pid` 0: in another pid namespace) might never be
/// ended, if every signal were taken for one that does not end it.
pub fn is_dying(pid: u32) -> bool {
    if pid == 0 {
        return true;
    }
    let Ok(status) = fs::read_to_string(format!("/proc/{pid}/status")) else { return true };
    let pending = |key| {
        let set = status.lines().find_map(|line| line.strip_prefix(key));
        set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).unwrap_or(0)
    };
    (pending("SigPnd:") | pending("ShdPnd:")) & KILL != 0
}

/// Whether a thread has got so far in ending that no signal reaches it: its memory goes before its files (`do_exit`).
pub fn is_exiting(pid: u32) -> bool {
    let Ok(status) = fs::read_to_string(format!("/proc/{pid}/status")) else { return true };
    !status.lines().any(|line| line.starts_with("VmSize:"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_lives_is_neither_dying_nor_exiting() {
        let pid = rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned();
        assert!(!is_dying(pid) && !is_exiting(pid));
        assert!(is_dying(0) && is_exiting(u32::MAX >> 1));
    }
}
