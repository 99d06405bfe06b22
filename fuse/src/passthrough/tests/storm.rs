//! Servers that are killed while callers change everything: no call fails, and each is executed once.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use super::*;

/// Servers that are killed in one storm.
const KILLS: usize = 25;
/// Callers at the same time.
const CALLERS: usize = 4;

/// Lets callers work, round after round, while servers are killed. `work` gets the caller and the round. Returns how many rounds
/// each caller has done.
fn storm(rig: &Rig, work: impl Fn(usize, u64) -> io::Result<()> + Sync) -> Vec<u64> {
    let over = AtomicBool::new(false);
    let rounds = |caller: usize| {
        let mut round = 0;
        while !over.load(Ordering::Relaxed) {
            work(caller, round).unwrap_or_else(|error| panic!("caller {caller}, round {round}: {error}"));
            round += 1;
        }
        round
    };
    thread::scope(|scope| {
        let callers: Vec<_> = (0..CALLERS).map(|caller| scope.spawn(move || rounds(caller))).collect();
        for _ in 0..KILLS {
            let before = rig.region.requests();
            while rig.region.requests() < before + 200 && !callers.iter().any(thread::ScopedJoinHandle::is_finished) {
                thread::yield_now();
            }
            rig.kill_and_succeed();
        }
        over.store(true, Ordering::Relaxed);
        callers.into_iter().map(|caller| caller.join().expect("no call fails")).collect()
    })
}

#[test]
fn names_come_and_go() {
    for rig in [Rig::unlimited(), Rig::limited(1 << 30)] {
        (0..CALLERS).for_each(|caller| fs::create_dir(rig.at(&format!("{caller}"))).expect("a directory"));
        storm(&rig, |caller, round| {
            let at = |name: &str| rig.at(&format!("{caller}/{name}-{round}"));
            fs::create_dir(at("directory"))?;
            File::create_new(at("file"))?.write_all(b"text")?;
            fs::hard_link(at("file"), at("link"))?;
            fs::rename(at("link"), at("renamed"))?;
            std::os::unix::fs::symlink("target", at("symlink"))?;
            assert_eq!(fs::read(at("renamed"))?, b"text");
            fs::rename(at("renamed"), at("directory").join("inside"))?;
            ["file", "symlink"].into_iter().try_for_each(|name| fs::remove_file(at(name)))?;
            fs::remove_file(at("directory").join("inside"))?;
            fs::remove_dir(at("directory"))
        });
        for caller in 0..CALLERS {
            let count = fs::read_dir(rig.source.join(caller.to_string())).expect("a directory").count();
            assert_eq!(count, 0, "all that was made was removed");
        }
    }
}

#[test]
fn appends_take_effect_once_and_in_order() {
    for rig in [Rig::unlimited(), Rig::limited(1 << 30)] {
        let open = |caller| OpenOptions::new().append(true).create(true).open(rig.at(&format!("log-{caller}")));
        let logs: Vec<_> = (0..CALLERS).map(|caller| open(caller).expect("a file")).collect();
        let rounds = storm(&rig, |caller, round| {
            // The kernel alone executes the write if it can; this call makes sure that each round sends a request.
            fs::metadata(rig.at("absent")).expect_err("there is no such file");
            (&logs[caller]).write_all(format!("line {round}\n").as_bytes())
        });
        for (caller, rounds) in rounds.into_iter().enumerate() {
            let text = fs::read_to_string(rig.source.join(format!("log-{caller}"))).expect("a file");
            assert!(text.lines().eq((0..rounds).map(|round| format!("line {round}"))), "caller {caller}");
        }
    }
}

#[test]
fn a_read_is_never_torn() {
    for rig in [Rig::unlimited(), Rig::limited(1 << 30)] {
        fs::write(rig.source.join("file"), vec![7; 1 << 20]).expect("written");
        let kept = File::open(rig.at("file")).expect("a file");
        storm(&rig, |_, _| {
            let mut bytes = vec![0; 1 << 20];
            File::open(rig.at("file"))?.read_exact_at(&mut bytes, 0)?;
            assert!(bytes.iter().all(|byte| *byte == 7));
            kept.read_exact_at(&mut bytes[..4096], 4096)?;
            assert_eq!(fs::read_dir(rig.at(""))?.count(), 1);
            Ok(())
        });
    }
}

#[test]
fn locks_exclude_each_other() {
    use nix::fcntl::{Flock, FlockArg};
    let rig = Rig::unlimited();
    fs::write(rig.source.join("file"), "0").expect("written");
    let rounds = storm(&rig, |_, _| {
        let file = OpenOptions::new().read(true).write(true).open(rig.at("file"))?;
        let locked = Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, errno)| errno)?;
        let before: u64 = fs::read_to_string(rig.source.join("file"))?.parse().map_err(io::Error::other)?;
        fs::write(rig.source.join("file"), (before + 1).to_string())?;
        drop(locked);
        Ok(())
    });
    let counted = fs::read_to_string(rig.source.join("file")).expect("a file");
    assert_eq!(counted, rounds.iter().sum::<u64>().to_string());
}
