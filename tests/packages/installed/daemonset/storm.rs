//! The tests kill the container of the DaemonSet, supervisors and servers in a random order while processes read volumes: no
//! call fails.

use std::env;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::container::DaemonContainer;
use super::image::Image;
use super::{node, publish, write_config};
use crate::common::kubelet::{KubeletCalls, Volume};
use crate::common::turn::Turn;
use crate::common::{eventually, wait_content};
use crate::installed::machine::{Init, Machine};

/// The pods that exist during the whole test. Each round adds and removes another pod.
const STAYING: [&str; 2] = ["stays-a", "stays-b"];
/// The environment variable with the duration of the kills in seconds (CONTRIBUTING.md).
const SOAK: &str = "PODFS_DAEMONSET_SOAK";
/// The duration without that variable. Each kind of fault comes at least once.
const SHORT: Duration = Duration::from_secs(5);

/// A fault of the node.
#[derive(Clone, Copy, Debug)]
enum Strike {
    /// All processes in the container's cgroup are killed, as when the memory of the cgroup is used up.
    Container,
    /// The container gets SIGTERM, and a container of the other image replaces it.
    Upgrade,
    /// The supervisor of a pod is killed.
    Supervisor,
    /// The server of a pod is killed.
    Server,
    /// The supervisor and the server of a pod are killed while there is no container.
    AllOfPod,
}

const STRIKES: [Strike; 5] = [Strike::Container, Strike::Upgrade, Strike::Supervisor, Strike::Server, Strike::AllOfPod];

/// A node in the storm.
struct Storm<'a> {
    machine: &'a Machine,
    kubelet: &'a KubeletCalls,
    images: &'a [Image; 2],
    container: Option<DaemonContainer<'a>>,
    /// The number of containers so far.
    containers: usize,
}

impl<'a> Storm<'a> {
    fn new(machine: &'a Machine, kubelet: &'a KubeletCalls, images: &'a [Image; 2]) -> Storm<'a> {
        let mut storm = Storm { machine, kubelet, images, container: None, containers: 0 };
        storm.start(0);
        storm
    }

    /// Starts a container of an image.
    fn start(&mut self, image: usize) {
        let name = format!("storm-{}", self.containers);
        self.container = Some(DaemonContainer::start(self.machine, &name, &self.images[image]));
        self.containers += 1;
    }

    fn container(&self) -> &DaemonContainer<'a> {
        self.container.as_ref().expect("a container runs")
    }

    /// The pids of the supervisor and the server of a pod. Waits until the pod has both.
    fn processes(&self, pod: &str) -> [i64; 2] {
        let mut pids = None;
        eventually("the pod has its processes", || {
            let outcome =
                self.container().exec(&format!("podfs status --output json --run-dir=/run/podfs --pod uid-{pod}"));
            let status: Value = serde_json::from_str(&outcome.out).unwrap_or_default();
            let pid = |process: &str| status["pods"][0][process]["pid"].as_i64();
            pids = pid("supervisor").zip(pid("server"));
            pids.is_some()
        });
        pids.map(|(supervisor, server)| [supervisor, server]).expect("the loop has set them")
    }

    fn strike(&mut self, strike: Strike, pod: &str) {
        let kill = |pids: &[i64]| {
            // A process may have ended by itself, as a server does when its supervisor fails.
            pids.iter().for_each(|pid| drop(self.machine.run(&format!("kill -KILL {pid}"))));
        };
        let image = fastrand::usize(..2);
        match strike {
            Strike::Container => {
                self.container.take().expect("a container runs").kill();
                self.start(image);
            }
            Strike::Upgrade => {
                self.container.take().expect("a container runs").delete();
                self.start(image);
            }
            Strike::Supervisor | Strike::Server => {
                let index = usize::from(matches!(strike, Strike::Server));
                let before = self.processes(pod)[index];
                kill(&[before]);
                eventually("another process serves the pod", || self.processes(pod)[index] != before);
            }
            Strike::AllOfPod => {
                let [supervisor, server] = self.processes(pod);
                self.container.take().expect("a container runs").kill();
                kill(&[supervisor]);
                self.start(image);
                eventually("another supervisor serves the pod", || self.processes(pod)[0] != supervisor);
                kill(&[server]);
            }
        }
    }

    /// Publishes a volume again, as a kubelet does at each sync of a pod.
    #[track_caller]
    fn publish(&self, volume: &Volume) {
        if let Err(status) = self.kubelet.publish(volume) {
            panic!("{status:?}\n{}", self.container().log());
        }
    }
}

fn no_call_fails(test: &str, init: Init) {
    let Some((machine, kubelet, images)) = node(test, init) else { return };
    let time = env::var(SOAK).map_or(SHORT, |seconds| {
        Duration::from_secs(seconds.parse().expect("PODFS_DAEMONSET_SOAK is a number of seconds"))
    });
    let _turn = Turn::of_soak();
    write_config(&machine, "v0");
    let mut storm = Storm::new(&machine, &kubelet, images);
    let staying = STAYING.map(|pod| publish(&kubelet, storm.container(), pod));
    let files: Vec<PathBuf> = staying.iter().map(|volume| volume.target.join("key")).collect();
    let (stop, calls) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        let read = |file: &PathBuf| {
            while !stop.load(Ordering::Relaxed) {
                match fs::read_to_string(file) {
                    Ok(text) if text.starts_with('v') => calls.fetch_add(1, Ordering::Relaxed),
                    outcome => return Err(format!("{}: {outcome:?}", file.display())),
                };
                // Without a pause, the two readers would take the CPUs that the new processes need.
                thread::sleep(Duration::from_millis(1));
            }
            Ok(())
        };
        let readers: Vec<_> = files.iter().map(|file| scope.spawn(move || read(file))).collect();
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let deadline = Instant::now() + time;
            let mut order = STRIKES.to_vec();
            fastrand::shuffle(&mut order);
            for number in 0.. {
                if number >= order.len() && Instant::now() >= deadline {
                    break;
                }
                let strike = order.get(number).copied().unwrap_or_else(|| STRIKES[fastrand::usize(..STRIKES.len())]);
                storm.strike(strike, STAYING[fastrand::usize(..STAYING.len())]);
                let value = format!("v{}", number + 1);
                write_config(&machine, &value);
                let temporary = publish(&kubelet, storm.container(), "comes");
                for file in files.iter().chain([&temporary.target.join("key")]) {
                    wait_content(file, &value);
                }
                staying.iter().for_each(|volume| storm.publish(volume));
                kubelet.end_pod("comes", &[temporary]);
            }
        }));
        stop.store(true, Ordering::Relaxed);
        for reader in readers {
            let log = || storm.container.as_ref().map(DaemonContainer::log).unwrap_or_default();
            assert_eq!(reader.join().expect("a reader ends"), Ok(()), "{}", log());
        }
        if let Err(panic) = outcome {
            std::panic::resume_unwind(panic);
        }
    });
    assert!(calls.load(Ordering::Relaxed) > 100, "the volumes were in use");
    STAYING.iter().zip(&staying).for_each(|(pod, volume)| kubelet.end_pod(pod, std::slice::from_ref(volume)));
    eventually("nothing of the pods is left", || {
        machine.run("! grep -q -e fuse.podfs /proc/self/mountinfo && [ -z \"$(ls /run/podfs | grep uid-)\" ]").code
            == Some(0)
    });
    storm.container.take().expect("a container runs").delete();
    machine.eventually("! grep -l '^podfs' /proc/[0-9]*/comm");
}

#[test]
fn kills_of_the_container_supervisors_and_servers_fail_no_call_where_systemd_runs() {
    no_call_fails("kills_of_the_container_supervisors_and_servers_fail_no_call_where_systemd_runs", Init::Systemd);
}

#[test]
fn kills_of_the_container_supervisors_and_servers_fail_no_call_without_systemd() {
    no_call_fails("kills_of_the_container_supervisors_and_servers_fail_no_call_without_systemd", Init::Nothing);
}
