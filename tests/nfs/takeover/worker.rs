//! Workers in a volume, which detect every call that fails or takes effect twice.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, ChildStdout, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;

use crate::takeover::again::{Process, again};
use crate::takeover::writer::Writer;

/// Tells this program that it works, and where.
const WORKERS: &str = "PODFS_TEST_WORKERS";
/// Tells it what they do.
const WORK: &str = "PODFS_TEST_WORK";
/// The number of workers.
pub const COUNT: usize = 4;

/// The work of a worker.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Names come and go.
    Names,
    /// Files are written.
    Data,
}

/// A process of workers, each in a directory of its own.
pub struct Workers {
    process: Process,
    /// Closed when it is enough.
    enough: Option<ChildStdin>,
    done: Lines<BufReader<ChildStdout>>,
}

impl Workers {
    /// Begins to work in `directory`.
    pub fn start(directory: &Path, work: Work) -> Self {
        let mut command = again("takeover::worker::working", WORKERS);
        let work = if work == Work::Names { "names" } else { "data" };
        command.env(WORK, work).env(WORKERS, directory).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("this program can be started again");
        let enough = child.stdin.take();
        let done = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        Self { process: Process(child), enough, done }
    }

    /// Waits until so many more rounds are done.
    pub fn wait_for(&mut self, rounds: usize) {
        for _ in 0..rounds {
            self.next().expect("the workers go on");
        }
    }

    /// Lets them end, and gives the number of rounds of each.
    pub fn end(mut self) -> Vec<usize> {
        drop(self.enough.take());
        let mut last = Vec::new();
        while let Some(line) = self.next() {
            last.push(line);
        }
        assert!(self.process.0.wait().expect("it ends").success(), "no call fails");
        let rounds = last.last().expect("a last line").split_whitespace();
        rounds.map(|rounds| rounds.parse().expect("a number")).collect()
    }

    fn next(&mut self) -> Option<String> {
        self.done.by_ref().map_while(Result::ok).find_map(|line| line.strip_prefix("rounds ").map(str::to_owned))
    }
}

/// The directory of a worker.
pub fn place(base: &Path, worker: usize) -> PathBuf {
    base.join(format!("worker-{worker}"))
}

/// No test: the work of workers.
#[test]
fn working() {
    let Some(directory) = std::env::var_os(WORKERS) else { return };
    let (over, what) = (AtomicBool::new(false), std::env::var(WORK).expect("what to do"));
    let rounds: Vec<usize> = thread::scope(|scope| {
        let work = |worker: usize| {
            let directory = place(directory.as_ref(), worker);
            fs::create_dir(&directory).expect("mkdir");
            let mut writer = (what == "data").then(|| Writer::new(&directory.join("data"), worker as u64 + 1));
            let mut number = 0;
            while !over.load(Relaxed) {
                match &mut writer {
                    Some(writer) => writer.round(),
                    None => round(&directory, number),
                }
                number += 1;
                println!("rounds {worker}");
            }
            number
        };
        let workers: Vec<_> = (0..COUNT).map(|worker| scope.spawn(move || work(worker))).collect();
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        over.store(true, Relaxed);
        workers.into_iter().map(|worker| worker.join().unwrap_or_else(|_| std::process::exit(1))).collect()
    });
    let rounds: Vec<_> = rounds.iter().map(usize::to_string).collect();
    println!("rounds {}", rounds.join(" "));
    std::process::exit(0);
}

/// Makes a round of changes in `directory`. Each must succeed, and take effect once.
pub fn round(directory: &Path, number: usize) {
    let at = |name: &str| directory.join(format!("{name}-{number}"));
    let content = format!("content of round {number} ").repeat(200 + number % 300);

    fs::create_dir(at("directory")).expect("mkdir");
    let mut file = OpenOptions::new().read(true).write(true).create_new(true).open(at("file")).expect("create");
    file.write_all(content.as_bytes()).expect("write");
    file.sync_all().expect("fsync");
    fs::rename(at("file"), at("renamed")).expect("rename");
    fs::hard_link(at("renamed"), at("link")).expect("link");
    symlink("renamed", at("symlink")).expect("symlink");
    assert_eq!(fs::read_link(at("symlink")).expect("readlink").to_str(), Some("renamed"));
    assert_eq!(fs::read_to_string(at("link")).expect("read"), content);
    fs::remove_file(at("link")).expect("unlink");
    file.write_all(b"more").expect("write");
    drop(file);
    assert_eq!(fs::metadata(at("renamed")).expect("stat").len(), content.len() as u64 + 4);

    // A name that is taken by another file while it is open.
    let open = File::open(at("renamed")).expect("open");
    fs::write(at("other"), "other").expect("write");
    fs::rename(at("other"), at("renamed")).expect("rename");
    let mut held = String::new();
    (&open).read_to_string(&mut held).expect("read");
    assert_eq!(held, content.clone() + "more");
    assert_eq!(fs::read_to_string(at("renamed")).expect("read"), "other");

    // A file that is removed while it is open.
    let nameless = OpenOptions::new().read(true).write(true).create_new(true).open(at("nameless")).expect("create");
    fs::remove_file(at("nameless")).expect("unlink");
    nameless.write_all_at(b"nobody's", 0).expect("write");
    let mut back = [0; 8];
    nameless.read_exact_at(&mut back, 0).expect("read");
    assert_eq!(&back, b"nobody's");

    fs::rename(at("symlink"), at("directory").join("symlink")).expect("rename");
    fs::remove_file(at("directory").join("symlink")).expect("unlink");
    fs::remove_dir(at("directory")).expect("rmdir");
    assert!(!fs::exists(at("directory")).expect("stat"));
}

/// Checks the files that the rounds have left in `directory` on the server.
pub fn check(directory: &Path, rounds: usize) {
    let mut left: Vec<_> =
        fs::read_dir(directory).expect("listed").map(|one| one.expect("an entry").file_name()).collect();
    left.retain(|name| !name.to_string_lossy().starts_with(".nfs"));
    assert_eq!(left.len(), rounds, "{left:?}");
    (0..rounds).for_each(|number| {
        let path = directory.join(format!("renamed-{number}"));
        assert_eq!(fs::read_to_string(path).expect("read"), "other");
    });
}
