//! Whether a caller is being killed, or has ended.
//!
//! When a caller gets any signal, the kernel sends INTERRUPT for its request. Like Linux' own NFS client, podfs interrupts a
//! call only if the signal ends the process: the kernel turns such a signal into SIGKILL for
//! each of the process's threads (`complete_signal`), where `SigPnd` shows it. The kernel sends INTERRUPT for the first signal
//! only. So podfs checks an interrupted caller again until it has answered it.

use rustix::process::Signal;

use super::status::ThreadStatus;

/// `SIGKILL` in a set of signals.
const KILL: u64 = 1 << (Signal::KILL.as_raw() - 1);

/// Whether a thread is being killed. A thread that this process cannot see (`pid` 0: in another pid namespace) counts as killed:
/// otherwise no signal could end its call.
pub fn is_dying(pid: u32) -> bool {
    status_of_caller(pid).is_none_or(|status| is_killed(&status))
}

/// Whether a thread is so far in exit that no signal reaches it. The kernel frees its memory before it closes its files
/// (`do_exit`).
pub fn is_exiting(pid: u32) -> bool {
    status_of_caller(pid).is_none_or(|status| has_no_memory(&status))
}

/// Whether a thread no longer needs the answer to its request. If this process cannot see the thread, the result is `interrupted`:
/// whether the kernel has sent INTERRUPT for the request.
pub fn has_given_up(pid: u32, interrupted: bool) -> bool {
    status_of_caller(pid).map_or(interrupted, |status| is_killed(&status) || has_no_memory(&status))
}

/// Whether a thread has a pending signal that it does not block; `false` if this process cannot see the thread.
pub fn has_signal(pid: u32) -> bool {
    let waits = |status: &ThreadStatus| (status.bits("SigPnd") | status.bits("ShdPnd")) & !status.bits("SigBlk") != 0;
    status_of_caller(pid).as_ref().is_some_and(waits)
}

fn status_of_caller(pid: u32) -> Option<ThreadStatus> {
    if pid == 0 { None } else { ThreadStatus::of(pid) }
}

fn is_killed(status: &ThreadStatus) -> bool {
    (status.bits("SigPnd") | status.bits("ShdPnd")) & KILL != 0
}

fn has_no_memory(status: &ThreadStatus) -> bool {
    status.values("VmSize").is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ended_process_is_exiting_before_its_parent_takes_its_status() {
        let mut child = std::process::Command::new("true").spawn().expect("started");
        while !is_exiting(child.id()) {
            std::thread::yield_now();
        }
        child.wait().expect("ended");
        assert!(is_exiting(child.id()));
    }

    #[test]
    fn a_thread_that_runs_is_not_dying_and_needs_its_answer() {
        let pid = rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned();
        assert!(!is_dying(pid) && !is_exiting(pid) && !has_given_up(pid, true) && !has_signal(pid));
    }

    #[test]
    fn of_a_thread_that_cannot_be_seen_the_interrupt_decides() {
        for unseen in [0, u32::MAX >> 1] {
            assert!(is_dying(unseen) && is_exiting(unseen));
            assert!(has_given_up(unseen, true) && !has_given_up(unseen, false));
        }
    }
}
