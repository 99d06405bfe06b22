//! The tests kill and upgrade servers, keepers and supervisors at any time under mixed load: callers read, write, lock, list,
//! rename and watch in projections and in passthrough volumes with both data paths, and objects change. The tests also kill two
//! of the three processes at once, except the supervisor and the server together. No call may fail, no read may mix two
//! contents, and no effect may be lost or happen twice. One exception is allowed: an open file without a name may return
//! `ESTALE` in a volume whose files the server reads and writes.
//!
//! `PODFS_SOAK_KILLS` is the number of faults in the test with random faults. `PODFS_SOAK_ROUNDS` is the number of rounds in
//! the other tests. `PODFS_SOAK_SEED` repeats the random choices of an earlier run.

mod callers;
mod load;
mod over_the_dead;

use std::thread;
use std::time::{Duration, SystemTime};

use crate::common::identity::identity;
use crate::common::*;
use load::Pod;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

#[test]
fn no_call_fails_when_processes_are_killed_at_random() {
    let kills = number("PODFS_SOAK_KILLS").unwrap_or(120);
    let clock = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("a clock").as_nanos() as u64;
    let mut random = Random(number("PODFS_SOAK_SEED").unwrap_or(clock | 1));
    println!("PODFS_SOAK_SEED={}", random.0);
    let mut counts = [0; FAULTS.len()];
    Pod::new().under_load(|pod, running| {
        counts[inject_fault(&mut random, pod, running)] += 1;
        // The next fault mostly comes during ordinary work of a server, and sometimes while the successor still gets ready.
        if random.below(5) > 0 {
            let _answered = rustix::fs::statvfs(running.volume("config"));
        }
        thread::sleep(Duration::from_millis(random.below(20)));
        counts.iter().sum::<u64>() < kills
    });
    for (fault, count) in FAULTS.iter().zip(counts) {
        println!("{count} times: {fault}");
    }
}

/// The faults of a pod's processes.
const FAULTS: [&str; 7] = [
    "the server killed",
    "the keeper killed",
    "the supervisor killed",
    "an upgrade",
    "server and keeper killed at once",
    "supervisor and keeper killed at once",
    "servers killed again and again, then a keeper in the pause",
];

/// Injects a random fault, and returns its index in [`FAULTS`].
fn inject_fault(random: &mut Random, pod: &mut Pod, running: &mut Running) -> usize {
    let fault = match random.below(20) {
        number @ 0..6 => number as usize + 1,
        _ => 0,
    };
    match fault {
        0 => kill_all(running.servers()),
        1 => {
            wait_for_server(running);
            let message = "the keeper of the server's open files ended; podfs has started another one";
            let before = running.log().matches(message).count();
            kill_all(running.keepers());
            running.wait_log_times(message, before + 1);
        }
        2 => {
            wait_for_server(running);
            pod.fixture.kill_supervisor(running);
            *running = pod.builds.run(&pod.fixture);
        }
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
        _ => {
            for _ in 0..8 {
                kill_all(running.servers());
                thread::sleep(Duration::from_millis(random.below(4)));
            }
            kill_all(running.keepers());
        }
    }
    fault
}

/// Kills processes. Some of them may already have ended.
fn kill_all(processes: Vec<Pid>) {
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

#[test]
fn a_supervisor_that_adopts_again_and_again_under_load_finds_everything_as_it_was() {
    let mut remaining = rounds(20);
    let mut quiet = None;
    Pod::new().under_load(|pod, running| {
        let quiet = quiet.get_or_insert_with(|| pod.quiet_directory(&running.volume("host")));
        let still = running.volume("still");
        let before = (identity(&still), identity(quiet));
        let server = pod.fixture.kill_supervisor(running);
        *running = pod.builds.run(&pod.fixture);
        assert_eq!((identity(&still), identity(quiet)), before);
        assert_eq!(running.server(), server, "the supervisor has adopted the server");
        remaining -= 1;
        remaining > 0
    });
}

#[test]
fn a_pod_that_goes_from_version_to_version_under_load_loses_nothing() {
    let mut remaining = rounds(20);
    let mut quiet = None;
    Pod::new().under_load(|pod, running| {
        let quiet = quiet.get_or_insert_with(|| pod.quiet_directory(&running.volume("host")));
        let still = running.volume("still");
        let before = (identity(&still), identity(quiet));
        let (supervisor, server) = (running.pid(), running.server());
        pod.builds.upgrade(&pod.fixture);
        assert_eq!((identity(&still), identity(quiet)), before);
        assert_eq!(running.pid(), supervisor, "the supervisor is the same process");
        assert_ne!(running.server(), server, "another server has replaced the first one");
        remaining -= 1;
        remaining > 0
    });
}

/// The number of rounds that the environment sets, or this default.
fn rounds(default: u64) -> u64 {
    number("PODFS_SOAK_ROUNDS").unwrap_or(default)
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().expect("a number"))
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
