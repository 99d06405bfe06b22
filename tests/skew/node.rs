//! `podfs node`: a daemon of one version with the pods that a daemon of the other has started, and questions of one version's commands
//! to the other's daemon.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::sys::signal::{Signal, kill};
use serde_json::Value;
use tempfile::TempDir;

use crate::common::builds::{Builds, upgrade};
use crate::common::node::Node;
use crate::common::outcome::{Outcome, finish};
use crate::common::passthrough::disk_directory;
use crate::common::*;
use crate::previous::First;

const POD: &str = "
apiVersion: v1
kind: Pod
metadata: {name: web, uid: uid-skew, labels: {app: web}}
spec:
  volumes:
  - {name: config, configMap: {name: app}}
  - {name: keys, secret: {secretName: keys}}
  - {name: labels, downwardAPI: {items: [{path: labels, fieldRef: {fieldPath: metadata.labels}}]}}
  - {name: host, hostPath: {path: SOURCE}}
  - {name: scratch, emptyDir: {}}
  - {name: memory, emptyDir: {medium: Memory}}
  - {name: limited, emptyDir: {sizeLimit: 64Mi}}
  containers:
  - name: c
    image: none
    volumeMounts:
    - {name: config, mountPath: /config}
    - {name: keys, mountPath: /keys}
    - {name: labels, mountPath: /labels}
    - {name: host, mountPath: /host}
    - {name: scratch, mountPath: /scratch}
    - {name: memory, mountPath: /memory}
    - {name: limited, mountPath: /limited}
";
const WRITABLE: [&str; 4] = ["host", "scratch", "memory", "limited"];

/// A node with a pod. Fields are dropped in this order.
struct Served {
    daemon: Running,
    builds: Builds,
    open: Vec<File>,
    paths: Vec<(&'static str, PathBuf)>,
    number: u32,
    node: Node,
    _source: TempDir,
}

impl Served {
    fn start(first: First) -> Served {
        let (node, source) = (Node::new(), disk_directory());
        let builds = first.builds(&node.fixture);
        node.put("keys.yaml", &secret("keys", &[("k", "secret")]));
        node.put("app.yaml", &config_map("app", &[("a", "0")]));
        node.put("web.yaml", &POD.replace("SOURCE", source.path().to_str().expect("text")));
        let daemon = daemon(&node, &builds);
        let mut served =
            Served { daemon, builds, open: Vec::new(), paths: Vec::new(), number: 0, node, _source: source };
        served.ask(&served.builds.program(), &["wait", "default/web", "--timeout", "120"]);
        let names = ["config", "keys", "labels"].into_iter().chain(WRITABLE);
        served.paths = names.map(|name| (name, served.node.path("web", name))).collect();
        served.open = WRITABLE.map(|name| File::create(served.path(name).join("open")).expect("a file")).into();
        served
    }

    fn path(&self, name: &str) -> &Path {
        &self.paths.iter().find(|(of, _)| *of == name).expect("a volume").1
    }

    /// Asks the daemon by the podfs at a path, and returns its standard output.
    #[track_caller]
    fn ask(&self, podfs: &Path, arguments: &[&str]) -> String {
        let outcome = self.try_ask(podfs, arguments);
        assert_eq!(outcome.code, Some(0), "{arguments:?}: {}\n{}", outcome.stderr, self.node.log());
        outcome.stdout
    }

    fn try_ask(&self, podfs: &Path, arguments: &[&str]) -> Outcome {
        let mut command = Command::new(podfs);
        finish(command.arg("node").args(arguments).arg("--run-dir").arg(self.node.fixture.path("run")))
    }

    /// Starts a daemon of the build that is installed, after the end of the one that runs.
    fn restart(&mut self, signal: Signal) {
        self.daemon.signal(signal);
        self.daemon.wait();
        self.daemon = daemon(&self.node, &self.builds);
    }

    /// Checks that the daemon has the pod with the supervisor `supervisor`, that its volumes follow their objects, and that nothing
    /// of what callers wrote is lost.
    #[track_caller]
    fn check(&mut self, supervisor: nix::unistd::Pid) {
        for podfs in [self.builds.program(), self.builds.other_program()] {
            self.ask(&podfs, &["wait", "default/web", "--timeout", "120"]);
            self.ask(&podfs, &["status"]);
            let volumes: Value =
                serde_json::from_str(&self.ask(&podfs, &["volumes", "uid-skew", "--output", "json"])).expect("JSON");
            assert_eq!(volumes["volumes"].as_array().map(Vec::len), Some(self.paths.len()), "{volumes}");
            self.ask(&podfs, &["state", "--output", "json"]);
            self.ask(&podfs, &["remount", "default/web"]);
        }
        assert_eq!(self.node.supervisor("web"), supervisor);
        self.number += 1;
        self.node.put("app.yaml", &config_map("app", &[("a", &self.number.to_string())]));
        wait_content(&self.path("config").join("a"), &self.number.to_string());
        let read = |path: PathBuf| fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
        assert_eq!(read(self.path("keys").join("k")), "secret");
        assert_eq!(read(self.path("labels").join("labels")), "app=\"web\"");
        for (name, mut file) in WRITABLE.iter().zip(&self.open) {
            file.write_all(b"line\n").unwrap_or_else(|error| panic!("a write in {name}: {error}"));
            assert_eq!(read(self.path(name).join("open")).lines().count(), self.number as usize, "lines in {name}");
        }
    }

    /// Deletes the pod, releases it by the podfs at a path, and checks that nothing of it is left.
    #[track_caller]
    fn end(mut self, podfs: &Path) {
        self.open.clear();
        self.node.remove("web.yaml");
        self.ask(podfs, &["release", "default/web"]);
        self.ask(podfs, &["wait", "default/web", "--unmounted", "--timeout", "120"]);
        eventually("nothing of the pod is left", || self.node.is_clean("uid-skew"));
        assert_eq!(self.node.fixture.mounts(), Vec::<PathBuf>::new());
    }
}

/// Starts a daemon of the installed build, and waits until it answers.
fn daemon(node: &Node, builds: &Builds) -> Running {
    let mut command = Command::new(builds.program());
    command.arg("node").arg("--root-dir").arg(node.fixture.path("root")).arg("--run-dir").arg(node.fixture.path("run"));
    command.arg("--manifests").arg(node.fixture.path("manifests"));
    node.start_command(command)
}

#[test]
fn a_daemon_of_each_version_goes_on_with_the_pods_of_the_other() {
    for first in First::BOTH {
        let mut served = Served::start(first);
        let supervisor = served.node.supervisor("web");
        served.check(supervisor);
        for signal in [Signal::SIGTERM, Signal::SIGKILL, Signal::SIGTERM] {
            served.builds.put_other();
            served.restart(signal);
            served.check(supervisor);
        }
        let last = served.builds.program();
        served.end(&last);
    }
}

#[test]
fn pods_of_a_node_are_upgraded_and_go_back() {
    for first in First::BOTH {
        let mut served = Served::start(first);
        let supervisor = served.node.supervisor("web");
        for _ in 0..2 {
            served.builds.put_other();
            served.restart(Signal::SIGTERM);
            let outcome = upgrade(&served.node.fixture);
            assert_eq!(outcome.code, Some(0), "{}{}", outcome.stdout, outcome.stderr);
            served.check(supervisor);
        }
        let other = served.builds.other_program();
        served.end(&other);
    }
}

#[test]
fn a_killed_supervisor_of_the_other_version_is_replaced() {
    for first in First::BOTH {
        let mut served = Served::start(first);
        served.builds.put_other();
        served.restart(Signal::SIGKILL);
        let before = served.node.supervisor("web");
        kill(before, Signal::SIGKILL).expect("killed");
        let pid = |node: &Node| node.pod("web").and_then(|pod| pod["supervisor"].as_i64());
        eventually("another supervisor serves the pod", || {
            pid(&served.node).is_some_and(|pid| pid != i64::from(before.as_raw()))
        });
        let next = served.node.supervisor("web");
        served.check(next);
        let program = fs::read_link(format!("/proc/{next}/exe")).expect("a process");
        assert_eq!(program, served.builds.program().with_file_name("podfs-supervisor"));
        let last = served.builds.program();
        served.end(&last);
    }
}
