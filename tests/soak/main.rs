//! Many kills under mixed load: callers read, write, lock, list, move and watch in a projection and on both data paths of
//! passthrough volumes, objects change, and meanwhile servers, keepers and supervisors are killed at any time. No call may
//! fail, no read be torn, no effect be lost or doubled.
//!
//! `PODFS_SOAK_KILLS` says how many kills; `PODFS_SOAK_SEED` repeats the choices of an earlier run.

#[path = "../common/mod.rs"]
mod common;

mod callers;

use std::fs;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, SystemTime};

use callers::{CALLERS, Place};
use common::passthrough::disk_directory;
use common::watch::Watcher;
use common::*;
use nix::sys::signal::{Signal, kill};

/// Keys of the ConfigMap; all have the number of the commit as content.
const KEYS: usize = 20;

/// What the callers and the one who kills tell each other.
struct Soak {
    over: AtomicBool,
    calls: AtomicU64,
    failures: Mutex<Vec<String>>,
}

impl Soak {
    fn fail(&self, failure: String) {
        self.failures.lock().expect("no panic").push(failure);
        self.over.store(true, Ordering::Relaxed);
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Repeats a caller's round until it is over.
    fn repeat(&self, who: &str, mut round: impl FnMut(u64) -> Result<(), String>) -> u64 {
        let mut rounds = 0;
        while !self.is_over() {
            if let Err(failure) = round(rounds) {
                self.fail(format!("{who}, round {rounds}: {failure}"));
                break;
            }
            rounds += 1;
            self.calls.fetch_add(1, Ordering::Relaxed);
        }
        rounds
    }
}

/// Ends the soak, also when the one who kills gives up.
struct End<'a>(&'a Soak);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.over.store(true, Ordering::Relaxed);
    }
}

#[test]
#[ignore = "a soak: cargo test --test soak -- --ignored --nocapture"]
fn whatever_is_killed_whenever_no_caller_notices() {
    let kills = number("PODFS_SOAK_KILLS").unwrap_or(60);
    let clock = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("a clock").as_nanos() as u64;
    let mut random = Random(number("PODFS_SOAK_SEED").unwrap_or(clock | 1));
    println!("PODFS_SOAK_SEED={}", random.0);

    let source = disk_directory();
    let host = format!("{{name: host, hostPath: {{path: {}, type: Directory}}}}", source.path().display());
    let limited = "{name: limited, emptyDir: {sizeLimit: 1Gi}}";
    let fixture = Fixture::new(&pod(&format!("[{{name: config, configMap: {{name: app}}}}, {host}, {limited}]")));
    change_objects(&fixture, 0);
    let mut running = fixture.run();
    let config = running.volume("config");
    let places = ["host", "limited"].map(|name| Place::new(name, &running.volume(name)));
    let soak = Soak { over: AtomicBool::new(false), calls: AtomicU64::new(0), failures: Mutex::default() };
    let watcher = Watcher::on("root", &config);

    let mut done = [0; 3];
    thread::scope(|scope| {
        let changes = scope.spawn(|| soak.repeat("changes", |round| change(&fixture, &config, round + 1)));
        scope.spawn(|| soak.repeat("reads of a projection", |_| read_projection(&config)));
        let mut callers = Vec::new();
        for place in &places {
            for (who, caller) in CALLERS {
                let (who, soak) = (format!("{who} in {}", place.name), &soak);
                callers.push(scope.spawn(move || caller(place, &mut |round| soak.repeat(&who, round))));
            }
        }
        let end = End(&soak);
        for _ in 0..kills {
            if soak.is_over() {
                break;
            }
            done[strike(&mut random, &fixture, &mut running)] += 1;
            // Sometimes the successor is struck while it gets ready, mostly in the middle of ordinary work.
            if random.below(5) > 0 {
                let _answered = rustix::fs::statvfs(&config);
            }
            thread::sleep(Duration::from_millis(random.below(20)));
        }
        drop(end);
        running.freed(|| {
            for caller in callers {
                if let Err(failure) = caller.join().expect("no panic") {
                    soak.fail(failure);
                }
            }
            let changes = changes.join().expect("no panic");
            let switches = watcher.switches() as u64;
            // The last change may have failed, or been given up.
            if soak.failures.lock().expect("no panic").is_empty() && switches != changes {
                soak.fail(format!("{changes} changes were {switches} switches to who watches"));
            }
        });
    });
    let [servers, keepers, supervisors] = done;
    let calls = soak.calls.load(Ordering::Relaxed);
    println!(
        "{servers} servers, {keepers} keepers and {supervisors} supervisors killed during {calls} rounds of calls"
    );
    let failures = soak.failures.into_inner().expect("no panic");
    let log = running.log();
    let tail: Vec<_> = log.lines().rev().take(30).collect();
    assert!(failures.is_empty(), "{failures:#?}\n{}", tail.into_iter().rev().collect::<Vec<_>>().join("\n"));
    assert!(!log.contains("lacks") && !log.contains("cannot commit"), "{log}");
    assert!(running.stop().success());
    fixture.assert_nothing_left();
}

/// Kills something; tells whether it was a server (0), a keeper (1) or a supervisor (2).
fn strike(random: &mut Random, fixture: &Fixture, running: &mut Running) -> usize {
    match 1 + random.below(19) {
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
            running.signal(Signal::SIGKILL);
            running.wait();
            *running = fixture.run();
            2
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

fn change_objects(fixture: &Fixture, number: u64) {
    let (keys, number) = ((0..KEYS).map(|key| format!("key-{key}")).collect::<Vec<_>>(), number.to_string());
    let data: Vec<_> = keys.iter().map(|key| (key.as_str(), number.as_str())).collect();
    fixture.write("objects/app.json", &config_map("app", &data));
}

/// Changes the objects, and waits until that is seen.
fn change(fixture: &Fixture, config: &Path, number: u64) -> Result<(), String> {
    change_objects(fixture, number);
    let deadline = std::time::Instant::now() + PATIENCE;
    while fs::read_to_string(config.join("key-0")).ok() != Some(number.to_string()) {
        if std::time::Instant::now() > deadline {
            return Err(format!("change {number} is not seen"));
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// All files of a generation have the same content, and `..data` always leads to one.
fn read_projection(config: &Path) -> Result<(), String> {
    let data = || fs::read_link(config.join("..data")).map_err(|error| format!("..data: {error}"));
    let generation = data()?;
    let mut contents = Vec::new();
    for key in 0..KEYS {
        match fs::read_to_string(config.join(&generation).join(format!("key-{key}"))) {
            Ok(content) => contents.push(content),
            // An old generation goes at any time.
            Err(_) if data()? != generation => return Ok(()),
            Err(error) => return Err(format!("{}/key-{key}: {error}", generation.display())),
        }
    }
    contents.dedup();
    // Content that is known is read without a request; this is one.
    rustix::fs::statvfs(config).map_err(|error| format!("the status of the file system: {error}"))?;
    if contents.len() == 1 { Ok(()) } else { Err(format!("a mix: {contents:?}")) }
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
