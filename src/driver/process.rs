//! The process of a FlexVolume driver, which leads a process group.

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

/// What has become of a process group that podfs has killed.
pub(super) enum KilledGroup {
    Ended,
    /// This process of it has not ended in time.
    Remains(i32),
}

/// The fields of a process that `proc_pid_stat(5)` describes.
struct ProcessStat {
    process: DriverProcess,
    state: char,
    group: i32,
}

impl ProcessStat {
    fn parse(line: &str) -> Option<ProcessStat> {
        let pid = line.split_once(' ')?.0.parse().ok()?;
        // The name of the program, in parentheses before the state, may contain spaces and parentheses itself.
        let fields: Vec<_> = line.rsplit_once(") ")?.1.split_whitespace().collect();
        let start = fields.get(19)?.parse().ok()?;
        let (state, group) = (fields.first()?.chars().next()?, fields.get(2)?.parse().ok()?);
        Some(ProcessStat { process: DriverProcess { pid, start }, state, group })
    }

    fn of(pid: &str) -> Option<ProcessStat> {
        Self::parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
    }

    /// Whether the process has not ended. A process that has ended is a zombie until its parent process reaps it.
    fn runs(&self) -> bool {
        !matches!(self.state, 'Z' | 'X' | 'x')
    }
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

    /// Kills the process group, and waits until all its processes have ended. If the leader has ended before, podfs kills nothing:
    /// its id may be that of another group.
    pub(super) fn kill_group(self) -> KilledGroup {
        if let Some(pid) = Pid::from_raw(self.pid).filter(|_| self.runs()) {
            // The group may end at this moment.
            let _ = kill_process_group(pid, Signal::KILL);
        }
        let end = Instant::now() + END_TIMEOUT;
        loop {
            match self.member() {
                None => return KilledGroup::Ended,
                Some(pid) if Instant::now() > end => return KilledGroup::Remains(pid),
                Some(_) => sleep(PAUSE),
            }
        }
    }

    /// A process of the group that has not ended.
    fn member(self) -> Option<i32> {
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        let processes =
            names.filter(|name| name.starts_with(|c: char| c.is_ascii_digit())).filter_map(|pid| ProcessStat::of(&pid));
        let mut members = processes.filter(|stat| stat.group == self.pid && stat.process.start >= self.start);
        members.find(ProcessStat::runs).map(|stat| stat.process.pid)
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
        assert!(!earlier.runs() && matches!(earlier.kill_group(), KilledGroup::Ended));
        assert!(sleep.try_wait().expect("asked").is_none(), "it is not killed");
        assert!(process.runs() && matches!(process.kill_group(), KilledGroup::Ended));
        assert!(!process.runs(), "a zombie has ended");
        sleep.wait().expect("it ends");
    }
}
