//! The call to a driver that has not ended yet: a file that another process finds if this one is killed.
//!
//! A driver that still works may mount after podfs has called it to unmount. So the calls for a volume are serial, also those of two
//! processes:
//! 1. A process holds the lock of a volume's home ([`DriverHome::lock`](super::DriverHome::lock)), or the lock of a node mount, from
//!    before a call to after its end. The kernel releases the lock of a killed process.
//! 2. podfs writes the file `call` before the call, and removes it after the answer. It is in the home, or in the directory of the
//!    node mount. So a process that gets the lock and finds the file knows that a killed process has not got an answer.
//! 3. The program of a FlexVolume driver adds its process to the file before it executes. podfs kills the process group of that
//!    process, and waits until it has ended, before it calls the driver again (`process`). If it does not end, the call fails, and the
//!    file and the record of the volume stay.
//! 4. podfs cannot end a call to a CSI driver, which is a service. The next call to mount only repeats that call, so it needs no wait:
//!    a driver has to be idempotent. But podfs does not call the driver to unmount, and keeps the record, until the longest duration
//!    of the unfinished call is over, or the driver has mounted.
//!
//! No call outlives the machine, so the file need not reach the disk, and names the boot.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use super::DriverError;
use super::process::{DriverProcess, EndedGroup};
use crate::host::global_mount::boot_id;
use crate::types::{is_blank, parse_record};

const CALL: &str = "call";
/// The line of the file after the process group is killed, for earlier versions of podfs, which wait for the group only then.
const KILLED: &str = "killed";

/// Where podfs records a call: the directory of a home or of a node mount.
#[derive(Clone, Debug)]
pub(super) struct CallRecord {
    file: PathBuf,
    home: PathBuf,
}

/// A call that has not ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct UnfinishedCall {
    /// The directory of the home for which podfs has made the call.
    home: PathBuf,
    /// The command or method.
    call: String,
    /// The kernel's id of the boot.
    boot: String,
    /// When the call began, in seconds since the boot.
    began: u64,
}

impl CallRecord {
    /// The record of a call for the volume of a pod, whose home is this directory.
    pub(super) fn of_home(home: &Path) -> CallRecord {
        CallRecord { file: home.join(CALL), home: home.to_owned() }
    }

    /// The record of a call for the mount of the node in `directory`, which a pod with this home makes. The caller holds the lock of
    /// the mount.
    pub(super) fn of_node_mount(directory: &Path, home: &Path) -> CallRecord {
        CallRecord { file: directory.join(CALL), home: home.to_owned() }
    }

    /// Whether there is a record.
    pub(super) fn exists(&self) -> bool {
        self.file.exists()
    }

    /// Writes the record before a call. The process of a driver adds itself to the open file.
    ///
    /// # Errors
    /// The kernel's error.
    pub(super) fn begin(&self, call: &str) -> io::Result<File> {
        let call = UnfinishedCall {
            home: self.home.clone(),
            call: call.to_owned(),
            boot: boot_id()?,
            began: seconds_since_boot(),
        };
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&self.file)?;
        file.write_all(format!("{}\n", serde_json::to_string(&call)?).as_bytes())?;
        Ok(file)
    }

    /// Removes the record after the answer.
    pub(super) fn end(&self) {
        // A file that stays delays the unmount of the volume, for a CSI driver by the longest duration of a call.
        let _ = std::fs::remove_file(&self.file);
    }

    /// Kills the process of a FlexVolume driver that an earlier call has left, with its process group, and waits for its end.
    ///
    /// # Errors
    /// When it does not end.
    pub(super) fn end_driver(&self) -> Result<(), DriverError> {
        let Some((call, rest)) = self.read()? else { return Ok(()) };
        if let Some(process) = rest.lines().find_map(DriverProcess::parse) {
            self.kill(&call.call, process)?;
        }
        self.end();
        Ok(())
    }

    /// As [`Self::end_driver`], while another thread waits for the call. Does nothing to a call of another pod. The other thread
    /// removes the record. Returns whether there was a process to kill.
    ///
    /// # Errors
    /// When it does not end.
    pub(super) fn interrupt_driver(&self) -> Result<bool, DriverError> {
        let Some((call, rest)) = self.read()?.filter(|(call, _)| call.home == self.home) else { return Ok(false) };
        let process = rest.lines().find_map(DriverProcess::parse).filter(DriverProcess::runs);
        process.map_or(Ok(false), |process| self.kill(&call.call, process).map(|()| true))
    }

    fn kill(&self, call: &str, process: DriverProcess) -> Result<(), DriverError> {
        let is_killed = process.kill_group();
        if is_killed {
            // Another thread may have removed the file. Without the line, this version finds out the same (`process`).
            let _ = OpenOptions::new().append(true).open(&self.file).and_then(|mut file| writeln!(file, "{KILLED}"));
        }
        match process.wait_for_group(is_killed) {
            EndedGroup::Ended => Ok(()),
            EndedGroup::Remains(pid) => Err(DriverError::uncertain(format!(
                "the process {pid} of a driver, which podfs has called to {call}, does not end although podfs has killed it; podfs \
                 calls the driver again when it has ended"
            ))),
        }
    }

    /// How long the driver may still execute the call of a process that was killed.
    ///
    /// # Errors
    /// When this version of podfs cannot read the record.
    pub(super) fn remaining(&self, longest: Duration) -> Result<Option<(String, Duration)>, DriverError> {
        let Some((call, _)) = self.read()? else { return Ok(None) };
        let gone = Duration::from_secs(seconds_since_boot().saturating_sub(call.began));
        Ok(longest.checked_sub(gone).filter(|rest| !rest.is_zero()).map(|rest| (call.call, rest)))
    }

    /// The call, and the lines after it.
    fn read(&self) -> Result<Option<(UnfinishedCall, String)>, DriverError> {
        let failed = |error: io::Error| DriverError::of_node("read", &self.file, error);
        let bytes = match std::fs::read(&self.file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            read => read.map_err(failed)?,
        };
        // podfs was killed before it had written the line, and so before the call.
        let Some(end) = bytes.iter().position(|byte| *byte == b'\n').filter(|_| !is_blank(&bytes)) else {
            return Ok(None);
        };
        let call: UnfinishedCall = parse_record(&bytes[..end]).map_err(|error| {
            let sentence = format!(
                "podfs does not know whether a call to a driver goes on, because it cannot use {}: {error}; see that the driver has \
                 ended, then remove the file",
                self.file.display()
            );
            DriverError::because(sentence, error)
        })?;
        let is_of_this_boot = call.boot == boot_id().map_err(failed)?;
        Ok(is_of_this_boot.then(|| (call, String::from_utf8_lossy(&bytes[end + 1..]).into_owned())))
    }
}

/// The time since the machine started, which no other clock changes.
fn seconds_since_boot() -> u64 {
    u64::try_from(clock_gettime(ClockId::Boottime).tv_sec).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::golden::{CHANGED, golden};

    fn record() -> (tempfile::TempDir, CallRecord) {
        let base = tempfile::tempdir().expect("a directory");
        let record = CallRecord::of_home(base.path());
        (base, record)
    }

    #[test]
    fn a_call_has_the_bytes_that_other_versions_read() {
        let recorded = golden!("driver-calls.txt");
        let (line, rest) = recorded.split_once('\n').expect("a line");
        let call: UnfinishedCall = serde_json::from_str(line).expect("a call");
        assert_eq!(serde_json::to_string(&call).expect("text"), line, "{CHANGED}");
        let process = rest.lines().find_map(DriverProcess::parse);
        assert_eq!(process, Some(DriverProcess { pid: 7, start: 4711 }), "{CHANGED}");
        assert_eq!(rest.lines().last(), Some(KILLED), "{CHANGED}");
    }

    #[test]
    fn a_call_goes_on_for_its_longest_duration_and_not_after_a_reboot() {
        let (_base, record) = record();
        let longest = Duration::from_secs(120);
        assert!(record.remaining(longest).expect("read").is_none());
        record.begin("mount").expect("written");
        let (call, rest) = record.remaining(longest).expect("read").expect("it may go on");
        assert!(call == "mount" && rest <= longest && rest > Duration::from_secs(60), "{rest:?}");
        assert!(record.remaining(Duration::ZERO).expect("read").is_none());
        let text = std::fs::read_to_string(&record.file).expect("a record");
        let change = |from: &str, to: &str| {
            std::fs::write(&record.file, text.replace(from, to)).expect("written");
            record.remaining(longest)
        };
        assert!(change(&boot_id().expect("a boot"), "b").expect("read").is_none());
        let refused = change("{", r#"{"version":2,"#).expect_err("unknown");
        assert!(refused.sentence.contains("it has version 2, and this podfs reads version 1"), "{refused}");
        record.end();
        assert!(!record.exists());
    }

    #[test]
    fn a_call_of_another_pod_is_not_interrupted() {
        let (_base, record) = record();
        let mut file = record.begin("mountdevice").expect("written");
        let mut sleep = std::process::Command::new("sleep").arg("1000").spawn().expect("started");
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", sleep.id())).expect("a process");
        file.write_all(stat.as_bytes()).expect("written");
        let other = CallRecord { home: PathBuf::from("/other"), ..record.clone() };
        assert!(!other.interrupt_driver().expect("nothing to do"));
        assert!(sleep.try_wait().expect("asked").is_none());
        sleep.kill().and_then(|()| sleep.wait()).expect("it ends");
    }

    #[test]
    fn a_daemon_of_a_driver_that_ended_before_the_signal_does_not_delay_the_next_call() {
        use std::os::unix::process::CommandExt;

        let (base, record) = record();
        let mut file = record.begin("mount").expect("written");
        // The leader of the group leaves a daemon, and ends after podfs has written that it kills the group, but before the signal.
        let script = "cat /proc/$$/stat; sleep 1000 > /dev/null 2>&1 & echo $! > \"$1\"";
        let daemon = base.path().join("daemon");
        let mut leader = std::process::Command::new("sh");
        leader.args(["-c", script, "sh"]).arg(&daemon).process_group(0);
        let output = leader.output().expect("it ends");
        file.write_all(&output.stdout).and_then(|()| writeln!(file, "{KILLED}")).expect("written");
        let ended = record.end_driver();
        let pid = std::fs::read_to_string(&daemon).expect("started").trim().parse().expect("a number");
        let pid = rustix::process::Pid::from_raw(pid).expect("a process");
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it goes on");
        ended.expect("the driver has ended");
        assert!(!record.exists());
    }
}
