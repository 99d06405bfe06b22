//! The cost of the CSI driver for a kubelet: `cargo bench --bench csi`. Needs root and `/dev/fuse`.
//!
//! The API server is that of the tests, on loopback, in this process. The bench makes the calls that a kubelet makes. It prints the
//! figures of a NodePublishVolume of a ConfigMap for a new pod, of 100 pods at once, of the daemon's memory with 100 volumes, and
//! of the time from a change at the API server to the bytes at the kubelet's target. What `--nri` adds to the creation of a
//! container needs a container runtime: `cargo test --release --test cli node::nri::cost -- --ignored --nocapture` prints it.

#[path = "../tests/api_server/mod.rs"]
mod api_server;
#[path = "../tests/common/mod.rs"]
mod common;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use api_server::{ApiServer, Style, User};
use common::kubelet::{KubeletCalls, Volume};
use common::node::Node;
use common::{Running, config_map};
use podfs::csi::v1::NodeGetCapabilitiesRequest;

const NODE: &str = "n1";
/// The number of pods that are published one after the other.
const ROUNDS: usize = 30;
/// The number of pods that are published at once.
const PODS: usize = 100;
/// How often an object changes.
const CHANGES: usize = 101;
/// How long anything may take, on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(300);

fn main() {
    from_files();
    from_server();
}

/// Objects in files of the node.
fn from_files() {
    let node = Node::new();
    let root = node.fixture.path("kubelet");
    let kubelet = KubeletCalls::new(&root, &root);
    let put = |serial: usize| node.put("app.yaml", &config_map("app", &[("serial", &serial.to_string())]));
    put(0);
    let mut command = node.command();
    command.args(["--node-name", NODE]).arg("--csi").arg(kubelet.socket()).arg("--kubelet-root").arg(kubelet.root());
    let _daemon = node.start_command(command);
    println!("objects from files:");
    print_publications(&kubelet);
    let volume = volume(&kubelet, "pod");
    kubelet.publish(&volume).expect("published");
    print_changes(&volume, put);
    kubelet.end_pod("pod", &[volume]);
}

/// Objects of an API server.
fn from_server() {
    println!("objects from an API server:");
    let (server, node) = (ApiServer::start(), Node::new());
    let root = node.fixture.path("kubelet");
    let kubelet = KubeletCalls::new(&root, &root);
    put(&server, 0);
    let daemon = start(&server, &node, &kubelet);

    print_publications(&kubelet);

    let volumes: Vec<Volume> = (0..PODS).map(|pod| volume(&kubelet, &format!("pod-{pod}"))).collect();
    println!("{PODS} pods at once: all published after {:.2} s", publish_all(&kubelet, &volumes).as_secs_f64());
    thread::sleep(Duration::from_secs(2));
    println!(
        "memory of the daemon with {PODS} volumes: RSS {:.1} MiB, PSS {:.1} MiB",
        memory(&daemon, "Rss:"),
        memory(&daemon, "Pss:")
    );

    println!("the object of {PODS} pods changes:");
    print_changes(&volumes[0], |serial| put(&server, serial));
    println!("the object of one pod changes:");
    server.put(&config_map("own", &[("serial", "0")]));
    let own = kubelet.volume("own", "config", &[("kind", "configMap"), ("name", "own")]);
    kubelet.publish(&own).expect("published");
    print_changes(&own, |serial| {
        server.put(&config_map("own", &[("serial", &serial.to_string())]));
    });
    kubelet.end_pod("own", std::slice::from_ref(&own));
    volumes
        .iter()
        .enumerate()
        .for_each(|(pod, volume)| kubelet.end_pod(&format!("pod-{pod}"), std::slice::from_ref(volume)));
}

fn print_publications(kubelet: &KubeletCalls) {
    let mut times: Vec<Duration> = (0..ROUNDS).map(|round| publish_one(kubelet, &format!("one-{round}"))).collect();
    times.sort();
    println!(
        "NodePublishVolume of a configMap for a new pod: median {:.1} ms, most {:.1} ms",
        ms(times[ROUNDS / 2]),
        ms(times[ROUNDS - 1])
    );
}

fn print_changes(volume: &Volume, put: impl Fn(usize)) {
    let mut times: Vec<Duration> = (1..=CHANGES).map(|serial| change(&put, volume, serial)).collect();
    times.sort();
    println!("a change is visible: median {:.2} ms, most {:.2} ms", ms(times[CHANGES / 2]), ms(times[CHANGES - 1]));
}

/// `podfs node --csi` with credentials that may read all that it asks for.
fn start(server: &ApiServer, node: &Node, kubelet: &KubeletCalls) -> Running {
    let user = User::new("system:serviceaccount:podfs:podfs", "system:serviceaccounts");
    ["pods", "configmaps"].iter().for_each(|resource| server.permit(&user, &["list", "watch"], resource));
    let mut command: Command = node.bare_command();
    command.arg("--kubeconfig").arg(server.kubeconfig_of(&user, Style::Token)).args(["--node-name", NODE]);
    command.arg("--csi").arg(kubelet.socket()).arg("--kubelet-root").arg(kubelet.root());
    node.start_command(command)
}

fn put(server: &ApiServer, serial: usize) {
    server.put(&config_map("app", &[("serial", &serial.to_string())]));
}

fn volume(kubelet: &KubeletCalls, pod: &str) -> Volume {
    kubelet.volume(pod, "config", &[("kind", "configMap"), ("name", "app")])
}

/// How long it takes a volume of a new pod to be published. The pod ends then.
fn publish_one(kubelet: &KubeletCalls, pod: &str) -> Duration {
    let volume = volume(kubelet, pod);
    let began = Instant::now();
    kubelet.publish(&volume).expect("published");
    let took = began.elapsed();
    kubelet.end_pod(pod, &[volume]);
    took
}

fn publish_all(kubelet: &KubeletCalls, volumes: &[Volume]) -> Duration {
    let began = Instant::now();
    let published = kubelet.call(async |node| {
        let calls: Vec<_> = volumes
            .iter()
            .map(|volume| {
                let (mut node, request) = (node.clone(), volume.request.clone());
                tokio::spawn(async move {
                    node.node_get_capabilities(NodeGetCapabilitiesRequest {}).await?;
                    node.node_publish_volume(request).await
                })
            })
            .collect();
        for call in calls {
            call.await.expect("it ends")?;
        }
        Ok(())
    });
    published.expect("all are published");
    began.elapsed()
}

/// How long it takes a change to arrive at the kubelet's target.
fn change(put: impl Fn(usize), volume: &Volume, serial: usize) -> Duration {
    // Changes that come at once are one change to podfs.
    thread::sleep(Duration::from_millis(50));
    let (file, text) = (volume.target.join("serial"), serial.to_string());
    let began = Instant::now();
    put(serial);
    while fs::read_to_string(&file).is_ok_and(|shown| shown != text) {
        assert!(began.elapsed() < TIMEOUT, "the change does not arrive");
        // Without this, the reader would take the CPU from podfs.
        thread::yield_now();
    }
    began.elapsed()
}

/// A field of the daemon's `smaps_rollup`, in MiB.
fn memory(daemon: &Running, field: &str) -> f64 {
    let path = Path::new("/proc").join(daemon.pid().to_string()).join("smaps_rollup");
    let rollup = fs::read_to_string(path).expect("root may read it");
    let line = rollup.lines().find_map(|line| line.strip_prefix(field)).expect("the kernel says it");
    line.trim().trim_end_matches(" kB").parse::<f64>().expect("a number") / 1024.0
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
