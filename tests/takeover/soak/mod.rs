//! Servers, keepers and supervisors are killed and upgraded at any time under mixed load: callers read, write, lock, list,
//! move and watch in projections and on both data paths of passthrough volumes, and objects change. Any of the three
//! processes are killed at once, except supervisor and server. No call may fail, no read be torn, no effect be lost or
//! doubled; only open files without a name may end with `ESTALE` where the server reads and writes them.
//!
//! `PODFS_SOAK_KILLS` says how many kills the mixed one makes, and `PODFS_SOAK_ROUNDS` how often the others repeat theirs;
//! `PODFS_SOAK_SEED` repeats the choices of an earlier run.

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
    let mut done = [0; STRIKES.len()];
    Pod::new().under_load(|pod, running| {
        done[strike(&mut random, pod, running)] += 1;
        // Sometimes the successor is struck while it gets ready, mostly in the middle of ordinary work.
        if random.below(5) > 0 {
            let _answered = rustix::fs::statvfs(running.volume("config"));
        }
        thread::sleep(Duration::from_millis(random.below(20)));
        done.iter().sum::<u64>() < kills
    });
    for (what, times) in STRIKES.iter().zip(done) {
        println!("{times} times: {what}");
    }
}

/// The faults of a pod's processes.
const STRIKES: [&str; 7] = [
    "the server killed",
    "the keeper killed",
    "the supervisor killed",
    "an upgrade",
    "server and keeper killed at once",
    "supervisor and keeper killed at once",
    "servers killed again and again, then a keeper in the pause",
];

/// Strikes; returns the index of the strike in [`STRIKES`].
fn strike(random: &mut Random, pod: &mut Pod, running: &mut Running) -> usize {
    let which = match random.below(20) {
        which @ 0..6 => which as usize + 1,
        _ => 0,
    };
    match which {
        0 => kill_all(running.servers()),
        1 => {
            settled(running);
            let told = "the keeper of the server's open files ended; podfs has started another one";
            let before = running.log().matches(told).count();
            kill_all(running.keepers());
            running.wait_log_times(told, before + 1);
        }
        2 => {
            settled(running);
            pod.fixture.kill_supervisor(running);
            *running = pod.builds.run(&pod.fixture);
        }
        3 => {
            settled(running);
            pod.builds.upgrade(&pod.fixture);
        }
        4 => {
            let both = running.servers().into_iter().chain(running.keepers());
            kill_all(both.collect());
        }
        5 => {
            settled(running);
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
    which
}

/// Kills processes, some of which may have ended.
fn kill_all(processes: Vec<Pid>) {
    for process in processes {
        let _ = kill(process, Signal::SIGKILL);
    }
}

/// Waits until a server serves: without supervisor and server, the mounts are dead.
fn settled(running: &Running) {
    let config = running.volume("config");
    eventually("one server serves, with one keeper", || {
        let _answered = rustix::fs::statvfs(&config);
        (running.servers().len(), running.keepers().len()) == (1, 1)
    });
}

#[test]
fn a_supervisor_that_adopts_again_and_again_under_load_finds_everything_as_it_was() {
    let mut left = rounds(20);
    let mut quiet = None;
    Pod::new().under_load(|pod, running| {
        let quiet = quiet.get_or_insert_with(|| pod.quiet_directory(&running.volume("host")));
        let still = running.volume("still");
        let before = (identity(&still), identity(quiet));
        let server = pod.fixture.kill_supervisor(running);
        *running = pod.builds.run(&pod.fixture);
        assert_eq!((identity(&still), identity(quiet)), before);
        assert_eq!(running.server(), server, "it is the same server");
        left -= 1;
        left > 0
    });
}

#[test]
fn a_pod_that_goes_from_version_to_version_under_load_loses_nothing() {
    let mut left = rounds(20);
    let mut quiet = None;
    Pod::new().under_load(|pod, running| {
        let quiet = quiet.get_or_insert_with(|| pod.quiet_directory(&running.volume("host")));
        let still = running.volume("still");
        let before = (identity(&still), identity(quiet));
        let (supervisor, server) = (running.pid(), running.server());
        pod.builds.upgrade(&pod.fixture);
        assert_eq!((identity(&still), identity(quiet)), before);
        assert_eq!(running.pid(), supervisor, "it is the same process");
        assert_ne!(running.server(), server, "it is another server");
        left -= 1;
        left > 0
    });
}

/// The number of rounds; `usually` is the default.
fn rounds(usually: u64) -> u64 {
    number("PODFS_SOAK_ROUNDS").unwrap_or(usually)
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().expect("a number"))
}

/// Numbers without a pattern (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}
