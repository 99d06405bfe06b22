//! Commands of an operator about the pods of a fixture.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::outcome::{Outcome, finish};
use super::{Fixture, PODFS, Running, eventually};

impl Fixture {
    /// A command about the pods of this fixture.
    pub fn operator(&self, command: &str) -> Command {
        let mut operator = Command::new(PODFS);
        operator.arg(command).arg("--run-dir").arg(self.path("run"));
        operator
    }

    /// `podfs status`, with these arguments.
    #[track_caller]
    pub fn status(&self, arguments: &[&str]) -> Outcome {
        finish(self.operator("status").args(arguments))
    }

    /// The pods of `podfs status --output json`.
    #[track_caller]
    pub fn pods(&self) -> Vec<Value> {
        let outcome = self.status(&["--output", "json"]);
        let mut document: Value = serde_json::from_str(&outcome.stdout).expect(&outcome.stderr);
        serde_json::from_value(document["pods"].take()).expect("pods")
    }

    /// `podfs cleanup`, with these arguments.
    #[track_caller]
    pub fn cleanup(&self, arguments: &[&str]) -> Outcome {
        finish(self.operator("cleanup").arg("--root-dir").arg(self.path("root")).args(arguments))
    }

    /// The run directory of the only pod.
    pub fn run_files(&self) -> PathBuf {
        let mut entries = fs::read_dir(self.path("run")).expect("a run directory");
        entries.next().expect("a pod").expect("an entry").path()
    }

    /// Kills the supervisor, then the server, which serves on without a supervisor.
    pub fn kill_both(&self, running: &mut Running) {
        let server = self.kill_supervisor(running);
        self.kill_server(server);
    }

    /// Kills a server that serves on without a supervisor.
    pub fn kill_server(&self, server: Pid) {
        kill(server, Signal::SIGKILL).expect("it is there");
        eventually("both have ended", || self.processes().is_empty());
        // The kernel frees the memory of a process that ends first, and closes its sockets a moment later. Without
        // memory, the process has no environment any more, by which `processes` finds it.
        let socket = self.run_files().join("server.sock");
        eventually("the socket is closed", || UnixStream::connect(&socket).is_err());
    }

    /// Kills the supervisor. Returns the server, which serves on.
    pub fn kill_supervisor(&self, running: &mut Running) -> Pid {
        let server = running.server();
        running.signal(Signal::SIGKILL);
        running.wait();
        server
    }
}

impl Running {
    /// The pod's uid, from the readiness object.
    pub fn uid(&self) -> String {
        self.json()["pod"]["uid"].as_str().expect("a uid").to_owned()
    }
}
