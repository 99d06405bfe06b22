//! How often readers that open a file through `..data` again and again meet `ENOENT`: with old generations that stay for a
//! second, with those that go at once, and with the `AtomicWriter`'s calls on tmpfs.

use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use super::atomic_writer;
use super::rig::{DIRECTORIES, Mounted, Tmpfs, layout, payload};

const SWITCHES: usize = 10_000;
const READERS: usize = 4;

pub fn run() {
    println!("\n{:<44} {:>12} {:>12} {:>12}", "ENOENT of 4 readers", "switches", "ENOENT", "per switch");
    for (what, keep) in [("podfs, old generations kept for 1 s", 1), ("podfs, removed at once", 0)] {
        let directory = tempfile::tempdir().expect("a directory");
        let mut mounted = Mounted::at(directory.path(), &payload(1, 1024, 0));
        mounted.projection.keep_old_for(Duration::from_secs(keep));
        let missing = misses(directory.path(), |round| {
            mounted.projection.commit(&layout(&payload(1, 1024, round)), DIRECTORIES).expect("a commit");
        });
        row(what, missing);
    }
    let tmpfs = Tmpfs::new();
    atomic_writer::write(tmpfs.path(), &payload(1, 1024, 0), 0);
    let missing = misses(tmpfs.path(), |round| {
        atomic_writer::write(tmpfs.path(), &payload(1, 1024, round), round);
    });
    row("AtomicWriter's calls on tmpfs", missing);
}

fn misses(volume: &Path, mut switch: impl FnMut(usize)) -> u64 {
    let (missing, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
    let file = volume.join("..data/key-0000");
    thread::scope(|scope| {
        for _ in 0..READERS {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    match File::open(&file) {
                        Ok(_) => {}
                        Err(error) if error.kind() == ErrorKind::NotFound => {
                            missing.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(error) => panic!("cannot open {}: {error}", file.display()),
                    }
                }
            });
        }
        for round in 1..=SWITCHES {
            // Without a pause, the bench would measure the limit on the number of old generations.
            thread::sleep(Duration::from_millis(1));
            switch(round);
        }
        is_over.store(true, Ordering::Relaxed);
    });
    missing.load(Ordering::Relaxed)
}

fn row(what: &str, missing: u64) {
    println!("{what:<44} {SWITCHES:>12} {missing:>12} {:>11.3}%", missing as f64 * 100.0 / SWITCHES as f64);
}
