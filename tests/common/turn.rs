//! Tests that keep CPUs busy for a long time take turns, so that the waits of all other tests stay short. The turns count for all test
//! programs that run on this computer from one target directory.

use std::fs::File;
use std::path::Path;
use std::thread;
use std::time::Duration;

use nix::fcntl::{Flock, FlockArg};

/// The turn of a test, which ends when it is dropped.
#[derive(Debug)]
pub struct Turn(#[expect(dead_code, reason = "its drop unlocks the file")] Flock<File>);

impl Turn {
    /// Waits until no other emulated guest runs.
    pub fn of_guest() -> Turn {
        Self::of("guest", 1)
    }

    /// Waits until at most one other machine in namespaces runs. Such a machine mostly waits.
    pub fn of_machine() -> Turn {
        Self::of("machine", 2)
    }

    /// Waits until no other soak runs. A test that also has a machine waits for the machine first.
    pub fn of_soak() -> Turn {
        Self::of("soak", 1)
    }

    /// Waits for one of so many turns at the same time.
    fn of(kind: &str, turns: usize) -> Turn {
        loop {
            for turn in 0..turns {
                let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("turn-of-{kind}-{turn}"));
                let file = File::options().write(true).create(true).truncate(false).open(path).expect("a lock file");
                if let Ok(lock) = Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                    return Turn(lock);
                }
            }
            thread::sleep(Duration::from_millis(50));
        }
    }
}
