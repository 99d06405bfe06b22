//! The process of a FlexVolume driver, which leads a process group.
//!
//! podfs kills a group and waits until it has ended. podfs may be killed itself at any moment of that, and no order of the signal and of
//! a record of it tells the next podfs what has happened:
//! 1. *The record first.* A driver that ends by itself before the signal may leave a daemon, which is no part of the call. The next podfs
//!    would wait for this daemon, and never call a driver for the volume again.
//! 2. *The signal first.* The next podfs would find that the driver has ended, and not wait for a process of the group that the signal
//!    has not ended yet because it waits for a disk.
//!
//! So the next podfs asks the kernel. If the leader runs, podfs kills the group, for the first or the second time. If not, podfs waits
//! for the processes of the group that are *dying*: that have got SIGKILL, or are exiting. All others are daemons, which podfs leaves alone.

use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

/// How long a killed process may take to end: a system call on a disk or a server may delay it.
const END_TIMEOUT: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(5);

/// A process and the time when it started, which tells it from a later process with its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DriverProcess {
    pub(super) pid: i32,
    /// In clock ticks since the boot.
    pub(super) start: u64,
}

/// What a process group is after podfs has killed it, or found that its leader had ended before.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum EndedGroup {
    /// All processes that podfs waits for have ended.
    Ended,
    /// This one has not ended in time.
    Remains(i32),
}

/// The fields of a process that `proc_pid_stat(5)` describes.
struct ProcessStat {
    process: DriverProcess,
    state: char,
    group: i32,
    /// `PF_*` of the kernel.
    flags: u32,
}

/// The flag of a process that is exiting.
const PF_EXITING: u32 = 0x4;
/// SIGKILL in a set of signals.
const KILL_BIT: u64 = 1 << (libc::SIGKILL - 1);

impl ProcessStat {
    fn parse(line: &str) -> Option<ProcessStat> {
        let pid = line.split_once(' ')?.0.parse().ok()?;
        // The name of the program, in parentheses before the state, may contain spaces and parentheses itself.
        let fields: Vec<_> = line.rsplit_once(") ")?.1.split_whitespace().collect();
        let start = fields.get(19)?.parse().ok()?;
        let (state, group) = (fields.first()?.chars().next()?, fields.get(2)?.parse().ok()?);
        let flags = fields.get(6)?.parse().ok()?;
        Some(ProcessStat { process: DriverProcess { pid, start }, state, group, flags })
    }

    fn of(pid: &str) -> Option<ProcessStat> {
        Self::parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
    }

    /// Whether the process has not ended. A process that has ended is a zombie until its parent process reaps it.
    fn runs(&self) -> bool {
        !matches!(self.state, 'Z' | 'X' | 'x')
    }

    /// Whether the process will end without any further signal.
    fn is_dying(&self) -> bool {
        let status = || fs::read_to_string(format!("/proc/{}/status", self.process.pid)).unwrap_or_default();
        self.flags & PF_EXITING != 0 || is_killed(&status())
    }
}

/// Whether the process that `proc_pid_status(5)` describes has got SIGKILL.
fn is_killed(status: &str) -> bool {
    let pending = status.lines().filter_map(|line| line.strip_prefix("SigPnd:").or(line.strip_prefix("ShdPnd:")));
    pending.filter_map(|set| u64::from_str_radix(set.trim(), 16).ok()).any(|set| set & KILL_BIT != 0)
}

impl DriverProcess {
    /// The process that a line of `/proc/PID/stat` describes.
    pub(super) fn parse(line: &str) -> Option<DriverProcess> {
        ProcessStat::parse(line).map(|stat| stat.process)
    }

    /// Whether the process has not ended.
    pub(super) fn runs(&self) -> bool {
        ProcessStat::of(&self.pid.to_string()).is_some_and(|stat| stat.process == *self && stat.runs())
    }

    /// Kills the process group, if the leader runs. Otherwise its id may be that of another group. Returns whether the leader ran.
    pub(super) fn kill_group(self) -> bool {
        let leader = Pid::from_raw(self.pid).filter(|_| self.runs());
        if let Some(pid) = leader {
            // The group may end at this moment.
            let _ = kill_process_group(pid, Signal::KILL);
        }
        leader.is_some()
    }

    /// Waits for the end of the group: of all its processes if it `is_killed`, and otherwise of those that are dying.
    pub(super) fn wait_for_group(self, is_killed: bool) -> EndedGroup {
        let end = Instant::now() + END_TIMEOUT;
        loop {
            match self.member(|stat| is_killed || stat.is_dying()) {
                None => return EndedGroup::Ended,
                Some(pid) if Instant::now() > end => return EndedGroup::Remains(pid),
                Some(_) => sleep(PAUSE),
            }
        }
    }

    /// A process of the group that has not ended, and is of this kind.
    fn member(self, is_wanted: impl Fn(&ProcessStat) -> bool) -> Option<i32> {
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        let processes =
            names.filter(|name| name.starts_with(|c: char| c.is_ascii_digit())).filter_map(|pid| ProcessStat::of(&pid));
        let mut members = processes.filter(|stat| stat.group == self.pid && stat.process.start >= self.start);
        members.find(|stat| stat.runs() && is_wanted(stat)).map(|stat| stat.process.pid)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::process::Command;

    use super::*;

    #[test]
    fn a_process_with_the_id_of_an_earlier_one_is_another_process() {
        let mut sleep = Command::new("sleep").arg("1000").process_group(0).spawn().expect("started");
        let process = ProcessStat::of(&sleep.id().to_string()).expect("it runs").process;
        let earlier = DriverProcess { start: process.start + 1, ..process };
        assert!(!earlier.runs() && !earlier.kill_group());
        assert!(sleep.try_wait().expect("asked").is_none(), "it is not killed");
        assert!(process.runs() && process.kill_group());
        assert_eq!(process.wait_for_group(true), EndedGroup::Ended);
        assert!(!process.runs(), "a zombie has ended");
        sleep.wait().expect("it ends");
    }

    #[test]
    fn a_process_with_sigkill_is_told_from_one_with_another_signal() {
        assert!(is_killed("Name:\tdriver\nSigPnd:\t0000000000000100\nShdPnd:\t0000000000000000\n"));
        assert!(is_killed("SigPnd:\t0000000000000000\nShdPnd:\t0000000000000500\n"));
        assert!(!is_killed("SigPnd:\t0000000000004000\nShdPnd:\t0000000000000000\nSigBlk:\t0000000000000100\n"));
        assert!(!is_killed(&fs::read_to_string("/proc/self/status").expect("this process")));
    }
}
