//! Whole files through a mount, beside the programs of libnfs.

use std::cell::Cell;
use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::time::Instant;

use crate::mounted::{Mounted, Shown};
use crate::nfs_rig::Ganesha;
use crate::raw::ROUNDS;
use crate::rig::{Figure, header, median, row, server};

/// Of the large file, in MiB.
const LARGE: u64 = 256;
/// Small files.
const SMALL: u64 = 100;

pub fn run() {
    let server = server();
    let export = server.libnfs();
    let here = tempfile::TempDir::with_prefix("podfs-test-").expect("a directory");
    let local = here.path().join("large");
    fs::write(&local, vec![7; (LARGE << 20) as usize]).expect("written");
    fs::copy(&local, server.exported().join("large")).expect("copied");
    for index in 0..SMALL {
        fs::write(server.exported().join(small(index)), vec![7; 4096]).expect("written");
    }
    header("whole files, one run", "nfs-cat, -cp");
    compare(
        "read 256 MiB, MiB/s",
        LARGE,
        &server,
        |shown| read(&shown.path().join("large")),
        || drop(export.cat("large")),
    );
    let exported = server.exported();
    let count = Cell::new(0);
    // The server believes for a while that what is removed behind its back is there, and keeps it open.
    let with_new = |write: &dyn Fn(&str)| {
        let name = format!("new-{}", count.replace(count.get() + 1));
        write(&name);
        File::options().write(true).truncate(true).open(exported.join(&name)).expect("opened");
        fs::remove_file(exported.join(&name)).expect("removed");
    };
    let written =
        |shown: &Shown| with_new(&|name| fs::copy(&local, shown.path().join(name)).map(drop).expect("copied"));
    let put = || with_new(&|name| export.put(&local, name));
    compare("write 256 MiB, MiB/s", LARGE, &server, written, put);
    let all = |shown: &Shown| (0..SMALL).for_each(|index| read(&shown.path().join(small(index))));
    let theirs = || (0..SMALL).for_each(|index| drop(export.cat(&small(index))));
    compare("read small files", SMALL, &server, all, theirs);
}

fn compare(what: &str, count: u64, server: &Ganesha, ours: impl Fn(&Shown), theirs: impl Fn()) {
    let (mut here, mut there) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let shown = Mounted::new(server).shown();
        shown.mounted.read_ahead();
        here.push(timed(count, || ours(&shown)));
        there.push(timed(count, &theirs));
    }
    row(what, median(here), median(there));
}

/// The CPU time of other processes is not known, so nobody's is told.
fn timed(count: u64, work: impl FnOnce()) -> Figure {
    let began = Instant::now();
    work();
    Figure { rate: count as f64 / began.elapsed().as_secs_f64(), cost: f64::NAN }
}

fn read(path: &Path) {
    io::copy(&mut File::open(path).expect("opened"), &mut io::sink()).expect("read");
}

fn small(index: u64) -> String {
    format!("small-{index}")
}
