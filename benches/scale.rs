//! The load of a large cluster on the API server: the clients of many nodes, without supervisors and mounts.
//!
//! Each node is the feed of a `podfs node` with a connection of its own: its pods, and what one pod of it refers to. First all
//! nodes start in one moment. Then nothing happens for a while. Then the server is killed, the objects of all nodes change, and
//! the server comes back as a real one does: it answers watches with 410. A node is current when its supervisor would have
//! been sent the change. The server is that of the tests, in this process: its own time is part of all figures. The CPU time of the
//! process says whether the machine was the limit: then all figures are those of the machine, and not of the clients.
//!
//! `cargo bench --bench scale` takes 1000 nodes, and a quiet minute. `cargo bench --bench scale -- 200 600` takes 200 nodes and
//! 600 quiet seconds; watches of pods end after 5 to 10 minutes, those of objects after 30 to 60, so that shows what they cost.

#[path = "../tests/api_server/mod.rs"]
mod api_server;

use std::env;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use podfs::node::feed::{Feed, FeedEvent, FeedSettings, PodSource};
use podfs::source::SettingsSource;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::runtime::Runtime;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use api_server::{ApiServer, MASTERS, Style, User};

/// Objects of a node's own, beside one that all nodes have in common.
const OBJECTS: usize = 2;
/// How long the server is away.
const OUTAGE: Duration = Duration::from_secs(5);
/// How long anything may take.
const TIMEOUT: Duration = Duration::from_secs(120);

fn main() {
    let numbers: Vec<u64> = env::args().skip(1).filter_map(|argument| argument.parse().ok()).collect();
    let nodes = numbers.first().map_or(1000, |nodes| usize::try_from(*nodes).expect("a number of nodes"));
    let quiet = Duration::from_secs(numbers.get(1).copied().unwrap_or(60));
    raise_limit_on_files();
    let server = Arc::new(ApiServer::start());
    put_cluster(&server, nodes);
    let runtime = Runtime::new().expect("a runtime");

    let (current, mut reports) = unbounded_channel();
    let (begun, rate, used) = (Instant::now(), Rate::measure(&server), cpu_time());
    let user = User::new("admin", MASTERS);
    let kubeconfig = server.kubeconfig_of(&user, Style::Token);
    for node in 0..nodes {
        runtime.spawn(run(SettingsSource::Kubeconfig(kubeconfig.clone()), node, current.clone()));
    }
    let last = runtime.block_on(all_current(&mut reports, nodes, 0, begun));
    report(&format!("{nodes} nodes at once"), &last, &server, rate, used);

    server.forget_requests();
    let used = cpu_time();
    thread::sleep(quiet);
    let requests = server.request_count();
    let per_minute = requests as f64 * 60.0 / quiet.as_secs_f64();
    println!(
        "{} s without a change: {requests} requests, {per_minute:.0} in a minute; {:.2} s of CPU time",
        quiet.as_secs(),
        (cpu_time() - used).as_secs_f64()
    );

    server.crash();
    put_objects(&server, nodes, 1);
    thread::sleep(OUTAGE);
    server.forget_requests();
    let (rate, used) = (Rate::measure(&server), cpu_time());
    server.boot();
    server.become_ready();
    let last = runtime.block_on(all_current(&mut reports, nodes, 1, Instant::now()));
    report(&format!("{} s away", OUTAGE.as_secs()), &last, &server, rate, used);
    runtime.shutdown_timeout(Duration::from_secs(5));
}

/// A node and its one pod: reports each serial that a supervisor would have been sent.
async fn run(access: SettingsSource, node: usize, current: UnboundedSender<u64>) {
    let settings = FeedSettings { api: Some(access), node: Some(format!("node-{node}")), ..FeedSettings::default() };
    let mut feed = Feed::open(settings).await.expect("a feed");
    let pod = loop {
        if let FeedEvent::Pods(PodSource::Api, pods) = feed.next().await {
            break pods.into_iter().next().expect("one pod");
        }
    };
    let mut objects = feed.objects().follow(&pod);
    let mut serials = [None; OBJECTS];
    let mut reported = None;
    loop {
        let push = tokio::select! {
            push = objects.next() => push,
            _ = feed.next() => continue,
        };
        for object in &push.objects {
            let name = object["metadata"]["name"].as_str().unwrap_or_default();
            let place = name.rsplit_once('-').and_then(|(_, place)| place.parse::<usize>().ok());
            let serial = object["data"]["serial"].as_str().and_then(|serial| serial.parse::<u64>().ok());
            if let (Some(place), Some(serial)) = (place.filter(|place| *place < OBJECTS), serial) {
                serials[place] = Some(serial);
            }
        }
        let least = serials.iter().copied().min().flatten();
        if least.is_some() && least != reported {
            reported = least;
            // This fails only when the bench ends.
            let _ = current.send(least.unwrap_or_default());
        }
    }
}

/// When each node was current, since `begun`.
async fn all_current(reports: &mut UnboundedReceiver<u64>, nodes: usize, serial: u64, begun: Instant) -> Vec<Duration> {
    let mut times = Vec::new();
    while times.len() < nodes {
        let next = tokio::time::timeout(TIMEOUT, reports.recv()).await;
        let Ok(Some(reported)) = next else { panic!("{} of {nodes} nodes are current", times.len()) };
        if reported == serial {
            times.push(begun.elapsed());
        }
    }
    times
}

fn report(what: &str, times: &[Duration], server: &ApiServer, rate: Rate, used: Duration) {
    let (median, last) = (times[times.len() / 2], times[times.len() - 1]);
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    println!(
        "{what}: current after {:.2} s (median), {:.2} s (last); {} requests, at most {} in a second; {} connections so far; \
         {:.1} s of CPU time on {cpus} CPUs",
        median.as_secs_f64(),
        last.as_secs_f64(),
        server.request_count(),
        rate.end(),
        server.connection_count(),
        (cpu_time() - used).as_secs_f64()
    );
}

/// The CPU time of this process so far: of all clients and of the server.
fn cpu_time() -> Duration {
    // A tick is 10 ms (`sysconf(_SC_CLK_TCK)` is 100 on every Linux that podfs runs on).
    let stat = fs::read_to_string("/proc/self/stat").expect("it is there");
    let fields = stat.rsplit_once(") ").map(|(_, rest)| rest.split(' ').skip(11).take(2));
    let ticks: u64 = fields.into_iter().flatten().filter_map(|ticks| ticks.parse::<u64>().ok()).sum();
    Duration::from_millis(ticks * 10)
}

/// The most requests in any second.
struct Rate {
    ends: Arc<AtomicBool>,
    thread: JoinHandle<usize>,
}

impl Rate {
    fn measure(server: &Arc<ApiServer>) -> Rate {
        let ends = Arc::new(AtomicBool::new(false));
        let (server, over) = (Arc::clone(server), Arc::clone(&ends));
        let thread = thread::spawn(move || {
            let mut counts: Vec<usize> = Vec::new();
            while !over.load(Ordering::Relaxed) {
                counts.push(server.request_count());
                thread::sleep(Duration::from_millis(100));
            }
            counts.push(server.request_count());
            let second = |at: usize| counts[at] - counts[at.saturating_sub(10)];
            (0..counts.len()).map(second).max().unwrap_or_default()
        });
        Rate { ends, thread }
    }

    fn end(self) -> usize {
        self.ends.store(true, Ordering::Relaxed);
        self.thread.join().expect("it counts")
    }
}

fn put_cluster(server: &ApiServer, nodes: usize) {
    server.put("{apiVersion: v1, kind: ConfigMap, metadata: {name: kube-root-ca.crt}, data: {ca.crt: anchors}}");
    put_objects(server, nodes, 0);
    for node in 0..nodes {
        let own = (0..OBJECTS).map(|place| format!("{{name: v{place}, configMap: {{name: config-{node}-{place}}}}}"));
        let volumes = own.collect::<Vec<_>>().join(", ");
        server.put(&format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: pod-{node}, namespace: default, uid: uid-{node}}}, spec: {{\
             nodeName: node-{node}, containers: [{{name: c, image: i}}], volumes: [{volumes}, \
             {{name: ca, configMap: {{name: kube-root-ca.crt}}}}]}}}}"
        ));
    }
}

fn put_objects(server: &ApiServer, nodes: usize, serial: u64) {
    for (node, place) in (0..nodes).flat_map(|node| (0..OBJECTS).map(move |place| (node, place))) {
        server.put(&format!(
            "{{apiVersion: v1, kind: ConfigMap, metadata: {{name: config-{node}-{place}}}, data: {{serial: '{serial}'}}}}"
        ));
    }
}

/// Raises the limit on descriptors: each node has a connection, and this process has both ends.
fn raise_limit_on_files() {
    let limit = getrlimit(Resource::Nofile);
    // If that is not allowed, the first connection above the limit fails.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}
