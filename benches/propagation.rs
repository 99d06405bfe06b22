//! How long a change takes: from the change of an object on an API server to its being visible in a volume. `cargo bench
//! --bench propagation`. Needs root and `/dev/fuse`.
//!
//! The API server is that of the tests, on loopback, in this process. A change is visible when a watcher of the volume's
//! directory, such as a program that follows its configuration, has got the inotify event and reads the new content.
//! Measured are one volume whose object changes again and again, and 200 pods of 5 volumes each whose 1000 objects all
//! change within a second. Then: the CPU time of an idle pod of 3 volumes.

#[path = "../tests/api_server/mod.rs"]
mod api_server;
#[path = "../tests/common/mod.rs"]
mod common;

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use api_server::{ApiServer, Style};
use common::{Fixture, PODFS, Running, config_map, eventually};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};
use nix::unistd::Pid;

const NODE: &str = "node";
/// The number of changes of the one object.
const CHANGES: usize = 500;
/// The number of pods in the second measurement, and of the volumes of each.
const PODS: usize = 200;
const VOLUMES: usize = 5;
/// How often all objects change, and within which time they do.
const ROUNDS: usize = 5;
const WITHIN: Duration = Duration::from_secs(1);
/// How many pods start at a time.
const AT_ONCE: usize = 10;
/// How long the idle pod is measured.
const IDLE: Duration = Duration::from_secs(20);

fn main() {
    one();
    many();
    idle();
}

fn one() {
    let node = Node::new(1, 1);
    let pods = node.start();
    let arrivals = watch(&pods);
    let mut times = Vec::new();
    for serial in 1..=CHANGES {
        let changed = Instant::now();
        node.put(0, serial);
        times.push(wait(&arrivals, &[0], serial)[0] - changed);
    }
    report(&format!("1 volume, {CHANGES} changes one after another"), times);
}

fn many() {
    let node = Node::new(PODS, VOLUMES);
    let pods = node.start();
    let arrivals = watch(&pods);
    let objects: Vec<usize> = (0..PODS * VOLUMES).collect();
    let mut times = Vec::new();
    for serial in 1..=ROUNDS {
        let begun = Instant::now();
        let changed: Vec<Instant> = objects
            .iter()
            .map(|object| {
                let due = begun
                    + WITHIN * u32::try_from(*object).expect("small") / u32::try_from(objects.len()).expect("small");
                thread::sleep(due.saturating_duration_since(Instant::now()));
                let changed = Instant::now();
                node.put(*object, serial);
                changed
            })
            .collect();
        let visible = wait(&arrivals, &objects, serial);
        times.extend(visible.iter().zip(&changed).map(|(visible, changed)| *visible - *changed));
    }
    let what = format!("{} objects in {PODS} pods, all within {WITHIN:?}, {ROUNDS} times", objects.len());
    report(&what, times);
}

fn idle() {
    let node = Node::new(1, 3);
    let pods = node.start();
    let running = &pods[0].running;
    let mut processes = vec![("supervisor", running.pid()), ("server", running.server())];
    processes.extend(running.keepers().into_iter().map(|keeper| ("keeper", keeper)));
    let before: Vec<_> = processes.iter().map(|(_, process)| wake_ups(*process)).collect();
    thread::sleep(IDLE);
    let mut total = 0;
    for ((what, process), before) in processes.iter().zip(before) {
        let (pss, mut woken) = (pss(*process), wake_ups(*process));
        total += pss;
        woken.iter_mut().for_each(|(thread, times)| *times -= before.get(thread).unwrap_or(&0));
        println!("idle pod of 3 volumes, {what}: PSS {:.1} MiB, wake-ups in {IDLE:?} by thread: {woken:?}", mib(pss));
    }
    println!("idle pod of 3 volumes, all: PSS {:.1} MiB", mib(total));
}

/// An API server, and pods on a node whose objects it has.
struct Node {
    server: ApiServer,
    fixture: Fixture,
    kubeconfig: PathBuf,
    pods: usize,
    volumes: usize,
}

/// A pod that runs.
struct Pod {
    running: Running,
    /// Its volumes, by the numbers of their objects.
    volumes: Vec<(usize, PathBuf)>,
}

impl Node {
    fn new(pods: usize, volumes: usize) -> Self {
        let server = ApiServer::start();
        let kubeconfig = server.kubeconfig(NODE, Style::Embedded);
        let node = Self { server, fixture: Fixture::new(""), kubeconfig, pods, volumes };
        (0..pods * volumes).for_each(|object| node.put(object, 0));
        (0..pods).for_each(|pod| node.put_pod(pod));
        node
    }

    /// Changes an object.
    fn put(&self, object: usize, serial: usize) {
        self.server.put(&config_map(&format!("config-{object}"), &[("serial", &serial.to_string())]));
    }

    fn put_pod(&self, pod: usize) {
        let volumes: Vec<String> = (0..self.volumes)
            .map(|volume| format!("{{name: v{volume}, configMap: {{name: config-{}}}}}", pod * self.volumes + volume))
            .collect();
        self.server.put(&format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: pod-{pod}, uid: uid-{pod}}}, spec: {{nodeName: {NODE}, containers: \
             [{{name: web, image: web}}], volumes: [{}]}}}}",
            volumes.join(", ")
        ));
    }

    /// Starts all pods, and waits until they show their objects, and watch them.
    fn start(&self) -> Vec<Pod> {
        let numbers: Vec<usize> = (0..self.pods).collect();
        let mut pods = Vec::new();
        for numbers in numbers.chunks(AT_ONCE) {
            let started: Vec<Running> =
                numbers.iter().map(|pod| self.fixture.start_command(self.command(*pod))).collect();
            for (pod, mut running) in numbers.iter().zip(started) {
                running.wait_ready();
                let volume = |volume: usize| (pod * self.volumes + volume, running.volume(&format!("v{volume}")));
                let volumes = (0..self.volumes).map(volume).collect();
                pods.push(Pod { running, volumes });
            }
        }
        for (object, volume) in pods.iter().flat_map(|pod| &pod.volumes) {
            eventually("a volume shows its object", || serial(volume) == Some(0));
            eventually("it is watched", || self.server.watches("ConfigMap", &format!("config-{object}")) == 1);
        }
        pods
    }

    fn command(&self, pod: usize) -> Command {
        let mut command = Command::new(PODFS);
        command.args(["run", "--pod-name"]).arg(format!("default/pod-{pod}")).arg("--kubeconfig").arg(&self.kubeconfig);
        command.arg("--root-dir").arg(self.fixture.path("root")).arg("--run-dir").arg(self.fixture.path("run"));
        command
    }
}

/// An object with this serial number is visible since `at`.
struct Arrival {
    object: usize,
    serial: usize,
    at: Instant,
}

/// Reports every switch of every volume.
fn watch(pods: &[Pod]) -> Receiver<Arrival> {
    let inotify = Inotify::init(InitFlags::IN_CLOEXEC).expect("an inotify instance");
    let add = |(object, volume): &(usize, PathBuf)| {
        let watch = inotify.add_watch(volume, AddWatchFlags::IN_MOVED_TO).expect("a watch");
        (watch, (*object, volume.clone()))
    };
    let volumes: HashMap<WatchDescriptor, (usize, PathBuf)> =
        pods.iter().flat_map(|pod| &pod.volumes).map(add).collect();
    let (sender, arrivals) = channel();
    thread::spawn(move || {
        while let Ok(events) = inotify.read_events() {
            for event in events {
                let Some((object, volume)) = volumes.get(&event.wd) else { return };
                let Some(serial) = serial(volume) else { continue };
                if sender.send(Arrival { object: *object, serial, at: Instant::now() }).is_err() {
                    return;
                }
            }
        }
    });
    arrivals
}

fn serial(volume: &Path) -> Option<usize> {
    fs::read_to_string(volume.join("serial")).ok()?.parse().ok()
}

/// When each of the objects was visible with this serial number.
fn wait(arrivals: &Receiver<Arrival>, objects: &[usize], serial: usize) -> Vec<Instant> {
    let mut visible = HashMap::new();
    while visible.len() < objects.len() {
        let arrival = arrivals.recv_timeout(common::TIMEOUT).expect("every change becomes visible");
        if arrival.serial == serial {
            visible.entry(arrival.object).or_insert(arrival.at);
        }
    }
    objects.iter().map(|object| visible[object]).collect()
}

fn report(what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let milliseconds = |part: usize| times[(times.len() * part / 100).min(times.len() - 1)].as_secs_f64() * 1000.0;
    let longest = times[times.len() - 1].as_secs_f64() * 1000.0;
    println!("{what}: median {:.2} ms, p99 {:.2} ms, longest {longest:.2} ms", milliseconds(50), milliseconds(99));
}

/// The memory of a process (PSS), in KiB.
fn pss(process: Pid) -> u64 {
    field(Path::new(&format!("/proc/{process}/smaps_rollup")), "Pss:")
}

/// The number of voluntary context switches of a process's threads, by their names.
fn wake_ups(process: Pid) -> BTreeMap<String, u64> {
    let mut all = BTreeMap::new();
    for task in fs::read_dir(format!("/proc/{process}/task")).expect("threads") {
        let task = task.expect("a thread").path();
        let name = fs::read_to_string(task.join("comm")).expect("a name").trim().to_owned();
        *all.entry(name).or_default() += field(&task.join("status"), "voluntary_ctxt_switches:");
    }
    all
}

fn field(file: &Path, name: &str) -> u64 {
    let text = fs::read_to_string(file).expect("a file of proc");
    let line = text.lines().find(|line| line.starts_with(name)).expect("the field");
    line.split_whitespace().nth(1).expect("a value").parse().expect("a number")
}

fn mib(kib: u64) -> f64 {
    f64::from(u32::try_from(kib).expect("a process is small")) / 1024.0
}
