//! The cost of a node with 110 pods of three volumes: `cargo bench --bench node`. Needs root and `/dev/fuse`.
//!
//! The API server is that of the tests, on loopback, in this process. Each pod shows a ConfigMap of its own, one that all pods
//! show, and a third volume. Measured are: the memory of all processes with 1, 12 and all pods, with a ConfigMap and with an emptyDir
//! as the third volume; then, with emptyDirs: the start of all pods at once, what they do when nothing changes, changes of both kinds
//! of ConfigMap, the start of another daemon after a SIGKILL, and the end of all pods.

#[path = "../tests/api_server/mod.rs"]
mod api_server;
#[path = "../tests/common/mod.rs"]
mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use api_server::{ApiServer, Style};
use common::{Fixture, PODFS, Running, config_map};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use podfs_fuse::mount::table::{FS_TYPE, mounts};

const NODE: &str = "node";
const PODS: usize = 110;
const VOLUMES: usize = 3;
/// The sources of the third volume.
const CONFIG_MAP: &str = "configMap: {name: all}";
const EMPTY_DIR: &str = "emptyDir: {}";
/// How often an object changes.
const CHANGES: usize = 20;
/// How long the idle node is measured.
const IDLE: Duration = Duration::from_secs(20);
/// How long anything may take, on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(300);
/// The pause between two checks of a condition.
const CHECK_INTERVAL: Duration = Duration::from_millis(5);

fn main() {
    for third in [CONFIG_MAP, EMPTY_DIR] {
        for pods in [1, 12, PODS] {
            measure_memory(third, pods);
        }
    }
    measure_times();
}

/// Prints the memory of the processes of a node with so many pods.
fn measure_memory(third: &str, pods: usize) {
    let node = Node::new();
    let mut daemon = node.start();
    node.put_pods(pods, third);
    until("every volume is mounted", || node.mounted().len() == pods * VOLUMES);
    until("every volume shows its object", || {
        (0..pods).all(|pod| node.shows(pod, "own", 0) && node.shows(pod, "all", 0))
    });
    // A process unmaps the code of its start after a second.
    thread::sleep(Duration::from_secs(3));
    println!("{pods} pods, third volume {third}:");
    node.report_memory(daemon.pid());
    node.remove_pods(pods, &daemon);
    daemon.stop();
}

fn measure_times() {
    let node = Node::new();
    let mut daemon = node.start();
    node.server.forget_requests();
    let began = Instant::now();
    node.put_pods(PODS, EMPTY_DIR);
    until("every volume is mounted", || node.mounted().len() == PODS * VOLUMES);
    println!("{PODS} pods of {VOLUMES} volumes, started at once: mounted after {:.2} s", began.elapsed().as_secs_f64());
    until("every volume shows its object", || {
        (0..PODS).all(|pod| node.shows(pod, "own", 0) && node.shows(pod, "all", 0))
    });
    println!(
        "  and current after {:.2} s, {} API requests",
        began.elapsed().as_secs_f64(),
        node.server.requests().len()
    );
    thread::sleep(Duration::from_secs(2));
    node.report_idle();
    node.report_changes();

    let before = node.mounted();
    daemon.signal(Signal::SIGKILL);
    daemon.wait();
    let began = Instant::now();
    daemon = node.start();
    until("all is known", || node.mounted_by_state() == PODS * VOLUMES);
    println!("another daemon knows everything after {:.2} s", began.elapsed().as_secs_f64());
    assert_eq!(node.mounted(), before, "no volume is touched");

    let began = Instant::now();
    node.remove_pods(PODS, &daemon);
    println!("{PODS} pods deleted at once: nothing is left of them after {:.2} s", began.elapsed().as_secs_f64());
}

/// A node with its API server.
struct Node {
    server: ApiServer,
    fixture: Fixture,
    kubeconfig: PathBuf,
}

impl Node {
    fn new() -> Self {
        let server = ApiServer::start();
        let kubeconfig = server.kubeconfig(NODE, Style::Embedded);
        let node = Self { server, fixture: Fixture::new(""), kubeconfig };
        (0..PODS).for_each(|pod| node.put(&format!("own-{pod}"), 0));
        node.put("all", 0);
        node
    }

    /// Starts a daemon, and waits until agents can connect to it.
    fn start(&self) -> Running {
        let mut command = Command::new(PODFS);
        command.args(["node", "--release-when-gone", "--node-name", NODE, "--kubeconfig"]).arg(&self.kubeconfig);
        command.arg("--root-dir").arg(self.fixture.path("root")).arg("--run-dir").arg(self.fixture.path("run"));
        let daemon = self.fixture.spawn(&mut command);
        until("the daemon answers", || self.fixture.path("run/node.sock").exists());
        daemon
    }

    /// Changes an object.
    fn put(&self, name: &str, serial: usize) {
        self.server.put(&config_map(name, &[("serial", &serial.to_string())]));
    }

    fn put_pods(&self, pods: usize, third: &str) {
        for pod in 0..pods {
            self.server.put(&format!(
                "{{apiVersion: v1, kind: Pod, metadata: {{name: pod-{pod}, uid: uid-{pod}}}, spec: {{nodeName: {NODE}, containers: \
                 [{{name: web, image: web, volumeMounts: [{{name: own, mountPath: /own}}, {{name: all, mountPath: /all}}, \
                 {{name: third, mountPath: /third}}]}}], volumes: [{{name: own, configMap: {{name: own-{pod}}}}}, \
                 {{name: all, configMap: {{name: all}}}}, {{name: third, {third}}}]}}}}"
            ));
        }
    }

    /// Deletes all pods, and waits until nothing is left of them.
    fn remove_pods(&self, pods: usize, daemon: &Running) {
        for pod in 0..pods {
            self.server.delete("Pod", "default", &format!("pod-{pod}"));
        }
        until("nothing is mounted", || self.mounted().is_empty());
        until("every supervisor has ended", || self.fixture.processes() == [daemon.pid()]);
    }

    /// Where volumes are mounted, and which mounts these are.
    fn mounted(&self) -> Vec<(PathBuf, u64)> {
        let root = self.fixture.path("root");
        let all = mounts().expect("a mount table").into_iter();
        all.filter(|mounted| mounted.fs_type == FS_TYPE && mounted.at.starts_with(&root))
            .map(|mounted| (mounted.at, mounted.id))
            .collect()
    }

    /// The number of volumes that the daemon reports as mounted.
    fn mounted_by_state(&self) -> usize {
        let mut command = Command::new(PODFS);
        command.args(["node", "state", "--output", "json", "--run-dir"]).arg(self.fixture.path("run"));
        let output = command.output().expect("podfs runs");
        let Ok(state) = serde_json::from_slice::<serde_json::Value>(&output.stdout) else { return 0 };
        let volumes =
            state["pods"].as_array().into_iter().flatten().filter_map(|pod| pod["volumes"].as_array()).flatten();
        volumes.filter(|volume| volume["mount"] == "mounted").count()
    }

    fn shows(&self, pod: usize, volume: &str, serial: usize) -> bool {
        let volume = format!("root/pods/uid-{pod}/volumes/kubernetes.io~configmap/{volume}/serial");
        fs::read_to_string(self.fixture.path(&volume)).is_ok_and(|content| content == serial.to_string())
    }

    fn report_memory(&self, daemon: Pid) {
        let mut by_name: BTreeMap<String, Vec<u64>> = BTreeMap::new();
        for process in self.fixture.processes() {
            let name = fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
            by_name.entry(name.trim().to_owned()).or_default().push(pss(process));
        }
        let all: u64 = by_name.values().flatten().sum();
        println!("PSS of all processes {:.1} MiB, of the daemon {:.1} MiB", mib(all), mib(pss(daemon)));
        for (name, shares) in by_name {
            let count = shares.len() as u64;
            println!("  {count} {name}: {} KiB each", shares.iter().sum::<u64>() / count);
        }
    }

    fn report_idle(&self) {
        let used = || self.fixture.processes().into_iter().flat_map(cpu_times).collect::<BTreeMap<_, _>>();
        let before = used();
        thread::sleep(IDLE);
        let since = |(thread, time): (_, Duration)| time - before.get(&thread).copied().unwrap_or_default();
        let time: Duration = used().into_iter().map(since).sum();
        println!("idle: {:.2} % of a CPU", time.as_secs_f64() / IDLE.as_secs_f64() * 100.0);
    }

    fn report_changes(&self) {
        for (name, volume, pods) in [("own-0", "own", 1), ("all", "all", PODS)] {
            let mut times = Vec::new();
            for serial in 1..=CHANGES {
                let began = Instant::now();
                self.put(name, serial);
                (0..pods).for_each(|pod| {
                    while !self.shows(pod, volume, serial) {
                        assert!(began.elapsed() < TIMEOUT, "a change is not shown");
                        thread::yield_now();
                    }
                });
                times.push(began.elapsed());
            }
            times.sort_unstable();
            let [median, longest] = [times[CHANGES / 2], times[CHANGES - 1]].map(|time| time.as_secs_f64() * 1000.0);
            println!(
                "an object of {pods} pods changes: shown by all after {median:.1} ms (median), {longest:.1} ms (longest)"
            );
        }
    }
}

fn until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !condition() {
        assert!(Instant::now() < deadline, "still not true: {what}");
        thread::sleep(CHECK_INTERVAL);
    }
}

/// The memory of a process (PSS), in KiB.
fn pss(process: Pid) -> u64 {
    let text = fs::read_to_string(Path::new(&format!("/proc/{process}/smaps_rollup"))).unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with("Pss:")).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).unwrap_or_default()
}

/// The CPU time of each thread of a process. The times of `/proc/PID/stat` are in ticks of 10 ms, and an idle process uses less.
fn cpu_times(process: Pid) -> Vec<(PathBuf, Duration)> {
    let Ok(threads) = fs::read_dir(format!("/proc/{process}/task")) else { return Vec::new() };
    let on_cpu = threads.flatten().filter_map(|thread| {
        let text = fs::read_to_string(thread.path().join("schedstat")).ok()?;
        let nanoseconds = text.split_whitespace().next()?.parse().ok()?;
        Some((thread.path(), Duration::from_nanos(nanoseconds)))
    });
    on_cpu.collect()
}

fn mib(kib: u64) -> f64 {
    f64::from(u32::try_from(kib).unwrap_or(u32::MAX)) / 1024.0
}
