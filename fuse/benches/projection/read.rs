//! A warm volume of ten keys of 1 KiB, beside tmpfs with the same layout.

use std::fs::{self, File};
use std::hint::black_box;
use std::io::Read;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::atomic_writer;
use super::rig::{Mounted, Tmpfs, header, median, payload, per_call, row};

const WARM_UP: usize = 3;
const ROUNDS: usize = 101;
const BATCH: u32 = 1_000;
const PYTHON_ROUNDS: usize = 11;

pub fn run() {
    let keys = payload(10, 1024, 0);
    let tmpfs = Tmpfs::new();
    atomic_writer::write(tmpfs.path(), &keys, 0);
    let directory = tempfile::tempdir().expect("a directory");
    let mounted = Mounted::at(directory.path(), &keys);

    header("warm volume, 10 keys of 1 KiB", "tmpfs");
    compare("open + read + close through the link", directory.path(), tmpfs.path(), open_read_close);
    compare("stat through the link", directory.path(), tmpfs.path(), stat);
    compare("lstat of the link", directory.path(), tmpfs.path(), lstat);
    compare("readlink ..data", directory.path(), tmpfs.path(), read_link);
    compare("stat of an absent name", directory.path(), tmpfs.path(), stat_absent);
    compare("list the root", directory.path(), tmpfs.path(), list);
    compare_opens_of_python(directory.path(), tmpfs.path());

    let before = mounted.projection.requests().expect("the server answers");
    open_read_close(directory.path());
    stat(directory.path());
    list(directory.path());
    let after = mounted.projection.requests().expect("the server answers");
    println!("requests sent by one more warm round: {}", after - before);
}

/// Measures both in turn, so that other work of the machine affects both alike.
fn compare(what: &str, ours: &Path, peer: &Path, call: fn(&Path)) {
    let (mut our_rounds, mut peer_rounds) = (Vec::new(), Vec::new());
    for round in 0..WARM_UP + ROUNDS {
        let (our, peer) = (per_call(BATCH, || call(ours)), per_call(BATCH, || call(peer)));
        if round >= WARM_UP {
            our_rounds.push(our);
            peer_rounds.push(peer);
        }
    }
    row(what, median(our_rounds), median(peer_rounds));
}

/// Python before 3.14 calls isatty(3) for each file that it opens, which is a message to the server each time.
fn compare_opens_of_python(ours: &Path, peer: &Path) {
    let (mut our_rounds, mut peer_rounds) = (Vec::new(), Vec::new());
    for _ in 0..PYTHON_ROUNDS {
        our_rounds.push(open_and_read_in_python(ours));
        peer_rounds.push(open_and_read_in_python(peer));
    }
    row("open().read() of Python through the link", median(our_rounds), median(peer_rounds));
}

/// The time of one call: the mean of 1000, after a first one.
fn open_and_read_in_python(volume: &Path) -> Duration {
    const PROGRAM: &str = "import sys, time\n\
                           def read():\n    \
                           with open(sys.argv[1]) as file: file.read()\n\
                           read()\n\
                           began = time.perf_counter_ns()\n\
                           for _ in range(1000): read()\n\
                           print((time.perf_counter_ns() - began) // 1000)";
    let output = Command::new("python3").args(["-I", "-S", "-c", PROGRAM]).arg(volume.join("key-0003")).output();
    let output = String::from_utf8(output.expect("python3 is installed").stdout).expect("a number");
    Duration::from_nanos(output.trim().parse().expect("nanoseconds"))
}

fn open_read_close(volume: &Path) {
    let mut buffer = [0; 2048];
    let mut file = File::open(volume.join("key-0003")).expect("a key");
    assert_eq!(file.read(black_box(&mut buffer)).expect("read"), 1024);
}

fn stat(volume: &Path) {
    black_box(fs::metadata(volume.join("key-0003")).expect("a key"));
}

fn lstat(volume: &Path) {
    black_box(fs::symlink_metadata(volume.join("key-0003")).expect("a link"));
}

fn read_link(volume: &Path) {
    black_box(fs::read_link(volume.join("..data")).expect("a link"));
}

fn stat_absent(volume: &Path) {
    assert!(black_box(fs::metadata(volume.join("absent"))).is_err());
}

fn list(volume: &Path) {
    black_box(fs::read_dir(volume).expect("a directory").count());
}
