//! Servers, keepers and supervisors are killed and upgraded at any time under mixed load: callers read, write, lock, list,
//! move and watch in projections and on both data paths of passthrough volumes, and objects change. No call may fail, no
//! read be torn, no effect be lost or doubled.
//!
//! `PODFS_SOAK_KILLS` says how many kills the mixed one makes, and `PODFS_SOAK_ROUNDS` how often the others repeat theirs;
//! `PODFS_SOAK_SEED` repeats the choices of an earlier run.

#[path = "../common/mod.rs"]
mod common;

mod callers;
mod load;
mod over_the_dead;

use std::thread;
use std::time::{Duration, SystemTime};

use common::identity::identity;
use common::*;
use load::Pod;
use nix::sys::signal::{Signal, kill};

#[test]
fn whatever_is_killed_whenever_no_caller_notices() {
    let kills = number("PODFS_SOAK_KILLS").unwrap_or(120);
    let clock = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("a clock").as_nanos() as u64;
    let mut random = Random(number("PODFS_SOAK_SEED").unwrap_or(clock | 1));
    println!("PODFS_SOAK_SEED={}", random.0);
    let mut done = [0; 4];
    Pod::new().under_load(|pod, running| {
        done[strike(&mut random, pod, running)] += 1;
        // Sometimes the successor is struck while it gets ready, mostly in the middle of ordinary work.
        if random.below(5) > 0 {
            let _answered = rustix::fs::statvfs(running.volume("config"));
        }
        thread::sleep(Duration::from_millis(random.below(20)));
        let [servers, keepers, supervisors, _upgrades] = done;
        servers + keepers + supervisors < kills
    });
    let [servers, keepers, supervisors, upgrades] = done;
    println!("{servers} servers, {keepers} keepers and {supervisors} supervisors killed, {upgrades} upgrades");
}

/// Kills something; tells whether it was a server (0), a keeper (1) or a supervisor (2), or all were upgraded (3).
fn strike(random: &mut Random, pod: &mut Pod, running: &mut Running) -> usize {
    match random.below(20) {
        0 => {
            settled(running);
            let told = "the keeper of the server's open files ended; there is another one";
            let before = running.log().matches(told).count();
            running.keepers().into_iter().for_each(|keeper| kill(keeper, Signal::SIGKILL).expect("it is there"));
            running.wait_log_times(told, before + 1);
            1
        }
        1 => {
            settled(running);
            pod.fixture.kill_supervisor(running);
            *running = pod.builds.run(&pod.fixture);
            2
        }
        2 => {
            settled(running);
            pod.builds.upgrade(&pod.fixture);
            3
        }
        _ => {
            let _ = kill(running.server(), Signal::SIGKILL);
            0
        }
    }
}

/// Waits until a server serves: who kills two of server, keeper and supervisor at once takes the open files with them.
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

/// How often something is repeated, if nobody says.
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
