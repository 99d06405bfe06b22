//! Calls a FlexVolume driver: executes its program with a command and arguments, and parses its JSON output.
//!
//! The driver's output goes to a file in memory, not to a pipe, because a daemon that the driver starts may keep a pipe open. The
//! file takes [`MOST_OUTPUT`] bytes. The driver's process adds itself to the record of the call before it executes the program, so
//! podfs finds the process whenever podfs is killed. After the time limit, podfs kills the driver's process group.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags, open};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use serde::Deserialize;
use tracing::warn;

use crate::driver::unfinished::CallRecord;
use crate::driver::{DriverError, quoted};
use crate::host::bounded_file::{bounded_file, content};

/// Most bytes of output. What a driver writes beyond that is lost.
const MOST_OUTPUT: u64 = 1 << 20;

/// Environment variables with which the service manager addresses podfs. Drivers do not get them.
const OF_PODFS: [&str; 7] =
    ["NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "MAINPID"];

/// The answer of a driver.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct DriverAnswer {
    status: String,
    message: String,
    /// The path of the attached device.
    pub(super) device: String,
    /// The driver's name of the volume.
    pub(super) volume_name: String,
    pub(super) attached: bool,
    pub(super) capabilities: FlexCapabilities,
}

/// The capabilities of a driver. Each is true unless the driver denies it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct FlexCapabilities {
    /// Whether volumes have to be attached to the node.
    pub(super) attach: bool,
    /// Whether podfs changes the group of a volume to the pod's.
    pub(super) fs_group: bool,
}

impl Default for FlexCapabilities {
    fn default() -> FlexCapabilities {
        FlexCapabilities { attach: true, fs_group: true }
    }
}

/// Calls a driver. `None` if it does not support the command. An earlier call with this record ends first.
///
/// # Errors
/// When the driver cannot be started, fails, is killed, or does not end within `deadline`. In the last two cases, it may have executed
/// the command.
pub(super) fn call(
    program: &Path,
    arguments: &[&str],
    deadline: Duration,
    record: &CallRecord,
) -> Result<Option<DriverAnswer>, DriverError> {
    record.end_driver()?;
    let command = arguments.first().copied().unwrap_or_default();
    let at = |what: &str| format!("FlexVolume driver {}: {command} {what}", program.display());
    let cannot = |error: io::Error| DriverError::because(at(&format!("cannot be called: {error}")), error);
    let mut output = bounded_file(MOST_OUTPUT).map_err(cannot)?;
    let recorded = record.begin(command).map_err(cannot)?;
    let mut process = Command::new(program);
    process.args(arguments).stdin(Stdio::null()).process_group(0);
    process.stdout(output.try_clone().map_err(cannot)?).stderr(output.try_clone().map_err(cannot)?);
    for variable in OF_PODFS {
        process.env_remove(variable);
    }
    // SAFETY: the child makes system calls only, on memory and descriptors of its own.
    unsafe { process.pre_exec(move || add_own_process(recorded.as_fd())) };
    let spawned = process.spawn().map_err(|error| {
        record.end();
        cannot(error)
    })?;
    let mut child = RunningDriver(spawned);
    if !child.ends_within(deadline).map_err(cannot)? {
        // If they do not end, the next call waits for them.
        match record.interrupt_driver() {
            Ok(_) => record.end(),
            Err(error) => warn!("{error}"),
        }
        let seconds = deadline.as_secs();
        return Err(DriverError::uncertain(at(&format!("has not ended for {seconds} s; the driver was killed"))));
    }
    let code = child.0.wait().map_err(cannot)?.code();
    record.end();
    let text = content(&mut output, MOST_OUTPUT).map_err(cannot)?;
    let Ok(answer) = serde_json::from_slice::<DriverAnswer>(&text) else {
        let ended = code.map_or("was killed".to_owned(), |code| format!("ended with code {code}"));
        let length = text.len();
        let sentence = at(&format!("{ended}, and its output of {length} bytes is no JSON object"));
        // A process of its group may go on for a moment.
        return Err(DriverError { is_uncertain: code.is_none(), ..DriverError::refused(sentence) });
    };
    match (answer.status.as_str(), code) {
        ("Not supported", _) => Ok(None),
        ("Success", Some(0)) => Ok(Some(answer)),
        ("Success", _) => {
            Err(DriverError::refused(at("ended with an error and says that it succeeded; ask its vendor")))
        }
        (status, _) => {
            let status = if status.is_empty() { "no status" } else { status };
            let reason = quoted(&answer.message);
            Err(DriverError::refused(at(&format!("failed, status: {status:?}, reason: {reason}"))))
        }
    }
}

/// Adds this process to the record of a call, as `/proc/self/stat` describes it. Between fork and exec, this must not allocate.
fn add_own_process(record: BorrowedFd<'_>) -> io::Result<()> {
    let stat = open(c"/proc/self/stat", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut line = [0; 1024];
    let length = rustix::io::read(&stat, &mut line)?;
    rustix::io::write(record, &line[..length])?;
    Ok(())
}

/// A running driver. If it still runs when it is dropped, podfs kills its process group, and a thread reaps the process.
struct RunningDriver(Child);

impl RunningDriver {
    fn ends_within(&mut self, deadline: Duration) -> io::Result<bool> {
        let pidfd = pidfd_open(self.pid(), PidfdFlags::empty())?;
        let timeout = Timespec::try_from(deadline).map_err(io::Error::other)?;
        let end = std::time::Instant::now() + deadline;
        let mut remaining = timeout;
        loop {
            match poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&remaining)) {
                Ok(count) => return Ok(count > 0),
                Err(rustix::io::Errno::INTR) => {
                    remaining = Timespec::try_from(end.saturating_duration_since(std::time::Instant::now()))
                        .map_err(io::Error::other)?;
                }
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.0)
    }
}

impl Drop for RunningDriver {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(Some(_))) {
            return;
        }
        let pid = self.pid();
        let _ = kill_process_group(pid, Signal::KILL);
        let wait = move || {
            let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty());
        };
        // Without the thread, the driver stays a zombie until podfs ends.
        let _ = std::thread::Builder::new().name("flexvolume".to_owned()).spawn(wait);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::path::PathBuf;

    use super::*;

    fn driver(script: &str) -> (tempfile::TempDir, PathBuf) {
        let base = tempfile::tempdir().expect("a directory");
        let path = base.path().join("driver");
        // Another process writes the file. If this one did, a process that another test forks meanwhile would have the file open for
        // writing, too, and the kernel would refuse to execute it.
        let mut install = Command::new("install");
        let mut install =
            install.args(["-m", "755", "/dev/stdin"]).arg(&path).stdin(Stdio::piped()).spawn().expect("started");
        write!(install.stdin.take().expect("a pipe"), "#!/bin/sh\n{script}\n").expect("written");
        assert!(install.wait().expect("it ends").success());
        (base, path)
    }

    fn record(base: &tempfile::TempDir) -> CallRecord {
        CallRecord::of_home(base.path())
    }

    fn answer(script: &str) -> Result<Option<DriverAnswer>, DriverError> {
        let (base, path) = driver(script);
        let answer = call(&path, &["mount", "/m"], Duration::from_secs(30), &record(&base));
        assert!(!record(&base).exists(), "the call has ended");
        answer
    }

    #[test]
    fn fx_01_a_driver_answers_with_json() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let init = r#"echo '{"status": "Success", "capabilities": {"attach": false}}'"#;
        let answer = answer(init).expect("an answer").expect("supported");
        assert_eq!(answer.capabilities, FlexCapabilities { attach: false, fs_group: true });
    }

    #[test]
    fn fx_01_a_driver_need_not_know_each_command() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        assert!(matches!(answer(r#"echo '{"status": "Not supported"}'; exit 1"#), Ok(None)));
    }

    #[test]
    fn fx_02_each_failure_of_a_driver_is_one_sentence() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        for (script, expected) in [
            (
                r#"echo '{"status": "Failure", "message": "no such disk"}'; exit 1"#,
                "status: \"Failure\", reason: no such disk",
            ),
            ("echo hunter2", "mount ended with code 0, and its output of 8 bytes is no JSON object"),
            ("yes 2>&1", "is no JSON object"),
            ("yes > /dev/stdout; yes > /dev/stderr", "and its output of 1048576 bytes is no JSON object"),
            (r#"echo '{"status": "Success"}'; exit 3"#, "ended with an error and says that it succeeded"),
            ("echo '{}'", "status: \"no status\""),
        ] {
            let error = answer(script).expect_err(script);
            assert!(error.sentence.contains(expected) && !error.is_uncertain, "{error}");
            assert!(!error.sentence.contains("hunter2"), "output may hold secrets");
        }
        let base = tempfile::tempdir().expect("a directory");
        let absent = call(Path::new("/nowhere/driver"), &["init"], Duration::from_secs(1), &record(&base));
        let error = absent.expect_err("absent");
        assert!(error.sentence.contains("init cannot be called: No such file"), "{error}");
        let killed = answer("kill -9 $$").expect_err("killed");
        assert!(killed.sentence.ends_with("mount was killed, and its output of 0 bytes is no JSON object"), "{killed}");
        assert!(killed.is_uncertain, "its children may have done it");
    }

    #[test]
    fn fx_02_a_driver_that_hangs_is_killed_with_its_children_and_may_have_done_it() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let (base, path) = driver("sleep 1000 & echo $! > \"$(dirname \"$0\")/child\"; wait");
        let error = call(&path, &["mount"], Duration::from_secs(1), &record(&base)).expect_err("it hangs");
        assert!(
            error.is_uncertain && error.sentence.ends_with("has not ended for 1 s; the driver was killed"),
            "{error}"
        );
        let child = std::fs::read_to_string(base.path().join("child")).expect("started");
        let status = || std::fs::read_to_string(format!("/proc/{}/stat", child.trim())).unwrap_or_default();
        while !status().is_empty() && !status().contains(") Z ") {
            std::thread::yield_now();
        }
    }

    #[test]
    fn fx_02_a_daemon_that_a_driver_leaves_behind_does_not_delay_the_answer() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let script = r#"sleep 1000 & echo $! > "$(dirname "$0")/child"; echo '{"status": "Success"}'"#;
        let (base, path) = driver(script);
        let answer = call(&path, &["mount"], Duration::from_secs(30), &record(&base)).expect("an answer");
        let child = std::fs::read_to_string(base.path().join("child")).expect("started");
        let pid = Pid::from_raw(child.trim().parse().expect("a number")).expect("a process");
        rustix::process::kill_process(pid, Signal::KILL).expect("it goes on");
        assert!(answer.is_some());
    }
}
