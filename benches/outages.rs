//! The cost of an API server that is busy or unreachable. Needs root and `/dev/fuse`.
//!
//! First, pods of a node start in one moment, and the server answers only so many requests in a second: how many requests
//! there are, how many of them are too many (429), and how many warnings and events for pods that nothing is wrong with. Then
//! the server is killed and comes back after some seconds, as a real one does: it answers watches with 410, and nodes with
//! 403 for a second, until it is ready. All objects change while it is away. A pod is current when its file shows that.
//!
//! `cargo bench --bench outages` takes outages of 1, 4, 10, 30 and 60 s, for one pod and for 100.
//! `cargo bench --bench outages -- 20 1 4` takes 20 pods, and outages of 1 and 4 s.

#[path = "../tests/api_server/mod.rs"]
mod api_server;
#[path = "../tests/common/mod.rs"]
mod common;

use std::env;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use api_server::{ApiServer, Style};
use common::{Fixture, PODFS, Running, config_map, eventually, secret};

const NODE: &str = "node";
/// How many requests of the node the server answers in a second, at the start and after an outage. A real server limits the
/// requests that it executes at the same moment, and a request that it refuses (403) takes hardly any time.
const LIMITS: (usize, usize) = (150, 1000);
/// How long the server answers nodes with 403 after an outage.
const STARTING: Duration = Duration::from_secs(1);
/// How long pods may take to start, and to be current again.
const TIMEOUT: Duration = Duration::from_secs(120);

fn main() {
    let numbers = env::args().skip(1).filter_map(|argument| argument.parse().ok()).collect::<Vec<u64>>();
    let (pods, outages) = match numbers.split_first() {
        Some((pods, outages)) => (usize::try_from(*pods).expect("a number of pods"), outages.to_vec()),
        None => (100, vec![1, 4, 10, 30, 60]),
    };
    for pods in [1, pods] {
        let node = Node::new(pods);
        let files = node.start();
        for (serial, outage) in (1..).zip(&outages) {
            node.recover(&files, serial, Duration::from_secs(*outage));
        }
    }
}

/// An API server, and pods on a node.
struct Node {
    server: ApiServer,
    fixture: Fixture,
    kubeconfig: PathBuf,
    pods: usize,
}

/// The files that show the pods' objects, and the processes that keep them current.
struct Files {
    files: Vec<PathBuf>,
    _running: Vec<Running>,
}

impl Node {
    fn new(pods: usize) -> Self {
        let server = ApiServer::start();
        let kubeconfig = server.kubeconfig(NODE, Style::Embedded);
        let node = Self { server, fixture: Fixture::new(""), kubeconfig, pods };
        node.server.put("{apiVersion: v1, kind: ServiceAccount, metadata: {name: default, namespace: default}}");
        node.server.put(&config_map("kube-root-ca.crt", &[("ca.crt", "anchors")]));
        for pod in 0..pods {
            node.put(pod, 0);
            node.server.put(&secret(&format!("keys-{pod}"), &[("key", "1")]));
            let uid = format!("6f0c1f0e-0000-4000-8000-{:012x}", fastrand::u64(..1 << 48));
            node.server.put(&format!(
                "{{apiVersion: v1, kind: Pod, metadata: {{name: pod-{pod}, namespace: default, uid: {uid}}}, spec: {{\
                 nodeName: {NODE}, containers: [{{name: web, image: web}}], volumes: [\
                 {{name: config, configMap: {{name: config-{pod}}}}}, {{name: keys, secret: {{secretName: keys-{pod}}}}}, \
                 {{name: access, projected: {{sources: [{{serviceAccountToken: {{path: token}}}}, \
                 {{configMap: {{name: kube-root-ca.crt}}}}]}}}}]}}}}"
            ));
        }
        node
    }

    fn put(&self, pod: usize, serial: usize) {
        self.server.put(&config_map(&format!("config-{pod}"), &[("serial", &serial.to_string())]));
    }

    fn start(&self) -> Files {
        self.server.limit(LIMITS.0, Duration::from_secs(1));
        let begun = Instant::now();
        let mut running: Vec<Running> =
            (0..self.pods).map(|pod| self.fixture.start_command(self.command(pod))).collect();
        while !running.iter_mut().all(Running::is_ready) {
            assert!(begun.elapsed() < TIMEOUT, "not all pods are ready:\n{}", running[0].log());
            thread::sleep(Duration::from_millis(5));
        }
        let ready = begun.elapsed();
        running.iter_mut().for_each(Running::wait_ready);
        let log = running[0].log();
        println!(
            "{} pods at once: ready in {:.1} s, {} requests, {} of them answered with 429, {} failed volumes in the log, {} events",
            self.pods,
            ready.as_secs_f64(),
            self.server.requests().len(),
            self.server.too_many(),
            log.matches("MountVolume.SetUp failed").count(),
            self.server.objects("Event").len()
        );
        let files = running.iter().map(|pod| pod.volume("config").join("serial")).collect();
        Files { files, _running: running }
    }

    /// Lets the server be away for the time `outage`, and prints how long the pods take to be current again.
    fn recover(&self, Files { files, .. }: &Files, serial: usize, outage: Duration) {
        for pod in 0..self.pods {
            let name = format!("config-{pod}");
            eventually("all objects are watched", || self.server.watches("ConfigMap", &name) == 1);
        }
        self.server.limit(LIMITS.1, Duration::from_secs(1));
        self.server.crash();
        (0..self.pods).for_each(|pod| self.put(pod, serial));
        thread::sleep(outage);
        self.server.forget_requests();
        let before = self.server.too_many();
        self.server.boot();
        thread::sleep(STARTING);
        self.server.become_ready();
        let ready = Instant::now();
        let mut outdated: Vec<_> = files.iter().collect();
        let mut times = Vec::new();
        while !outdated.is_empty() {
            assert!(ready.elapsed() < TIMEOUT, "{} pods are not current", outdated.len());
            outdated.retain(|file| {
                let is_current = fs::read_to_string(file).is_ok_and(|content| content == serial.to_string());
                if is_current {
                    times.push(ready.elapsed());
                }
                !is_current
            });
            thread::sleep(Duration::from_millis(1));
        }
        println!(
            "{} pods, {outage:?} away: current after {:.2} s (median), {:.2} s (longest); {} requests, {} answered with 429",
            self.pods,
            times[times.len() / 2].as_secs_f64(),
            times[times.len() - 1].as_secs_f64(),
            self.server.requests().len(),
            self.server.too_many() - before
        );
    }

    fn command(&self, pod: usize) -> Command {
        let mut command = Command::new(PODFS);
        command.args(["run", "--pod-name"]).arg(format!("default/pod-{pod}")).arg("--kubeconfig").arg(&self.kubeconfig);
        command.arg("--root-dir").arg(self.fixture.path("root")).arg("--run-dir").arg(self.fixture.path("run"));
        command
    }
}
