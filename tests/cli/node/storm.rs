//! Kills of the daemon, of supervisors and of servers in a random order, while pods are added, changed and deleted.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::lifecycle::pod;
use serde_json::Value;

use crate::common::node::Node;
use crate::common::turn::Turn;
use crate::common::{TIMEOUT, config_map, eventually, wait_content};

const CONFIG: &str = "{name: config, configMap: {name: app}}";
const SCRATCH: &str = "{name: scratch, emptyDir: {}}";
/// The number of pods that stay while others are added and deleted.
const STAYING: usize = 4;
/// The least number of kills.
const STRIKES: usize = 25;
/// The duration of the kills, in seconds (CONTRIBUTING.md); the default is a few rounds.
const SOAK: &str = "PODFS_NODE_SOAK";
/// The number of kinds of strikes.
const KINDS: usize = 5;

/// A fault of the node.
#[derive(Clone, Copy)]
enum Strike {
    /// The daemon is killed, and started again.
    Daemon,
    /// The supervisor of a pod is killed.
    Supervisor,
    /// The server of a pod is killed.
    Server,
    /// An object changes, a pod is deleted, and another one is added.
    Change,
    /// The daemon and the supervisor of a pod are killed, and the pod is deleted before the daemon is started again.
    DaemonAndPod,
}

/// The processes of a pod: its supervisor and its server.
pub(super) fn processes(node: &Node, uid: &str) -> Option<(Pid, Pid)> {
    let pods = node.fixture.pods();
    // A pod whose server was killed several times is degraded for a while.
    let is_served = |pod: &Value| pod["state"] == "running" || pod["state"] == "degraded";
    let pod = pods.iter().find(|pod| pod["uid"] == uid && is_served(pod))?;
    let pid = |of: &str| i32::try_from(pod[of]["pid"].as_i64()?).ok().map(Pid::from_raw);
    Some((pid("supervisor")?, pid("server")?))
}

/// The processes of a pod, once it is served.
#[track_caller]
fn wait_processes(node: &Node, uid: &str) -> (Pid, Pid) {
    let mut pids = None;
    eventually("the pod is served", || {
        pids = processes(node, uid);
        pids.is_some()
    });
    pids.expect("the closure has set it")
}

/// The number of supervisors that serve the pod with this uid.
fn supervisors(node: &Node, uid: &str) -> usize {
    let words = |pid: &Pid| fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let is_of_pod = |pid: &Pid| {
        let words = words(pid);
        let words: Vec<_> = words.split(|byte| *byte == 0).collect();
        words.first() == Some(&b"podfs-supervisor".as_slice()) && words.contains(&uid.as_bytes())
    };
    node.fixture.processes().iter().filter(|pid| is_of_pod(pid)).count()
}

/// Reads a key and writes a file until the test sets `stop`, or a call fails.
fn use_volumes(config: &Path, scratch: &Path, stop: &AtomicBool, calls: &AtomicU64) -> Result<(), String> {
    let failed = |path: &Path, error: std::io::Error| Err(format!("{}: {error}", path.display()));
    while !stop.load(Ordering::Relaxed) {
        match fs::read_to_string(config.join("key")) {
            Ok(text) if text.starts_with('v') => {}
            Ok(text) => return Err(format!("the key reads {text:?}")),
            Err(error) => return failed(config, error),
        }
        if let Err(error) = fs::write(scratch.join("file"), "data").and_then(|()| fs::remove_file(scratch.join("file")))
        {
            return failed(scratch, error);
        }
        calls.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

#[test]
fn kills_of_daemon_supervisors_and_servers_fail_no_call_and_leave_nothing_of_pods_that_are_gone() {
    let (_turn, node) = (Turn::of_soak(), Node::new());
    let soak = std::env::var(SOAK).map_or(Duration::ZERO, |seconds| {
        Duration::from_secs(seconds.parse().expect("PODFS_NODE_SOAK is a number of seconds"))
    });
    let mut order = [Strike::Daemon, Strike::Supervisor, Strike::Server, Strike::Change, Strike::DaemonAndPod];
    let command = || {
        let mut command = node.command();
        command.arg("--release-when-gone");
        command
    };
    node.put("app.yaml", &config_map("app", &[("key", "v0")]));
    let name = |number: usize| format!("stays{number}");
    let put = |name: &str| node.put(&format!("{name}.yaml"), &pod(name, &[CONFIG, SCRATCH], &["config", "scratch"]));
    (0..STAYING).for_each(|number| put(&name(number)));
    let mut daemon = node.start_command(command());
    let mut paths: Vec<(PathBuf, PathBuf)> = Vec::new();
    for number in 0..STAYING {
        node.expect(&["wait", &format!("default/{}", name(number))]);
        paths.push((node.path(&name(number), "config"), node.path(&name(number), "scratch")));
    }
    let (stop, calls) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut gone: Vec<String> = Vec::new();
    thread::scope(|scope| {
        let readers: Vec<_> =
            paths.iter().map(|(config, scratch)| scope.spawn(|| use_volumes(config, scratch, &stop, &calls))).collect();
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut comes: Option<String> = None;
            let began = Instant::now();
            for strike in 0.. {
                // Each kind of strike occurs once in a round, in a new random order.
                if strike % KINDS == 0 {
                    if strike >= STRIKES && began.elapsed() >= soak {
                        break;
                    }
                    fastrand::shuffle(&mut order);
                }
                let target = format!("uid-{}", name(fastrand::usize(..STAYING)));
                match order[strike % KINDS] {
                    Strike::Daemon => {
                        daemon.signal(Signal::SIGKILL);
                        daemon.wait();
                        daemon = node.start_command(command());
                    }
                    kind @ (Strike::Supervisor | Strike::Server) => {
                        let (supervisor, server) = wait_processes(&node, &target);
                        let is_supervisor = matches!(kind, Strike::Supervisor);
                        kill(if is_supervisor { supervisor } else { server }, Signal::SIGKILL).expect("killed");
                        eventually("another process serves the pod", || {
                            processes(&node, &target).is_some_and(|(now, then)| {
                                if is_supervisor { now != supervisor } else { then != server }
                            })
                        });
                    }
                    Strike::Change => {
                        if let Some(old) = comes.take() {
                            node.remove(&format!("{old}.yaml"));
                            gone.push(old);
                        }
                        let new = format!("comes{strike}");
                        put(&new);
                        comes = Some(new);
                        let value = format!("v{strike}");
                        node.put("app.yaml", &config_map("app", &[("key", &value)]));
                        paths.iter().for_each(|(config, _)| wait_content(&config.join("key"), &value));
                    }
                    Strike::DaemonAndPod => {
                        let old = format!("dies{strike}");
                        put(&old);
                        let (supervisor, _) = wait_processes(&node, &format!("uid-{old}"));
                        daemon.signal(Signal::SIGKILL);
                        daemon.wait();
                        kill(supervisor, Signal::SIGKILL).expect("killed");
                        node.remove(&format!("{old}.yaml"));
                        daemon = node.start_command(command());
                        gone.push(old);
                    }
                }
            }
            gone.extend(comes);
        }));
        stop.store(true, Ordering::Relaxed);
        for reader in readers {
            let read = reader.join().expect("a reader ends");
            assert_eq!(read, Ok(()), "{}", node.log());
        }
        if let Err(panic) = outcome {
            std::panic::resume_unwind(panic);
        }
    });
    assert!(calls.load(Ordering::Relaxed) > STRIKES as u64, "the volumes were in use");
    for number in 0..STAYING {
        assert_eq!(supervisors(&node, &format!("uid-{}", name(number))), 1, "{}", node.log());
        node.remove(&format!("{}.yaml", name(number)));
        gone.push(name(number));
    }
    if let Some(last) = gone.iter().find(|name| node.fixture.path(&format!("manifests/{name}.yaml")).exists()) {
        node.remove(&format!("{last}.yaml"));
    }
    for name in &gone {
        let deadline = Instant::now() + TIMEOUT;
        while !node.is_clean(&format!("uid-{name}")) {
            assert!(
                Instant::now() < deadline,
                "something of pod {name} is left:\n{:#?}\n{}",
                node.pod(name),
                node.log()
            );
            thread::sleep(Duration::from_millis(5));
        }
    }
    eventually("only the daemon is left", || node.fixture.processes() == [daemon.pid()]);
    assert!(node.fixture.mounts().is_empty());
}
