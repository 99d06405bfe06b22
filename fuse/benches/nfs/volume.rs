//! Programs that use a mount, beside the client in a loop. The CPU time of the mount is that of the program and of the
//! thread that serves it.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use rustix::fs::{Advice, fadvise};

use crate::mounted::{Mounted, Shown};
use crate::nfs_rig::Ganesha;
use crate::raw::{ENTRIES, FILE_SIZE, MEBIBYTE, ROUNDS, Scene, Work, somewhere};
use crate::rig::{self, Figure, header, measure_threads, median, row};

pub fn run() {
    rig::run(async {
        let scene = Scene::new().await;
        header("through a mount, one run", "client alone");
        let works = [
            ("read 1 MiB, MiB/s", Work::Read, FILE_SIZE, 1),
            ("write 1 MiB and close, MiB/s", Work::Write, FILE_SIZE, 1),
            ("read 4 KiB anywhere, 1 at a time", Work::ReadSome, 10_000, 1),
            ("read 4 KiB anywhere, 16 at a time", Work::ReadSome, 10_000, 16),
            ("stat of 10 000 new names; GETATTR", Work::Getattr, ENTRIES as u64, 1),
            ("create 10 000", Work::Create, 10_000, 1),
            ("list 10 000, directories", Work::List, 5, 1),
        ];
        for (what, work, count, depth) in works {
            let (mut ours, mut alone) = (Vec::new(), Vec::new());
            for _ in 0..ROUNDS {
                let server = &scene.server;
                // Mounting has a runtime of its own.
                let mounted = thread::scope(|scope| scope.spawn(|| through_a_mount(server, work, count, depth)).join());
                ours.push(mounted.expect("no panic"));
                alone.push(scene.ours(work, count, depth, scene.new_directory().await).await);
            }
            row(what, median(ours), median(alone));
        }
    });
}

/// In a new mount, which knows nothing yet.
fn through_a_mount(server: &Ganesha, work: Work, count: u64, depth: u64) -> Figure {
    let shown = Mounted::new(server).shown();
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
        Work::Getattr => measure_threads(count, || {
            for index in 0..count {
                fs::metadata(at("listed").join(format!("file-{index:06}"))).expect("there");
            }
        }),
        Work::Create => {
            // The server believes for a while that what is removed behind its back is there.
            static COUNT: AtomicU32 = AtomicU32::new(0);
            let name = format!("made-{}", COUNT.fetch_add(1, Ordering::Relaxed));
            fs::create_dir(at(&name)).expect("made");
            let figure = measure_threads(count, || {
                for index in 0..count {
                    File::create(at(&name).join(format!("file-{index}"))).expect("created");
                }
            });
            fs::remove_dir_all(server.exported().join(&name)).expect("removed");
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
                    file.read_exact_at(&mut buffer, somewhere(index)).expect("read");
                }
            });
        }
    });
}
