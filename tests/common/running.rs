//! A podfs that runs: its readiness, its log, its processes, and its end.

use std::fs;
use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, ExitStatus};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::{TIMEOUT, eventually, kill_all_of, parent, processes_of, start_time};

/// A running podfs. Dropping it kills the process.
pub struct Running {
    pub(super) child: Child,
    pub(super) is_reaped: bool,
    pub(super) ready: Option<std::io::PipeReader>,
    pub(super) json: Value,
    pub(super) log: PathBuf,
    pub(super) directory: PathBuf,
}

impl Running {
    #[track_caller]
    pub fn wait_ready(&mut self) {
        let mut json = String::new();
        let ready = self.ready.as_ref().expect("readiness is read once");
        let mut poll = [nix::poll::PollFd::new(std::os::fd::AsFd::as_fd(ready), nix::poll::PollFlags::POLLIN)];
        let timeout = nix::poll::PollTimeout::try_from(TIMEOUT).expect("some minutes");
        assert!(nix::poll::poll(&mut poll, timeout).expect("poll") > 0, "podfs is not ready:\n{}", self.log());
        self.ready.take().expect("it is there").read_to_string(&mut json).expect("readiness");
        assert!(!json.is_empty(), "podfs ended before it was ready:\n{}", self.log());
        self.json = serde_json::from_str(&json).expect("readiness is JSON");
    }

    /// Whether podfs has reported readiness.
    pub fn is_ready(&mut self) -> bool {
        let Some(ready) = &self.ready else { return true };
        let mut poll = [nix::poll::PollFd::new(std::os::fd::AsFd::as_fd(ready), nix::poll::PollFlags::POLLIN)];
        nix::poll::poll(&mut poll, nix::poll::PollTimeout::ZERO).expect("poll") > 0
    }

    /// The readiness object, as podfs wrote it to `--ready-fd`.
    pub fn json(&self) -> &Value {
        &self.json
    }

    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).expect("a log")
    }

    #[track_caller]
    pub fn wait_log(&self, text: &str) {
        self.wait_log_times(text, 1);
    }

    /// Waits until the log has `text` at least `times` times.
    #[track_caller]
    pub fn wait_log_times(&self, text: &str, times: usize) {
        let deadline = Instant::now() + TIMEOUT;
        while self.log().matches(text).count() < times {
            assert!(Instant::now() < deadline, "not {times} times in the log: {text}\n{}", self.log());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    pub fn pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.child.id()).expect("a pid"))
    }

    /// The server process, once there is one.
    #[track_caller]
    pub fn server(&self) -> Pid {
        let mut server = None;
        eventually("there is a server", || {
            server = self.servers().pop();
            server.is_some()
        });
        server.expect("the closure has set it")
    }

    /// The keepers of servers' descriptors.
    pub fn keepers(&self) -> Vec<Pid> {
        self.children_of_kind(|comm| comm == "podfs-keeper\n")
    }

    /// The running servers, the youngest last.
    pub fn servers(&self) -> Vec<Pid> {
        let servers = self.children_of_kind(|comm| comm != "podfs-keeper\n" && comm != "podfs-wake\n");
        // A new keeper is a clone of its server, and has the server's name until it sets its own.
        servers.iter().copied().filter(|pid| !servers.contains(&parent(*pid))).collect()
    }

    /// Kills the server and its keeper at once. Then calls `access`, which needs a server, and returns its result.
    #[track_caller]
    pub fn kill_server_and_keeper<T>(&self, access: impl FnOnce() -> T) -> T {
        let server = self.server();
        let mut keepers = Vec::new();
        // A successor answers requests before the clone that becomes its keeper has set the name `podfs-keeper`.
        eventually("the server has a keeper", || {
            keepers = self.keepers();
            !keepers.is_empty()
        });
        // A stopped server starts no other keeper. The supervisor requests no successor as long as the server exists.
        let _ = kill(server, Signal::SIGSTOP);
        for process in keepers.into_iter().chain([server]) {
            let _ = kill(process, Signal::SIGKILL);
        }
        self.freed(access)
    }

    /// The children of podfs that have ended and that podfs has not reaped, as lines of `/proc/PID/stat`.
    pub fn zombies(&self) -> Vec<String> {
        let of_process = |entry: std::io::Result<fs::DirEntry>| {
            let stat = fs::read_to_string(entry.ok()?.path().join("stat")).ok()?;
            let fields = stat.rsplit_once(") ")?.1;
            let parent = fields.strip_prefix("Z ")?.split(' ').next()?.parse().ok()?;
            (Pid::from_raw(parent) == self.pid()).then_some(stat)
        };
        fs::read_dir("/proc").expect("processes").filter_map(of_process).collect()
    }

    /// The processes with the arguments of a server. They are not always children of this podfs: the supervisor may have
    /// adopted them.
    fn children_of_kind(&self, has_name: impl Fn(&str) -> bool) -> Vec<Pid> {
        let is_of_kind = |pid: &Pid| {
            let read = |name: &str| fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
            let words = read("cmdline");
            words.split(|byte| *byte == 0).nth(1) == Some(b"server")
                && has_name(&String::from_utf8_lossy(&read("comm")))
        };
        let mut children: Vec<_> = processes_of(&self.directory).into_iter().filter(is_of_kind).collect();
        children.sort_by_key(|pid| start_time(*pid));
        children
    }

    /// The result of `call`, which may need a server. If the call hangs, kills all processes of the fixture. Then the kernel
    /// ends the call with an error.
    pub fn freed<T>(&self, call: impl FnOnce() -> T) -> T {
        let (running, ended) = channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                if ended.recv_timeout(TIMEOUT) == Err(RecvTimeoutError::Timeout) {
                    eprintln!("a call hangs:\n{}", self.log());
                    kill_all_of(&self.directory);
                }
            });
            let result = call();
            drop(running);
            result
        })
    }

    /// The path of a volume, from the readiness object.
    #[track_caller]
    pub fn volume(&self, name: &str) -> PathBuf {
        let volumes = self.json["volumes"].as_array().expect("volumes");
        let volume = volumes.iter().find(|volume| volume["name"] == name).expect("a volume of this name");
        PathBuf::from(volume["path"].as_str().expect("a path"))
    }

    pub fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).expect("podfs is there");
    }

    /// Waits for the end of podfs.
    #[track_caller]
    pub fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                return status;
            }
            assert!(Instant::now() < deadline, "podfs does not end:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Notes that a tracer has reaped the process, so that the drop does not kill it: its id may belong to another process now.
    pub fn was_reaped(&mut self) {
        self.is_reaped = true;
    }

    #[track_caller]
    pub fn stop(&mut self) -> ExitStatus {
        self.signal(Signal::SIGTERM);
        self.wait()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.is_reaped {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        // The servers stay: a supervisor that the test starts later may adopt them. The drop of the fixture kills them.
    }
}
