//! Faults of the processes of a pod under load: kills of one or two of them, upgrades, and a supervisor that another version follows.

use std::process::Stdio;
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{Pod, Running, eventually, load_time, number};

/// The faults.
const FAULTS: [&str; 10] = [
    "the server killed",
    "the keeper killed",
    "the supervisor killed",
    "an upgrade",
    "server and keeper killed at once",
    "supervisor and keeper killed at once",
    "servers killed again and again, then a keeper in the pause",
    "the supervisor killed, and the other build started",
    "the servers killed during an upgrade",
    "the supervisor killed during an upgrade",
];

/// Injects so many random faults while callers use the pod's volumes.
pub fn inject_at_random(mut pod: Pod, faults: u64) {
    let mut random = Random(number("PODFS_SOAK_SEED").unwrap_or(load_time().to_bits() | 1));
    println!("PODFS_SOAK_SEED={}", random.0);
    let mut counts = [0; FAULTS.len()];
    pod.under_load(|pod, running| {
        counts[inject(&mut random, pod, running)] += 1;
        // The next fault mostly comes during ordinary work of a server, and sometimes while the successor still gets ready.
        if random.below(5) > 0 {
            let _answered = rustix::fs::statvfs(running.volume("config"));
        }
        thread::sleep(Duration::from_millis(random.below(20)));
        counts.iter().sum::<u64>() < faults
    });
    for (fault, count) in FAULTS.iter().zip(counts) {
        println!("{count} times: {fault}");
    }
}

/// Injects a random fault, and returns its index in [`FAULTS`].
fn inject(random: &mut Random, pod: &mut Pod, running: &mut Running) -> usize {
    let fault = match random.below(20) {
        number @ 0..9 => number as usize + 1,
        _ => 0,
    };
    println!("{:.3} {}", load_time(), FAULTS[fault]);
    match fault {
        0 => kill_all(running.servers()),
        1 => {
            wait_for_server(running);
            let message = "the keeper of the server's open files ended; podfs has started another one";
            let before = running.log().matches(message).count();
            kill_all(running.keepers());
            running.wait_log_times(message, before + 1);
        }
        2 => restart_supervisor(pod, running),
        3 => {
            wait_for_server(running);
            pod.builds.upgrade(&pod.fixture);
        }
        4 => {
            let both = running.servers().into_iter().chain(running.keepers());
            kill_all(both.collect());
        }
        5 => {
            wait_for_server(running);
            kill_all(running.keepers());
            pod.fixture.kill_supervisor(running);
            *running = pod.builds.run(&pod.fixture);
        }
        6 => {
            for _ in 0..8 {
                kill_all(running.servers());
                thread::sleep(Duration::from_millis(random.below(4)));
            }
            kill_all(running.keepers());
        }
        7 => {
            pod.builds.put_other();
            restart_supervisor(pod, running);
        }
        8 => during_upgrade(random, pod, running, |_, running| kill_all(running.servers())),
        _ => during_upgrade(random, pod, running, |pod, running| {
            pod.fixture.kill_supervisor(running);
            *running = pod.builds.run(&pod.fixture);
        }),
    }
    fault
}

/// Starts an upgrade to the other build, and injects a fault some milliseconds later. The upgrade may fail then.
fn during_upgrade(random: &mut Random, pod: &mut Pod, running: &mut Running, fault: impl FnOnce(&Pod, &mut Running)) {
    wait_for_server(running);
    pod.builds.put_other();
    let mut command = pod.fixture.operator("upgrade");
    let mut upgrade = command.arg("--all").stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("podfs starts");
    thread::sleep(Duration::from_millis(random.below(100)));
    fault(pod, running);
    eventually("the upgrade ends", || upgrade.try_wait().expect("a child").is_some());
}

/// Kills the supervisor while a server serves, and starts the installed podfs.
fn restart_supervisor(pod: &Pod, running: &mut Running) {
    wait_for_server(running);
    pod.fixture.kill_supervisor(running);
    *running = pod.builds.run(&pod.fixture);
}

/// Kills processes. Some of them may already have ended.
pub fn kill_all(processes: Vec<Pid>) {
    for process in processes {
        let _ = kill(process, Signal::SIGKILL);
    }
}

/// Waits until a server serves. If the supervisor and the last server were killed, the mounts would be dead.
fn wait_for_server(running: &Running) {
    let config = running.volume("config");
    eventually("one server serves, with one keeper", || {
        let _answered = rustix::fs::statvfs(&config);
        (running.servers().len(), running.keepers().len()) == (1, 1)
    });
}

/// A generator of pseudo-random numbers (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}
