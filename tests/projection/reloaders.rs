//! EV-09: programs that watch for a changed configuration notice an update of a volume. Most tests start one such
//! program on a volume, and then update the volume once. The last test checks that a program that opens files through
//! `..data` again and again always finds them.

use std::fs::{self, File};
use std::io::{self, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use notify::event::{ModifyKind, RenameMode};
use notify::{EventKind, RecursiveMode, Watcher};
use tempfile::TempDir;

use crate::common::{Fixture, Served, TIMEOUT, config_map, config_pod, eventually};

const OLD: &[(&str, &str)] = &[("app.yaml", "old"), ("other", "same")];
const NEW: &[(&str, &str)] = &[("app.yaml", "new"), ("other", "same")];

/// A program that watches a volume. The test kills it on drop.
struct Program {
    child: Child,
    output: PathBuf,
    _directory: TempDir,
}

impl Program {
    /// Starts the program, and waits until it has an inotify watch.
    fn watching(command: &mut Command, input: Stdio) -> Self {
        let directory = TempDir::new().expect("a directory");
        let output = directory.path().join("output");
        let stdout = File::create(&output).expect("a file");
        let stderr = stdout.try_clone().expect("a descriptor");
        let child = command.stdin(input).stdout(stdout).stderr(stderr).spawn().expect("the program is installed");
        let mut program = Self { child, output, _directory: directory };
        eventually("the program watches", || {
            let ended = program.child.try_wait().expect("a child");
            assert!(ended.is_none(), "the program ended: {}", program.output());
            program.has_watch()
        });
        program
    }

    /// Whether one of the program's descriptors has an inotify watch (`proc_pid_fdinfo(5)`).
    fn has_watch(&self) -> bool {
        let descriptors = fs::read_dir(format!("/proc/{}/fdinfo", self.child.id())).into_iter().flatten().flatten();
        let mut descriptors = descriptors.filter_map(|entry| fs::read_to_string(entry.path()).ok());
        descriptors.any(|text| text.lines().any(|line| line.starts_with("inotify wd:")))
    }

    fn output(&self) -> String {
        fs::read_to_string(&self.output).expect("a file")
    }

    #[track_caller]
    fn wait_output(&self, text: &str) {
        eventually(&format!("the program writes {text:?}"), || self.output().contains(text));
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn inotifywait_on_the_volume_notices() {
    let mut served = Served::with(OLD);
    let mut command = Command::new("inotifywait");
    command.args(["--monitor", "--event", "moved_to", "--format", "%e %f"]).arg(served.path());
    let program = Program::watching(&mut command, Stdio::null());
    served.commit(NEW);
    program.wait_output("MOVED_TO ..data\n");
}

#[test]
fn inotifywait_on_the_file_notices() {
    let mut served = Served::with(OLD);
    let mut command = Command::new("inotifywait");
    command.args(["--event", "delete_self", "--format", "%e of %w"]).arg(served.path().join("app.yaml"));
    let mut program = Program::watching(&mut command, Stdio::null());
    served.commit(NEW);
    program.wait_output("DELETE_SELF of ");
    assert!(program.child.wait().expect("inotifywait ends after one event").success());
}

#[test]
fn watchmedo_notices() {
    // `watchmedo` is part of Debian's python3-watchdog.
    let mut served = Served::with(OLD);
    let mut command = Command::new("watchmedo");
    command.args(["shell-command", "--command", "echo ${watch_event_type} ${watch_dest_path}"]).arg(served.path());
    let program = Program::watching(&mut command, Stdio::null());
    served.commit(NEW);
    program.wait_output(&format!("moved {}\n", served.path().join("..data").display()));
}

#[test]
fn entr_on_the_file_notices() {
    let mut served = Served::with(OLD);
    let path = served.path().join("app.yaml");
    let mut list = tempfile::tempfile().expect("a file");
    writeln!(list, "{}", path.display()).expect("written");
    list.rewind().expect("rewound");
    let mut command = Command::new("entr");
    command.args(["-n", "-p", "cat"]).arg(&path);
    let program = Program::watching(&mut command, list.into());
    // entr discards the events of its first moments. So the test updates the volume until entr notices an update, and
    // gives entr some time after each update.
    let mut updates = 1..;
    eventually("entr prints the new content", || {
        let update = format!("new {}", updates.next().expect("a number"));
        served.commit(&[("app.yaml", &update)]);
        (0..100).any(|_| {
            std::thread::sleep(Duration::from_millis(5));
            program.output().contains("new")
        })
    });
}

#[test]
fn a_reloader_that_waits_for_data_to_appear_notices() {
    // configmap-reload, config-reloader and others wait for the event that an entry `..data` is created in the
    // directory, or moved into it.
    let mut served = Served::with(OLD);
    let (events, received) = channel();
    let mut watcher = notify::recommended_watcher(events).expect("a watcher");
    watcher.watch(served.path(), RecursiveMode::NonRecursive).expect("a watch");
    served.commit(NEW);
    loop {
        let event = received.recv_timeout(TIMEOUT).expect("the watcher reports the switch").expect("an event");
        let moved = event.kind == EventKind::Modify(ModifyKind::Name(RenameMode::To));
        if moved && event.paths == [served.path().join("..data")] {
            break;
        }
    }
    assert_eq!(read(&served.path().join("app.yaml")), "new");
}

#[test]
fn a_reloader_that_resolves_the_path_at_each_event_notices() {
    // At each event in the directory, viper resolves the path of the file, and compares the result with the earlier
    // one.
    let mut served = Served::with(OLD);
    let path = served.path().join("app.yaml");
    let before = fs::canonicalize(&path).expect("the path resolves");
    let (events, received) = channel();
    let mut watcher = notify::recommended_watcher(events).expect("a watcher");
    watcher.watch(served.path(), RecursiveMode::NonRecursive).expect("a watch");
    std::thread::scope(|scope| {
        scope.spawn(|| served.commit(NEW));
        loop {
            received.recv_timeout(TIMEOUT).expect("an event arrives after the switch").expect("an event");
            // The resolution fails if the server removes the old generation after the kernel has resolved `..data` to
            // it.
            if fs::canonicalize(&path).is_ok_and(|resolved| resolved != before) {
                break;
            }
        }
    });
    assert_eq!(read(&path), "new");
}

#[test]
fn a_loop_that_polls_the_time_of_the_file_notices() {
    poll("app.yaml", |path| fs::metadata(path)?.modified());
}

#[test]
fn a_loop_that_polls_the_inode_of_the_file_notices() {
    poll("app.yaml", |path| Ok(fs::metadata(path)?.ino()));
}

#[test]
fn a_loop_that_polls_the_path_of_data_notices() {
    poll("..data", |path| fs::canonicalize(path));
}

/// Polls a property of a path in another thread, while this thread commits, and checks that the property changes.
fn poll<T: PartialEq + Send + Sync>(name: &str, property: impl Fn(&Path) -> io::Result<T> + Sync) {
    let mut served = Served::with(OLD);
    let path = served.path().join(name);
    let before = property(&path).expect("the path exists");
    std::thread::scope(|scope| {
        let polling = || eventually("the loop notices", || property(&path).is_ok_and(|now| now != before));
        let polling = scope.spawn(polling);
        served.commit(NEW);
        polling.join().expect("the loop notices the switch");
    });
    assert_eq!(read(&served.path().join("app.yaml")), "new");
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).expect("a file")
}

#[test]
fn viper_itself_notices() {
    // The program is built with the sources of Debian's golang-github-spf13-viper-dev.
    let build = TempDir::with_prefix("podfs-test-").expect("a directory");
    let watcher = build.path().join("watcher");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/peers/viper.go");
    let built = Command::new("go")
        .args(["build", "-o"])
        .args([&watcher, &source])
        .envs([("GO111MODULE", "off"), ("GOPATH", "/usr/share/gocode")])
        .env("GOCACHE", build.path().join("cache"))
        .status();
    assert!(built.expect("go is installed").success());

    let mut served = Served::with(&[("app.yaml", "port: 8080")]);
    let program = Program::watching(Command::new(&watcher).arg(served.path().join("app.yaml")), Stdio::null());
    program.wait_output("watching 8080");
    served.commit(&[("app.yaml", "port: 9090")]);
    program.wait_output("changed to 9090");
}

/// Counters of a thread that opens a file through `..data` again and again.
#[derive(Default)]
struct OpenLoop {
    /// How often the thread has called open(2), with any result.
    opened: AtomicUsize,
    /// How often open(2) failed with ENOENT.
    missing: AtomicUsize,
}

impl OpenLoop {
    fn run(&self, path: &Path, done: &AtomicBool) {
        while !done.load(Ordering::Relaxed) {
            match File::open(path) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    self.missing.fetch_add(1, Ordering::Relaxed);
                }
                Err(error) => panic!("cannot open {}: {error}", path.display()),
            }
            self.opened.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[test]
fn a_program_that_opens_files_through_data_finds_them_at_every_switch() {
    const SWITCHES: usize = 400;
    let fixture = Fixture::new(&config_pod());
    let write = |number: usize| {
        fixture.write("objects/app.json", &config_map("app", &[("a", &number.to_string())]));
    };
    write(0);
    let mut command = fixture.command();
    // On a busy machine a reader may wait for the CPU for longer than a second, while it has resolved `..data` but not
    // opened the file.
    command.args(["--keep-old-generations", "60"]);
    let mut running = fixture.start_command(command);
    running.wait_ready();
    let data = running.volume("config").join("..data");
    let (loops, done) = ([(); 4].map(|()| OpenLoop::default()), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for open_loop in &loops {
            scope.spawn(|| open_loop.run(&data.join("a"), &done));
        }
        for number in 1..=SWITCHES {
            write(number);
            let is_shown = || {
                fs::read_to_string(running.volume("config").join("a"))
                    .is_ok_and(|content| content == number.to_string())
            };
            let deadline = std::time::Instant::now() + TIMEOUT;
            while !is_shown() && std::time::Instant::now() < deadline {
                std::thread::yield_now();
            }
            // Each loop opens the file again before the next switch. So no loop is more than two switches behind, and
            // the limit on the number of old generations does not matter.
            let before = loops.each_ref().map(|open_loop| open_loop.opened.load(Ordering::Relaxed));
            let has_advanced =
                |(open_loop, before): (&OpenLoop, &usize)| open_loop.opened.load(Ordering::Relaxed) > before + 1;
            while !loops.iter().zip(&before).all(has_advanced) && std::time::Instant::now() < deadline {
                std::thread::yield_now();
            }
        }
        done.store(true, Ordering::Relaxed);
    });
    let missing: usize = loops.iter().map(|open_loop| open_loop.missing.load(Ordering::Relaxed)).sum();
    assert_eq!(missing, 0, "ENOENT in {SWITCHES} switches");
    assert_eq!(fs::read_to_string(data.join("a")).expect("a file"), SWITCHES.to_string());
}
