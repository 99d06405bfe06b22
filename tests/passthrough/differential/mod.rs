//! A differential tester: random programs of system calls run in lockstep in a directory and in volumes of an equal directory, while other
//! actors (the host, another pod, kills, dropped caches) change things beside them. All answers and all files must be equal, except for the
//! differences that the documentation describes.
//!
//! An ordinary run has the same programs each time, and fails for a difference that a second run of the program shows, too. For others, set
//! `PODFS_DIFFERENTIAL_SECONDS`: how long each file system is tested, with other programs each time, a transport chosen at random for each
//! program, and no difference excused.
//! `PODFS_DIFFERENTIAL_SEED` sets the first program. A failure prints both the seed and a Python script. Add a program that has found an error to `programs/`, in the directory of its file system, so that it runs in each test run.

mod actors;
mod documented;
mod generator;
mod lockstep;
mod observed;
mod pods;
mod program;
mod script;
mod shrink;
mod sources;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;
use lockstep::{Caching, Lockstep, Setup, Verdict};
use pods::TestPod;
use program::Program;
use sources::{SourceDisk, SourceKind};

use crate::common::io_uring;
use crate::common::load::number;
use crate::common::turn::Turn;

/// How long each file system is tested, unless the environment says otherwise.
const SECONDS: u64 = 10;
/// The seed of ordinary runs.
const SEED: u64 = 47;
/// How long the tester tries to make a failing program shorter.
const SHRINKING: Duration = Duration::from_secs(150);

#[test]
fn volumes_do_as_ext4_does() {
    compare(SourceKind::Ext4);
}

#[test]
fn volumes_do_as_xfs_does() {
    compare(SourceKind::Xfs);
}

#[test]
fn volumes_do_as_btrfs_does() {
    compare(SourceKind::Btrfs);
}

#[test]
fn volumes_do_as_tmpfs_does() {
    compare(SourceKind::Tmpfs);
}

#[test]
fn volumes_do_as_overlayfs_does() {
    compare(SourceKind::Overlay);
}

#[test]
#[ignore = "bindfs answers differently when it is asked through another FUSE file system: setgid after writes, and others to be judged"]
fn volumes_do_as_bindfs_does() {
    compare(SourceKind::Bindfs);
}

#[test]
fn programs_that_have_found_an_error_on_ext4_find_none() {
    repeat_programs(SourceKind::Ext4);
}

#[test]
fn programs_that_have_found_an_error_on_btrfs_find_none() {
    repeat_programs(SourceKind::Btrfs);
}

/// Runs the programs of the directory that has the name of the file system.
fn repeat_programs(kind: SourceKind) {
    let _turn = Turn::of_soak();
    let disk = SourceDisk::new(kind);
    let pods = start_pods(&disk);
    let setups = setups(&disk, &pods);
    let all = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/passthrough/differential/programs");
    let directory = all.join(format!("{kind:?}").to_lowercase());
    let paths = fs::read_dir(directory).expect("programs").map(|entry| entry.expect("an entry").path());
    let programs: Vec<_> =
        paths.map(|path| (Program::of(&fs::read_to_string(&path).expect("a program")), path)).collect();
    thread::scope(|scope| {
        for (number, setup) in setups.iter().enumerate() {
            let programs = &programs;
            scope.spawn(move || {
                let mut lane = Lockstep::new(vec![setup], format!("lane{number}"));
                for (program, path) in programs {
                    let verdict = lane.run(program);
                    assert_eq!(verdict, Ok(Verdict::Equal), "{}, {}", path.display(), setup.name);
                }
            });
        }
    });
    pods.into_iter().for_each(TestPod::stop);
}

/// A pod for each transport that the kernel has.
fn start_pods(disk: &SourceDisk) -> Vec<TestPod> {
    let mut pods = vec![TestPod::start(disk, false)];
    if io_uring::is_offered() {
        pods.push(TestPod::start(disk, true));
    }
    pods
}

/// The setups of a source: volumes of pods that use different transports.
fn setups<'a>(disk: &SourceDisk, pods: &'a [TestPod]) -> Vec<Setup<'a>> {
    let mut setups = Vec::new();
    for (index, pod) in pods.iter().enumerate() {
        let other = &pods[pods.len() - 1 - index];
        let transport = if index == 0 { "device" } else { "io_uring" };
        let mut add = |volume: &str, caching, second: Option<PathBuf>, is_shared: bool| {
            setups.push(Setup {
                name: format!("{:?}, {volume}, {transport}", disk.kind),
                kind: disk.kind,
                caching,
                pod,
                volume: pod.volume(volume),
                second,
                host: is_shared.then(|| disk.shown()),
                native: disk.native(),
            });
        };
        // These mostly wait.
        for second in [pod, pod, pod, other, other, other] {
            add("auto", Caching::Auto, Some(second.volume("auto2")), true);
        }
        add("claimed", Caching::Auto, Some(other.volume("auto2")), true);
        add("none", Caching::None, Some(pod.volume("none2")), true);
        add("none", Caching::None, Some(other.volume("none2")), true);
        add("always", Caching::Alone, None, false);
        if disk.has_empty_dirs() {
            add("empty", Caching::Private, None, false);
            add("limited", Caching::Limited, None, false);
        }
    }
    setups
}

/// The setups that differ from this one only in the transport, and this one, which is the first.
fn of_transports<'a>(setups: &'a [Setup<'a>], pods: usize, index: usize) -> Vec<&'a Setup<'a>> {
    (0..pods).map(|pod| &setups[(index + pod * setups.len() / pods) % setups.len()]).collect()
}

/// What a lane has done.
#[derive(Default)]
struct Tally {
    programs: BTreeMap<String, usize>,
    documented: BTreeMap<&'static str, usize>,
    failures: Vec<String>,
    /// The kinds of differences so far. The tester shortens a program only for the first of a kind.
    kinds: BTreeSet<String>,
}

/// Whether a failure does not end the test, so that a long run finds more than one.
fn goes_on() -> bool {
    number("PODFS_DIFFERENTIAL_GO_ON").is_some()
}

fn compare(kind: SourceKind) {
    let long = number("PODFS_DIFFERENTIAL_SECONDS");
    let seconds = long.unwrap_or(SECONDS);
    let seed = number("PODFS_DIFFERENTIAL_SEED").unwrap_or_else(|| long.map_or(SEED, |_| fastrand::u64(..)));
    println!("PODFS_DIFFERENTIAL_SEED={seed}");
    let _turn = Turn::of_soak();
    let disk = SourceDisk::new(kind);
    let pods = start_pods(&disk);
    let setups = setups(&disk, &pods);
    let transports = pods.len();
    let (tally, is_failed) = (Mutex::new(Tally::default()), AtomicBool::new(false));
    let deadline = Instant::now() + Duration::from_secs(seconds);
    thread::scope(|scope| {
        for (index, setup) in setups.iter().enumerate() {
            let (tally, is_failed, setups) = (&tally, &is_failed, &setups);
            scope.spawn(move || {
                let mut random = Rng::with_seed(seed.wrapping_add(index as u64));
                let mut lane = Lockstep::new(of_transports(setups, transports, index), format!("lane{index}"));
                while Instant::now() < deadline && !is_failed.load(Ordering::Relaxed) {
                    if long.is_some() {
                        lane.choose(random.usize(..transports)).expect("a process chooses");
                    }
                    let mut program = generator::program(&mut random, &setup.actors(), kind == SourceKind::Btrfs);
                    if kind == SourceKind::Bindfs {
                        // libfuse has an inode for each path, so two names of a file are two files there.
                        program.0.retain(|step| !step.is_any(&["link", "linkfd"]));
                    }
                    let failure = check(&mut lane, &program, tally);
                    if let Some(failure) = failure {
                        println!("{failure}");
                        tally.lock().expect("no panic").failures.push(failure);
                        is_failed.store(!goes_on(), Ordering::Relaxed);
                    }
                }
            });
        }
    });
    let tally = tally.into_inner().expect("no panic");
    tally.programs.iter().for_each(|(setup, count)| println!("{count} programs: {setup}"));
    tally.documented.iter().for_each(|(row, count)| println!("{count} times: {row}"));
    assert!(tally.failures.is_empty(), "PODFS_DIFFERENTIAL_SEED={seed}\n{}", tally.failures.join("\n"));
    let has_run = |setup: &Setup| tally.programs.contains_key(&setup.name);
    assert!(setups.iter().all(has_run), "each setup runs programs: {:?}", tally.programs);
    pods.into_iter().for_each(TestPod::stop);
}

/// Runs a program. If it shows a difference that is not documented, returns a short program that does.
fn check(lane: &mut Lockstep, program: &Program, tally: &Mutex<Tally>) -> Option<String> {
    let name = lane.setup.name.clone();
    match lane.run(program) {
        Err(reason) => {
            let log = lane.setup.pod.log();
            lane.restart(goes_on());
            let tail: Vec<_> = log.lines().rev().take(20).collect();
            return Some(format!(
                "{name}: {reason}\n{program}{}",
                tail.into_iter().rev().collect::<Vec<_>>().join("\n")
            ));
        }
        Ok(Verdict::Equal) => {}
        Ok(Verdict::Documented(row)) => *tally.lock().expect("no panic").documented.entry(row).or_default() += 1,
        Ok(Verdict::Different(difference)) => {
            if !tally.lock().expect("no panic").kinds.insert(difference.kind()) {
                return None;
            }
            println!("{name}: {difference}\nshrinking…");
            let Some((short, difference)) = shrink::shrink(lane, program, SHRINKING) else {
                let once = format!("{name}: only once: {difference}\n{program}");
                println!("{once}");
                return number("PODFS_DIFFERENTIAL_SECONDS").map(|_| once);
            };
            let path = std::env::temp_dir().join(format!(
                "podfs-differential-{}-{}.py",
                std::process::id(),
                fastrand::u32(..)
            ));
            let written = fs::write(&path, script::script(&short)).map(|()| path.display().to_string());
            let place = written.unwrap_or_else(|error| error.to_string());
            return Some(format!("{name}: {difference}\n{short}{place}: {}", script::usage(&short)));
        }
    }
    *tally.lock().expect("no panic").programs.entry(name).or_default() += 1;
    None
}
