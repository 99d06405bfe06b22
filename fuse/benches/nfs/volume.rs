//! Programs that use a mount, beside the client in a loop. The CPU time of the mount is that of the program and of the
//! thread that serves it.

use std::fs::{self, File};
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use rustix::fs::{Advice, fadvise};

use crate::mounted::{Mounted, Shown};
use crate::nfs_rig::Proxy;
use crate::raw::{ENTRIES, FILE_SIZE, MEBIBYTE, ROUNDS, Scene, Work, listed, made, scattered_offset};
use crate::rig::{self, Figure, header, measure_threads, median, row};

/// What is compared: the title, the calls of a program, the calls of the client alone, how many calls, and how many at a time.
const WORKS: [(&str, Work, Work, u64, u64); 9] = [
    ("read 1 MiB, MiB/s", Work::Read, Work::Read, FILE_SIZE, 1),
    ("write 1 MiB and close, MiB/s", Work::Write, Work::Write, FILE_SIZE, 1),
    ("read 4 KiB anywhere, 1 at a time", Work::ReadSome, Work::ReadSome, 10_000, 1),
    ("read 4 KiB anywhere, 16 at a time", Work::ReadSome, Work::ReadSome, 10_000, 16),
    ("stat of 10 000 new names; LOOKUP", Work::Lookup, Work::Lookup, ENTRIES as u64, 1),
    ("stat of 10 000 new names; GETATTR", Work::Lookup, Work::Getattr, ENTRIES as u64, 1),
    ("create 10 000; LOOKUP and CREATE", Work::Create, Work::LookupAndCreate, 10_000, 1),
    ("create 10 000; CREATE", Work::Create, Work::Create, 10_000, 1),
    ("list 10 000, directories", Work::List, Work::List, 5, 1),
];

pub fn run() {
    rig::run(async {
        let scene = Scene::new().await;
        let server = &scene.server;
        compare("through a mount, one run", &scene, (server.address(), server.mount_address()), 1).await;
    });
}

/// The same over a network that takes a millisecond each way.
pub fn delayed() {
    rig::run(async {
        let server = rig::server();
        let proxy = Proxy::start(server.address());
        let addresses = (proxy.address(), server.mount_address());
        let scene = Scene::at(server, Some(proxy.address())).await;
        proxy.delay(Duration::from_millis(1));
        compare("1 ms each way, one run", &scene, addresses, 10).await;
    });
}

/// Prints a table. Each count of calls is divided by `part`.
async fn compare(title: &str, scene: &Scene, addresses: (SocketAddr, SocketAddr), part: u64) {
    header(title, "client alone");
    for (what, work, beside, count, depth) in WORKS {
        let exported = scene.server.exported();
        let count = (count / part).max(1);
        let (mut ours, mut alone) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            // The mount makes a runtime of its own, so another thread does this.
            let through = || through_a_mount(addresses, &exported, work, count, depth);
            let mounted = thread::scope(|scope| scope.spawn(through).join());
            ours.push(mounted.expect("no panic"));
            alone.push(scene.ours(beside, count, depth, scene.new_directory().await).await);
        }
        row(what, median(ours), median(alone));
    }
}

/// Measures in a new mount, whose caches are empty.
fn through_a_mount(addresses: (SocketAddr, SocketAddr), exported: &Path, work: Work, count: u64, depth: u64) -> Figure {
    let shown = Mounted::new(&addresses).shown();
    shown.mounted.read_ahead();
    let at = |name: &str| shown.path().join(name);
    match work {
        Work::Read => {
            let file = File::open(at("file")).expect("opened");
            let mut buffer = vec![0; MEBIBYTE as usize];
            measure_threads(count, || {
                for index in 0..count {
                    file.read_exact_at(&mut buffer, index << 20).expect("read");
                }
            })
        }
        Work::Write => {
            let data = vec![7; MEBIBYTE as usize];
            measure_threads(count, || {
                let file = File::options().write(true).open(at("file")).expect("opened");
                for index in 0..count {
                    file.write_all_at(&data, index << 20).expect("written");
                }
            })
        }
        Work::ReadSome => measure_threads(count, || read_some(&shown, count, depth)),
        Work::Lookup | Work::Getattr => measure_threads(count, || {
            for index in 0..count {
                fs::metadata(at("listed").join(listed(index))).expect("there");
            }
        }),
        Work::Create | Work::LookupAndCreate => {
            // The server caches files for a while, also removed ones.
            static COUNT: AtomicU32 = AtomicU32::new(0);
            let name = format!("made-{}", COUNT.fetch_add(1, Ordering::Relaxed));
            fs::create_dir(at(&name)).expect("made");
            let figure = measure_threads(count, || {
                for index in 0..count {
                    File::create(at(&name).join(made(index))).expect("created");
                }
            });
            fs::remove_dir_all(exported.join(&name)).expect("removed");
            figure
        }
        Work::List => measure_threads(count, || {
            for _ in 0..count {
                assert_eq!(list(&at("listed")), ENTRIES);
            }
        }),
    }
}

fn list(directory: &Path) -> usize {
    fs::read_dir(directory).expect("listed").filter(|one| one.is_ok()).count()
}

fn read_some(shown: &Shown, count: u64, depth: u64) {
    thread::scope(|scope| {
        for first in 0..depth {
            scope.spawn(move || {
                let file = File::open(shown.path().join("file")).expect("opened");
                fadvise(&file, 0, None, Advice::Random).expect("advised");
                let mut buffer = [0; 4096];
                for index in (first..count).step_by(depth as usize) {
                    file.read_exact_at(&mut buffer, scattered_offset(index)).expect("read");
                }
            });
        }
    });
}
