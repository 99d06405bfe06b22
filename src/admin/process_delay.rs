//! Why a process does not answer, as far as the kernel shows it.

use std::fs;

/// What may delay a process that does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessDelay {
    /// A signal or a debugger has stopped it.
    Stopped,
    /// A thread of it is in a system call that no signal ends.
    Disk,
}

impl ProcessDelay {
    /// What delays the process with this id now; `None` if the kernel shows nothing.
    pub fn of(pid: u32) -> Option<ProcessDelay> {
        let threads = fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten();
        let states: Vec<_> =
            threads.filter_map(|thread| state(&fs::read_to_string(thread.path().join("stat")).ok()?)).collect();
        if states.iter().any(|state| matches!(state, 'T' | 't')) {
            return Some(ProcessDelay::Stopped);
        }
        states.contains(&'D').then_some(ProcessDelay::Disk)
    }

    /// The sentence for people.
    pub fn sentence(self) -> &'static str {
        match self {
            ProcessDelay::Stopped => "it is stopped; SIGCONT continues it",
            ProcessDelay::Disk => {
                "it waits in a system call, as for a disk that is slow, frozen or failing; its log names the step"
            }
        }
    }
}

/// The state of a thread (`proc_pid_stat(5)`). The name before it may contain parentheses.
fn state(stat: &str) -> Option<char> {
    stat.rsplit_once(") ")?.1.chars().next()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use nix::sys::signal::{Signal, kill};
    use nix::sys::wait::{WaitPidFlag, waitpid};
    use nix::unistd::Pid;

    use super::*;

    #[test]
    fn a_stopped_process_is_told_from_one_that_sleeps() {
        let mut child = Command::new("sleep").arg("60").spawn().expect("a process");
        assert_ne!(ProcessDelay::of(child.id()), Some(ProcessDelay::Stopped));
        let pid = Pid::from_raw(child.id().cast_signed());
        kill(pid, Signal::SIGSTOP).expect("it is there");
        waitpid(pid, Some(WaitPidFlag::WUNTRACED)).expect("it stops");
        assert_eq!(ProcessDelay::of(child.id()), Some(ProcessDelay::Stopped));
        child.kill().expect("it is there");
        child.wait().expect("it ends");
        assert_eq!(ProcessDelay::of(child.id()), None);
    }

    #[test]
    fn a_name_with_parentheses_hides_no_state() {
        assert_eq!(state("12 (a) T (b)) D 1 2"), Some('D'));
    }
}
