//! A file system of the host that does not answer for a while.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::eventually;

/// A file system whose server, bindfs, can be stopped. It is mounted over a directory and shows that directory.
pub struct Stoppable {
    process: Child,
}

impl Stoppable {
    pub fn over(directory: &Path) -> Self {
        Self::with_arguments(directory, &[])
    }

    /// As [`Self::over`], with further arguments of bindfs.
    pub fn with_arguments(directory: &Path, arguments: &[&str]) -> Self {
        let mut command = Command::new("bindfs");
        command.arg("-f").args(arguments).arg(directory).arg(directory).stdout(Stdio::null()).stderr(Stdio::null());
        let process = command.spawn().expect("bindfs, which tests/run installs");
        let mounted =
            || fs::read_to_string("/proc/self/mountinfo").expect("a table").contains(directory.to_str().expect("text"));
        eventually("bindfs has mounted", mounted);
        Self { process }
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.process.id() as i32), signal).expect("it is there");
    }
}

impl Drop for Stoppable {
    fn drop(&mut self) {
        // The end of bindfs ends the calls that wait for it, also when a test fails.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
