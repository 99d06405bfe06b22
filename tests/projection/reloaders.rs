//! EV-09: programs that watch for a changed configuration notice an update of a volume. The test starts each of
//! them on a volume, and then updates the volume once. A program that opens files through `..data`
//! again and again always finds them.

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

/// A program that watches; it is ended with the test.
struct Program {
    child: Child,
    output: PathBuf,
    _directory: TempDir,
}

impl Program {
    /// Starts it, and waits until it watches something.
    fn watching(command: &mut Command, input: Stdio) -> Self {
        let directory = TempDir::new().expect("a directory");
        let output = directory.path().join("output");
        let file = File::create(&output).expect("a file");
        let same = file.try_clone().expect("a descriptor");
        let child = command.stdin(input).stdout(file).stderr(same).spawn().expect("the program is installed");
        let mut program = Self { child, output, _directory: directory };
        eventually("the program watches", || {
            let ended = program.child.try_wait().expect("a child");
            assert!(ended.is_none(), "it ended: {}", program.output());
            program.has_watch()
        });
        program
    }

    /// Whether one of its descriptors has an inotify watch (`proc_pid_fdinfo(5)`).
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
        eventually(&format!("the program says {text:?}"), || self.output().contains(text));
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
    assert!(program.child.wait().expect("it ends by itself").success());
}

#[test]
fn watchmedo_notices() {
    // python3-watchdog
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
    // entr throws away what happens in its first moments, so updates come until it listens; between two
    // of them it gets time to make up its mind.
    let mut updates = 1..;
    eventually("entr says what is new", || {
        let update = format!("new {}", updates.next().expect("numbers do not end"));
        served.commit(&[("app.yaml", &update)]);
        (0..100).any(|_| {
            std::thread::sleep(Duration::from_millis(5));
            program.output().contains("new")
        })
    });
}

#[test]
fn a_reloader_that_waits_for_data_to_appear_notices() {
    // configmap-reload, config-reloader and others: an entry `..data` is created or moved there.
    let mut served = Served::with(OLD);
    let (events, heard) = channel();
    let mut watcher = notify::recommended_watcher(events).expect("a watcher");
    watcher.watch(served.path(), RecursiveMode::NonRecursive).expect("a watch");
    served.commit(NEW);
    loop {
        let event = heard.recv_timeout(TIMEOUT).expect("the switch is heard").expect("an event");
        let moved = event.kind == EventKind::Modify(ModifyKind::Name(RenameMode::To));
        if moved && event.paths == [served.path().join("..data")] {
            break;
        }
    }
    assert_eq!(read(&served.path().join("app.yaml")), "new");
}

#[test]
fn a_reloader_that_resolves_the_path_at_each_event_notices() {
    // viper: at an event in the directory, does the file resolve to another one than before?
    let mut served = Served::with(OLD);
    let path = served.path().join("app.yaml");
    let before = fs::canonicalize(&path).expect("it resolves");
    let (events, heard) = channel();
    let mut watcher = notify::recommended_watcher(events).expect("a watcher");
    watcher.watch(served.path(), RecursiveMode::NonRecursive).expect("a watch");
    std::thread::scope(|scope| {
        scope.spawn(|| served.commit(NEW));
        loop {
            heard.recv_timeout(TIMEOUT).expect("an event comes after the switch").expect("an event");
            // For a moment the path leads into the old generation, which is being removed.
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

/// Polls on a thread of its own until the content changes.
fn poll<T: PartialEq + Send + Sync>(name: &str, look: impl Fn(&Path) -> io::Result<T> + Sync) {
    let mut served = Served::with(OLD);
    let path = served.path().join(name);
    let before = look(&path).expect("it is there");
    std::thread::scope(|scope| {
        let polling = || eventually("the loop notices", || look(&path).is_ok_and(|now| now != before));
        let polling = scope.spawn(polling);
        served.commit(NEW);
        polling.join().expect("it notices");
    });
    assert_eq!(read(&served.path().join("app.yaml")), "new");
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).expect("a file")
}

#[test]
fn viper_itself_notices() {
    // Built from Debian's golang-github-spf13-viper-dev.
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

/// Opens a file through `..data` again and again, until the test stops it.
#[derive(Default)]
struct Loop {
    opened: AtomicUsize,
    missing: AtomicUsize,
}

impl Loop {
    fn go_on(&self, path: &Path, done: &AtomicBool) {
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
    // A reader may be kept waiting for longer than a second by a busy machine.
    command.args(["--keep-old-generations", "60"]);
    let mut running = fixture.start_command(command);
    running.wait_ready();
    let data = running.volume("config").join("..data");
    let (loops, done) = ([(); 4].map(|()| Loop::default()), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for one in &loops {
            scope.spawn(|| one.go_on(&data.join("a"), &done));
        }
        for number in 1..=SWITCHES {
            write(number);
            let shown =
                || fs::read_to_string(running.volume("config").join("a")).is_ok_and(|is| is == number.to_string());
            let switched = std::time::Instant::now() + TIMEOUT;
            while !shown() && std::time::Instant::now() < switched {
                std::thread::yield_now();
            }
            // No loop is more than two switches behind, so the bound on the number of old generations does not matter.
            let before = loops.each_ref().map(|one| one.opened.load(Ordering::Relaxed));
            let has_gone_on = |(one, before): (&Loop, &usize)| one.opened.load(Ordering::Relaxed) > before + 1;
            while !loops.iter().zip(&before).all(has_gone_on) && std::time::Instant::now() < switched {
                std::thread::yield_now();
            }
        }
        done.store(true, Ordering::Relaxed);
    });
    let missing: usize = loops.iter().map(|one| one.missing.load(Ordering::Relaxed)).sum();
    assert_eq!(missing, 0, "ENOENT in {SWITCHES} switches");
    assert_eq!(fs::read_to_string(data.join("a")).expect("a file"), SWITCHES.to_string());
}
