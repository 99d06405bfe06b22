//! A node: a directory of manifests, and the `podfs node` that serves their pods.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{Fixture, PODFS, Running, TIMEOUT, eventually};

/// A node without a cluster.
pub struct Node {
    pub fixture: Fixture,
}

impl Node {
    pub fn new() -> Node {
        let fixture = Fixture::new("");
        fs::create_dir(fixture.path("manifests")).expect("a directory");
        Node { fixture }
    }

    /// `podfs node` on this node's manifests.
    pub fn command(&self) -> Command {
        let mut command = self.bare_command();
        command.arg("--manifests").arg(self.fixture.path("manifests"));
        command
    }

    /// `podfs node` without a source of pods.
    pub fn bare_command(&self) -> Command {
        let mut command = Command::new(PODFS);
        command.arg("node");
        command.arg("--root-dir").arg(self.fixture.path("root")).arg("--run-dir").arg(self.fixture.path("run"));
        command
    }

    /// Starts the daemon, and waits until it answers.
    #[track_caller]
    pub fn start(&self) -> Running {
        self.start_command(self.command())
    }

    #[track_caller]
    pub fn start_command(&self, mut command: Command) -> Running {
        let daemon = self.fixture.spawn(&mut command);
        let deadline = Instant::now() + TIMEOUT;
        while !self.ask(&["state"]).status.success() {
            assert!(Instant::now() < deadline, "the daemon does not answer:\n{}", daemon.log());
        }
        daemon
    }

    /// Puts a manifest file into the directory, whole.
    pub fn put(&self, name: &str, manifest: &str) {
        self.fixture.write(&format!("manifests/{name}"), manifest);
    }

    /// Removes a manifest file.
    pub fn remove(&self, name: &str) {
        self.fixture.remove(&format!("manifests/{name}"));
    }

    /// Waits until the daemon has looked for pods that are gone: it has removed an empty directory of such a pod.
    #[track_caller]
    pub fn wait_for_pass(&self) {
        let orphan = self.fixture.path("root/pods/uid-orphan");
        fs::create_dir_all(&orphan).expect("a directory");
        eventually("the directory of a pod that is gone is removed", || !orphan.exists());
    }

    /// Asks the daemon: `podfs node ARGUMENTS`.
    pub fn ask(&self, arguments: &[&str]) -> Output {
        // Tests repeat questions until a condition holds.
        std::thread::sleep(Duration::from_millis(10));
        let mut command = Command::new(PODFS);
        command.arg("node").args(arguments).arg("--run-dir").arg(self.fixture.path("run"));
        command.output().expect("podfs runs")
    }

    /// Asks the daemon, and returns its standard output. Fails the test if the command fails.
    #[track_caller]
    pub fn expect(&self, arguments: &[&str]) -> String {
        let Output { status, stdout, stderr } = self.ask(arguments);
        assert!(status.success(), "{arguments:?}: {}\n{}", String::from_utf8_lossy(&stderr), self.log());
        String::from_utf8(stdout).expect("text")
    }

    /// Asks the daemon, and returns the error. Fails the test if the command succeeds.
    #[track_caller]
    pub fn refused(&self, arguments: &[&str]) -> String {
        let Output { status, stderr, .. } = self.ask(arguments);
        assert!(!status.success(), "{arguments:?} is not refused");
        String::from_utf8(stderr).expect("text")
    }

    /// The log of the daemon and the supervisors.
    pub fn log(&self) -> String {
        fs::read_to_string(self.fixture.path("log")).unwrap_or_default()
    }

    /// The state of the pod with this name, if the daemon has it.
    pub fn pod(&self, name: &str) -> Option<Value> {
        let state: Value = serde_json::from_str(&self.expect(&["state", "--output", "json"])).expect("JSON");
        let pods = state["pods"].as_array().expect("pods");
        pods.iter().find(|pod| pod["name"] == name).cloned()
    }

    /// The state of a volume of a pod, if the daemon has it.
    pub fn volume(&self, pod: &str, volume: &str) -> Option<Value> {
        let pod = self.pod(pod)?;
        let volumes = pod["volumes"].as_array().expect("volumes");
        volumes.iter().find(|entry| entry["name"] == volume).cloned()
    }

    /// The path at which a volume of a pod is mounted. Fails the test if the daemon does not have it.
    #[track_caller]
    pub fn path(&self, pod: &str, volume: &str) -> PathBuf {
        let volume = self.volume(pod, volume).expect("the pod has the volume");
        PathBuf::from(volume["path"].as_str().expect("its path is known"))
    }

    /// The process id of a pod's supervisor. Fails the test if there is none.
    #[track_caller]
    pub fn supervisor(&self, pod: &str) -> nix::unistd::Pid {
        let pid = self.pod(pod).expect("the node has the pod")["supervisor"].as_i64().expect("it has a supervisor");
        nix::unistd::Pid::from_raw(i32::try_from(pid).expect("a pid"))
    }

    /// Whether podfs has removed the directories of the pod with this uid, its mounts, and its files in the run
    /// directory.
    pub fn is_clean(&self, uid: &str) -> bool {
        let is_there = |path: &Path| path.symlink_metadata().is_ok();
        let paths = [
            self.fixture.path("root/pods").join(uid),
            self.fixture.path("run").join(uid),
            self.fixture.path("run/node/pods").join(uid),
        ];
        !paths.iter().any(|path| is_there(path))
            && !self.fixture.mounts().iter().any(|at| at.to_string_lossy().contains(uid))
    }
}
