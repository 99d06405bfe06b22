//! Whole files: programs that use a mount, beside those of libnfs, which need none.

use std::cell::Cell;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::mounted::{Mounted, Shown};
use crate::nfs_rig::libnfs::Libnfs;
use crate::nfs_rig::{Ganesha, Proxy};
use crate::raw::ROUNDS;
use crate::rig::{Figure, header, median, row, server};

/// The size of the large file, in MiB.
const LARGE: u64 = 256;
/// The number of small files.
const SMALL: u64 = 100;

pub fn run() {
    let server = server();
    let libnfs = server.libnfs();
    table("whole files, one run", &server, (server.address(), server.mount_address()), &libnfs);
}

/// The same over a network that takes a millisecond each way.
pub fn delayed() {
    let server = server();
    let proxy = Proxy::start(server.address());
    proxy.delay(Duration::from_millis(1));
    let libnfs = Libnfs { nfs: proxy.address(), ..server.libnfs() };
    table("whole files, 1 ms each way", &server, (proxy.address(), server.mount_address()), &libnfs);
}

fn table(title: &str, server: &Ganesha, addresses: (SocketAddr, SocketAddr), libnfs: &Libnfs) {
    let directory = tempfile::TempDir::with_prefix("podfs-test-").expect("a directory");
    let local = directory.path().join("large");
    fs::write(&local, vec![7; (LARGE << 20) as usize]).expect("written");
    fs::copy(&local, server.exported().join("large")).expect("copied");
    for index in 0..SMALL {
        fs::write(server.exported().join(small(index)), vec![7; 4096]).expect("written");
    }
    header(title, "nfs-cat, -cp");

    let url = |name: &str| libnfs.url(name);
    let cat = |shown: &Shown| program("cat", [shown.path().join("large")]);
    let nfs_cat = || program("nfs-cat", [url("large")]);
    compare("cat 256 MiB, MiB/s", LARGE, addresses, cat, nfs_cat);

    let exported = server.exported();
    let count = Cell::new(0);
    // The server caches files for a while: it keeps removed ones open.
    let with_new = |write: &dyn Fn(&str)| {
        let name = format!("new-{}", count.replace(count.get() + 1));
        write(&name);
        assert_eq!(fs::metadata(exported.join(&name)).expect("written").len(), LARGE << 20);
        File::options().write(true).truncate(true).open(exported.join(&name)).expect("opened");
        fs::remove_file(exported.join(&name)).expect("removed");
    };
    let cp = |shown: &Shown| with_new(&|name| program("cp", [&local, &shown.path().join(name)]));
    let nfs_cp = || with_new(&|name| program("nfs-cp", [local.as_os_str(), url(name).as_ref()]));
    compare("cp 256 MiB there, MiB/s", LARGE, addresses, cp, nfs_cp);
    // By sendfile(2), which writes at most the size of a pipe.
    let copy = |shown: &Shown| {
        with_new(&|name| assert_eq!(fs::copy(&local, shown.path().join(name)).expect("copied"), LARGE << 20))
    };
    compare("send 256 MiB there, MiB/s", LARGE, addresses, copy, nfs_cp);

    let all = |shown: &Shown| (0..SMALL).for_each(|index| program("cat", [shown.path().join(small(index))]));
    let theirs = || (0..SMALL).for_each(|index| program("nfs-cat", [url(&small(index))]));
    compare("cat a small file", SMALL, addresses, all, theirs);
}

/// Runs a program and drops its output.
fn program<A: AsRef<OsStr>>(name: &str, arguments: impl IntoIterator<Item = A>) {
    let status = Command::new(name).args(arguments).stdout(Stdio::null()).status();
    assert!(status.unwrap_or_else(|error| panic!("{name}: {error}")).success(), "{name}");
}

fn compare(what: &str, count: u64, addresses: (SocketAddr, SocketAddr), ours: impl Fn(&Shown), theirs: impl Fn()) {
    let (mut our_figures, mut their_figures) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let shown = Mounted::new(&addresses).shown();
        shown.mounted.read_ahead();
        our_figures.push(timed(count, || ours(&shown)));
        their_figures.push(timed(count, &theirs));
    }
    row(what, median(our_figures), median(their_figures));
}

/// The CPU time of other processes is not known, so the cost is left out.
fn timed(count: u64, work: impl FnOnce()) -> Figure {
    let began = Instant::now();
    work();
    Figure { rate: count as f64 / began.elapsed().as_secs_f64(), cost: f64::NAN }
}

fn small(index: u64) -> String {
    format!("small-{index}")
}
