//! The part of a daemon that manages supervisors, used through the library without the other parts.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use podfs::manifest::parse_documents;
use podfs::manifest::pod::{Pod, PodUid};
use podfs::node::reconstruct::{ReconstructedPod, reconstruct};
use podfs::node::supervisors::{MountFailure, SupervisorReport, SupervisorSettings, Supervisors};
use podfs::node::{NodePod, PodOrigin, PodStage};
use podfs::source::Push;
use podfs_fuse::mount::table::mounts;
use serde_json::Value;
use tokio::runtime::Runtime;
use tokio::sync::mpsc::Receiver;
use tokio::task::JoinHandle;

use crate::common::*;

/// A node of a test: its directories, and the fixture that finds its processes.
pub struct Node {
    pub fixture: Fixture,
    program: PathBuf,
}

/// A daemon's supervisors. Dropping this has the effect of a SIGKILL of a daemon: the supervisors continue.
pub struct Daemon {
    runtime: Runtime,
    pub supervisors: Supervisors,
    /// The pod of the test.
    pub uid: PodUid,
    reports: Receiver<(PodUid, SupervisorReport)>,
}

impl Node {
    pub fn new() -> Node {
        Node::with_arguments("")
    }

    /// A node whose supervisors get these arguments before the daemon's.
    pub fn with_arguments(arguments: &str) -> Node {
        let fixture = Fixture::new("");
        // The fixture finds the supervisor and its children by the variable RUST_BACKTRACE.
        let script = format!(
            "#!/bin/sh\nexec env RUST_BACKTRACE={} {PODFS_SUPERVISOR} {arguments} \"$@\" 2>>{}\n",
            fixture.path("").display().to_string().trim_end_matches('/'),
            fixture.path("log").display()
        );
        fixture.write("podfs", &script);
        let program = fixture.path("podfs");
        fs::set_permissions(&program, Permissions::from_mode(0o755)).expect("its mode");
        Node { fixture, program }
    }

    /// A new daemon.
    pub fn daemon(&self) -> Daemon {
        let settings = SupervisorSettings::new(&self.run(), &self.root(), self.program.clone()).expect("directories");
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let entered = runtime.enter();
        let (supervisors, reports) = Supervisors::new(settings);
        drop(entered);
        Daemon { runtime, supervisors, uid: PodUid::parse(&self.uid()).expect("a uid"), reports }
    }

    pub fn root(&self) -> PathBuf {
        self.fixture.path("root")
    }

    pub fn run(&self) -> PathBuf {
        self.fixture.path("run")
    }

    pub fn reconstructed(&self) -> Vec<ReconstructedPod> {
        reconstruct(&self.run(), &self.root()).expect("it can be read")
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.fixture.path("log")).unwrap_or_default()
    }

    /// A uid that no other test has.
    pub fn uid(&self) -> String {
        let name = self.fixture.path("x").parent().and_then(Path::file_name).expect("a name").to_owned();
        name.into_string().expect("text")
    }

    /// The supervisors of all pods.
    pub fn supervisors(&self) -> Vec<Pid> {
        let is_supervisor = |pid: &Pid| {
            let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            command.split(|byte| *byte == 0).any(|word| word == b"--pod")
        };
        self.fixture.processes().into_iter().filter(is_supervisor).collect()
    }

    /// The path of a volume.
    pub fn volume(&self, plugin: &str, name: &str) -> PathBuf {
        self.root().join("pods").join(self.uid()).join("volumes").join(format!("kubernetes.io~{plugin}")).join(name)
    }

    /// Kills a process and waits until it has ended.
    #[track_caller]
    pub fn kill(&self, process: Pid) {
        kill(process, Signal::SIGKILL).expect("it is there");
        eventually("the process has ended", || !self.fixture.processes().contains(&process));
    }

    /// Checks that podfs has removed everything of all pods. The directories `node`, `node/pods` and `pods` may stay.
    #[track_caller]
    pub fn assert_nothing_left(&self) {
        assert_eq!(self.fixture.mounts(), Vec::<PathBuf>::new());
        eventually("every process has ended", || self.fixture.processes().is_empty());
        assert_eq!(self.reconstructed(), []);
        assert!(below(&self.root()).iter().all(|path| *path == self.root().join("pods")), "{:?}", below(&self.root()));
        assert_eq!(below(&self.run()), ["node", "node/pods"].map(|name| self.run().join(name)));
        assert_eq!(self.cgroups(), Vec::<PathBuf>::new());
    }

    /// The cgroup of the pod's supervisor and those in it, the innermost first.
    fn cgroups(&self) -> Vec<PathBuf> {
        let tops = mounts().expect("a table").into_iter().filter(|mounted| mounted.fs_type == "cgroup2");
        let all = tops.map(|top| top.at.join(format!("podfs-pod-{}", self.uid()))).filter(|path| path.is_dir());
        let below = |path: PathBuf| [path.join(format!("podfs-{}", self.uid())), path];
        all.flat_map(below).filter(|path| path.is_dir()).collect()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let cgroups = self.cgroups();
        if !cgroups.is_empty() {
            kill_all_of(self.fixture.path("x").parent().expect("a directory"));
            let is_gone = |cgroup: &PathBuf| fs::remove_dir(cgroup).is_ok() || !cgroup.exists();
            let _ = (0..200).find(|_| {
                std::thread::sleep(Duration::from_millis(5));
                cgroups.iter().all(is_gone)
            });
        }
    }
}

/// All paths below a directory, in order; empty if the directory does not exist.
fn below(directory: &Path) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        paths.push(entry.path());
        if entry.file_type().expect("a type").is_dir() {
            paths.extend(below(&entry.path()));
        }
    }
    paths.sort();
    paths
}

impl Daemon {
    /// Waits for the result of an operation.
    pub fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.block_on(async { tokio::time::timeout(TIMEOUT, future).await }).expect("it takes no time")
    }

    /// Starts an operation in the background.
    pub fn spawn<T: Send + 'static>(&self, future: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
        self.runtime.spawn(future)
    }

    /// Mounts all of these volumes at once.
    pub fn mount(&self, pod: &NodePod, volumes: &[&str]) -> Vec<Result<(), MountFailure>> {
        self.mount_within(pod, volumes, TIMEOUT)
    }

    pub fn mount_within(&self, pod: &NodePod, volumes: &[&str], limit: Duration) -> Vec<Result<(), MountFailure>> {
        let mount = |volume: &&str| {
            let (supervisors, pod, volume) = (self.supervisors.clone(), pod.clone(), (*volume).to_owned());
            self.runtime.spawn(async move { supervisors.mount(&pod, &volume, limit).await })
        };
        let mounts: Vec<_> = volumes.iter().map(mount).collect();
        mounts.into_iter().map(|mount| self.block_on(mount).expect("no panic")).collect()
    }

    /// Unmounts all of these volumes at once.
    pub fn unmount(&self, volumes: &[&str]) -> Vec<Result<(), String>> {
        let unmount = |volume: &&str| {
            let (supervisors, uid, volume) = (self.supervisors.clone(), self.uid.clone(), (*volume).to_owned());
            self.runtime.spawn(async move { supervisors.unmount(&uid, &volume).await })
        };
        let unmounts: Vec<_> = volumes.iter().map(unmount).collect();
        unmounts
            .into_iter()
            .map(|unmount| self.block_on(unmount).expect("no panic").map_err(|error| error.to_string()))
            .collect()
    }

    /// Describes the pod anew, with the same volumes.
    pub fn update(&self, pod: &NodePod) {
        self.block_on(async { self.supervisors.update(pod) });
    }

    pub fn retire(&self) -> Result<(), String> {
        self.block_on(self.supervisors.retire(&self.uid)).map_err(|error| error.to_string())
    }

    /// Pushes these objects to the pod; they replace all that it has.
    pub fn push(&self, objects: &[String]) {
        let objects = objects.iter().map(|object| serde_json::from_str(object).expect("JSON")).collect();
        let push = Push { objects, replace: true, ..Push::default() };
        let pushed = self.block_on(self.supervisors.push_path(&self.uid).push(push));
        pushed.unwrap_or_else(|failure| panic!("{}", failure.reason));
    }

    /// Adopts the supervisors of pods that an earlier daemon left.
    pub fn adopt(&self, pods: &[ReconstructedPod]) {
        let _entered = self.runtime.enter();
        pods.iter().for_each(|pod| self.supervisors.adopt(pod));
    }

    /// Reads reports until one that `is_wanted`, and returns it.
    #[track_caller]
    pub fn wait_report(&mut self, what: &str, is_wanted: impl Fn(&SupervisorReport) -> bool) -> SupervisorReport {
        let reports = &mut self.reports;
        let find = async {
            loop {
                let (_, report) = reports.recv().await.expect("supervisors are there");
                if is_wanted(&report) {
                    return report;
                }
            }
        };
        let report = self.runtime.block_on(async { tokio::time::timeout(TIMEOUT, find).await });
        report.unwrap_or_else(|_| panic!("no report: {what}"))
    }

    /// Waits until a supervisor answers. Returns its process id.
    #[track_caller]
    pub fn wait_up(&mut self) -> Pid {
        match self.wait_report("up", |report| matches!(report, SupervisorReport::Up(_))) {
            SupervisorReport::Up(pid) => Pid::from_raw(pid.cast_signed()),
            other => panic!("{other:?}"),
        }
    }
}

/// A pod of the API server, with these volumes.
pub fn node_pod(uid: &str, volumes: &str) -> NodePod {
    let text = pod(volumes).replace("name: web, labels", &format!("name: web, uid: {uid}, labels"));
    let mut documents = parse_documents(Path::new("pod.yaml"), text.as_bytes()).expect("YAML");
    let document = documents.pop().expect("a pod");
    let manifest: Value = document.clone().into_value();
    let pod = Arc::new(Pod::parse(document).expect("a pod"));
    NodePod { pod, manifest: Arc::new(manifest), origin: PodOrigin::Api, stage: PodStage::Desired }
}
