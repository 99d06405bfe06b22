//! Workers that change a volume, and detect every call that fails or is executed twice.

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

/// The environment variable that makes this program a process of workers. Its value is the directory in which they
/// work.
const WORKERS: &str = "PODFS_TEST_WORKERS";
/// The environment variable with the kind of work.
const WORK: &str = "PODFS_TEST_WORK";
/// The number of workers.
pub const COUNT: usize = 4;

/// The work of a worker.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Creates, renames and removes files and directories.
    Names,
    /// Writes and reads files.
    Data,
}

/// A process with [`COUNT`] workers. Each has its own directory.
pub struct Workers {
    process: Process,
    /// The standard input of the process. The workers end when it is closed.
    input: Option<ChildStdin>,
    output: Lines<BufReader<ChildStdout>>,
}

impl Workers {
    /// Starts workers in `directory`.
    pub fn start(directory: &Path, work: Work) -> Self {
        let mut command = again("takeover::worker::working", WORKERS);
        let work = if work == Work::Names { "names" } else { "data" };
        command.env(WORK, work).env(WORKERS, directory).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("this program can be started again");
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        Self { process: Process(child), input, output }
    }

    /// Waits until the workers together have finished this number of further rounds.
    pub fn wait_for(&mut self, rounds: usize) {
        for _ in 0..rounds {
            self.next().expect("the workers go on");
        }
    }

    /// Ends the workers. Returns the number of rounds of each.
    pub fn end(mut self) -> Vec<usize> {
        drop(self.input.take());
        let mut lines = Vec::new();
        while let Some(line) = self.next() {
            lines.push(line);
        }
        assert!(self.process.0.wait().expect("the process ends").success(), "no call fails");
        // The last line has the number of rounds of each worker.
        let rounds = lines.last().expect("a last line").split_whitespace();
        rounds.map(|rounds| rounds.parse().expect("a number")).collect()
    }

    fn next(&mut self) -> Option<String> {
        self.output.by_ref().map_while(Result::ok).find_map(|line| line.strip_prefix("rounds ").map(str::to_owned))
    }
}

/// The directory of a worker.
pub fn directory_of(base: &Path, worker: usize) -> PathBuf {
    base.join(format!("worker-{worker}"))
}

/// This is no test, but the main function of the workers' process.
#[test]
fn working() {
    let Some(directory) = std::env::var_os(WORKERS) else { return };
    let (stop, kind) = (AtomicBool::new(false), std::env::var(WORK).expect("the kind of work"));
    let rounds: Vec<usize> = thread::scope(|scope| {
        let work = |worker: usize| {
            let directory = directory_of(directory.as_ref(), worker);
            fs::create_dir(&directory).expect("mkdir");
            let mut writer = (kind == "data").then(|| Writer::new(&directory.join("data"), worker as u64 + 1));
            let mut number = 0;
            while !stop.load(Relaxed) {
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
        stop.store(true, Relaxed);
        workers.into_iter().map(|worker| worker.join().unwrap_or_else(|_| std::process::exit(1))).collect()
    });
    let rounds: Vec<_> = rounds.iter().map(usize::to_string).collect();
    println!("rounds {}", rounds.join(" "));
    std::process::exit(0);
}

/// Makes a round of changes in `directory`. Panics if a change fails or is executed twice.
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

    // Another file takes the name of an open file.
    let open = File::open(at("renamed")).expect("open");
    fs::write(at("other"), "other").expect("write");
    fs::rename(at("other"), at("renamed")).expect("rename");
    let mut open_content = String::new();
    (&open).read_to_string(&mut open_content).expect("read");
    assert_eq!(open_content, content.clone() + "more");
    assert_eq!(fs::read_to_string(at("renamed")).expect("read"), "other");

    // A file is removed while it is open.
    let nameless = OpenOptions::new().read(true).write(true).create_new(true).open(at("nameless")).expect("create");
    fs::remove_file(at("nameless")).expect("unlink");
    nameless.write_all_at(b"nobody's", 0).expect("write");
    let mut read_back = [0; 8];
    nameless.read_exact_at(&mut read_back, 0).expect("read");
    assert_eq!(&read_back, b"nobody's");

    fs::rename(at("symlink"), at("directory").join("symlink")).expect("rename");
    fs::remove_file(at("directory").join("symlink")).expect("unlink");
    fs::remove_dir(at("directory")).expect("rmdir");
    assert!(!fs::exists(at("directory")).expect("stat"));
}

/// Checks the files of the rounds in `directory` on the server.
pub fn check(directory: &Path, rounds: usize) {
    let mut names: Vec<_> =
        fs::read_dir(directory).expect("listed").map(|entry| entry.expect("an entry").file_name()).collect();
    names.retain(|name| !name.to_string_lossy().starts_with(".nfs"));
    assert_eq!(names.len(), rounds, "{names:?}");
    (0..rounds).for_each(|number| {
        let path = directory.join(format!("renamed-{number}"));
        assert_eq!(fs::read_to_string(path).expect("read"), "other");
    });
}
