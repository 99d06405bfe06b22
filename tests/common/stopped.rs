//! A server, or its keeper, that does not answer for a while.

use std::fs;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{HANG, Served, eventually};

/// A stopped process. A call that needs the process hangs until it continues. That happens after [`HANG`] at the latest, so
/// that a test fails instead of hanging.
pub struct Stopped {
    server: Pid,
    end: Sender<()>,
    watchdog: Option<JoinHandle<bool>>,
}

impl Stopped {
    pub fn server(of: &Served) -> Self {
        Self::process(Pid::from_raw(i32::try_from(of.server.id()).expect("a pid")))
    }

    pub fn process(server: Pid) -> Self {
        kill(server, Signal::SIGSTOP).expect("it is there");
        let (end, ended) = channel();
        let watchdog = thread::spawn(move || {
            let hangs = ended.recv_timeout(HANG) == Err(RecvTimeoutError::Timeout);
            if hangs {
                let _ = kill(server, Signal::SIGCONT);
            }
            hangs
        });
        let stopped = Self { server, end, watchdog: Some(watchdog) };
        eventually("every thread is stopped", || all_stopped(server));
        stopped
    }

    /// Lets the process continue. Returns an error if the watchdog has already continued it: then a call needed the process.
    pub fn was_not_needed(mut self) -> Result<(), String> {
        let _ = self.end.send(());
        let hung = self.watchdog.take().expect("it runs until here").join().expect("it does not panic");
        if hung { Err("a call waited for the server".to_owned()) } else { Ok(()) }
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = kill(self.server, Signal::SIGCONT);
        let _ = self.end.send(());
        if let Some(watchdog) = self.watchdog.take() {
            let _ = watchdog.join();
        }
    }
}

/// Whether all threads of a process are stopped, or have ended while this reads the list. The state follows the name in
/// parentheses (`proc_pid_stat(5)`).
pub fn all_stopped(process: Pid) -> bool {
    let threads = fs::read_dir(format!("/proc/{process}/task")).expect("a process").flatten();
    let mut states = threads.filter_map(|thread| fs::read_to_string(thread.path().join("stat")).ok());
    states.all(|stat| stat.rsplit_once(") ").is_some_and(|(_, fields)| fields.starts_with('T')))
}
