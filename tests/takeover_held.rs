//! What containers hold over a kill of the server: locks, waits for locks, directories, watches.

mod common;

use std::fs::{self, File};
use std::io::{Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};

use common::caller::in_thread;
use common::locker::Locker;
use common::passthrough::disk_directory;
use common::watch::Watcher;
use common::*;
use nix::sys::signal::{Signal, kill};
use tempfile::TempDir;

/// Each kind of lock, and how it is let go.
const KINDS: [(&str, &str, &str); 3] = [
    ("lock f flock exclusive", "lock f flock exclusive wait", "lock f flock none"),
    ("lock f posix exclusive 0 10", "lock f posix exclusive 5 10 wait", "lock f posix none 0 10"),
    ("lock f ofd exclusive 0 10", "lock f ofd exclusive 5 10 wait", "lock f ofd none 0 10"),
];

/// A pod with a volume that the kernel reads and writes by itself, and one that the server reads and writes.
struct Pod {
    running: Running,
    _fixture: Fixture,
    _source: TempDir,
}

impl Pod {
    fn new() -> Self {
        let source = disk_directory();
        let host = format!("{{name: host, hostPath: {{path: {}, type: Directory}}}}", source.path().display());
        let fixture = Fixture::new(&pod(&format!("[{host}, {{name: limited, emptyDir: {{sizeLimit: 1Gi}}}}]")));
        let running = fixture.run();
        Self { running, _fixture: fixture, _source: source }
    }

    fn volumes(&self) -> [PathBuf; 2] {
        ["host", "limited"].map(|name| self.running.volume(name))
    }

    /// Kills the server, and waits until another one answers.
    fn kill(&self, volume: &Path) {
        kill(self.running.server(), Signal::SIGKILL).expect("it is there");
        self.running.freed(|| rustix::fs::statvfs(volume).expect("a server answers"));
    }
}

#[test]
fn a_lock_is_held_over_kills_and_let_go_after() {
    let pod = Pod::new();
    for volume in pod.volumes() {
        for (lock, _, unlock) in KINDS {
            let file = volume.join(lock.replace(' ', "-"));
            let (mut owner, mut other) = (Locker::with(&file), Locker::with(&file));
            owner.does(lock);
            for _ in 0..3 {
                pod.kill(&volume);
                other.is_refused(lock);
            }
            owner.does(unlock);
            other.does(lock);
            pod.kill(&volume);
            owner.is_refused(lock);
            other.dies();
            eventually("the lock of a process that died is free", || owner.ask(lock) == "ok");
        }
    }
}

#[test]
fn who_waits_for_a_lock_gets_it_from_the_next_server() {
    let pod = Pod::new();
    for volume in pod.volumes() {
        for (lock, wait, unlock) in KINDS {
            let file = volume.join(lock.replace(' ', "-"));
            let (mut owner, mut waiter) = (Locker::with(&file), Locker::with(&file));
            owner.does(lock);
            waiter.waits_in(wait);
            for _ in 0..3 {
                pod.kill(&volume);
            }
            owner.does(unlock);
            assert_eq!(waiter.answer(), "ok", "{wait} in {}", volume.display());
            owner.is_refused(&wait.replace(" wait", ""));
        }
    }
}

#[test]
fn a_wait_for_a_lock_can_be_interrupted_in_the_next_server() {
    let pod = Pod::new();
    for volume in pod.volumes() {
        for (lock, wait, unlock) in KINDS {
            let file = volume.join(lock.replace(' ', "-"));
            let (mut owner, mut waiter) = (Locker::with(&file), Locker::with(&file));
            owner.does(lock);
            waiter.waits_in(wait);
            pod.kill(&volume);
            waiter.signal(Signal::SIGUSR1);
            assert_eq!(waiter.answer(), "EINTR", "{wait} in {}", volume.display());
            owner.does(unlock);
            let mut third = Locker::with(&file);
            third.does(lock);
        }
    }
}

#[test]
fn who_waits_for_a_lock_may_die_after_the_kill() {
    let pod = Pod::new();
    for volume in pod.volumes() {
        for (lock, wait, unlock) in KINDS {
            let file = volume.join(lock.replace(' ', "-"));
            let (mut owner, mut waiter) = (Locker::with(&file), Locker::with(&file));
            owner.does(lock);
            waiter.waits_in(wait);
            pod.kill(&volume);
            waiter.dies();
            owner.does(unlock);
            let mut third = Locker::with(&file);
            eventually("nobody has the lock", || third.ask(lock) == "ok");
        }
    }
}

#[test]
fn a_working_directory_stays_one_also_when_it_is_removed() {
    let pod = Pod::new();
    for volume in pod.volumes() {
        let inside = volume.join("inside");
        fs::create_dir(&inside).expect("made");
        in_thread(&inside, || {
            fs::write("f", "1").expect("written");
            pod.kill(&volume);
            assert_eq!(fs::read_to_string("f").expect("read"), "1");
            fs::remove_file("f").expect("removed");
            fs::remove_dir(&inside).expect("removed");
            pod.kill(&volume);
            assert!(fs::write("f", "1").is_err() && fs::metadata(".").is_ok());
        });
    }
}

#[test]
fn a_listing_goes_on_where_it_was() {
    let pod = Pod::new();
    for volume in pod.volumes() {
        let names: Vec<_> = (0..2000).map(|n| format!("entry-{n:04}-{}", "x".repeat(60))).collect();
        let directory = volume.join("many");
        fs::create_dir(&directory).expect("made");
        names.iter().for_each(|name| fs::write(directory.join(name), "").expect("written"));
        let mut listed = Vec::new();
        for (place, entry) in fs::read_dir(&directory).expect("a listing").enumerate() {
            listed.push(entry.expect("an entry").file_name().into_string().expect("text"));
            if place % 500 == 250 {
                pod.kill(&volume);
            }
        }
        listed.sort_unstable();
        assert_eq!(listed, names);
    }
}

#[test]
fn a_file_that_never_had_a_name_gets_one_after_the_kill() {
    let pod = Pod::new();
    for volume in pod.volumes() {
        let mut options = fs::OpenOptions::new();
        let mut file: File =
            options.read(true).write(true).custom_flags(libc::O_TMPFILE).open(&volume).expect("a file");
        file.write_all(b"first").expect("written");
        pod.kill(&volume);
        file.write_all(b", second").expect("written");
        file.rewind().expect("rewound");
        assert_eq!(std::io::read_to_string(&file).expect("read"), "first, second");
        let named = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
        let (cwd, follow) = (rustix::fs::CWD, rustix::fs::AtFlags::SYMLINK_FOLLOW);
        rustix::fs::linkat(cwd, named, cwd, volume.join("named"), follow).expect("named");
        pod.kill(&volume);
        assert_eq!(fs::read_to_string(volume.join("named")).expect("read"), "first, second");
    }
}

#[test]
fn a_watch_hears_what_happens_after_the_kill() {
    let pod = Pod::new();
    for volume in pod.volumes() {
        let watcher = Watcher::on("root", &volume);
        pod.kill(&volume);
        fs::write(volume.join("new"), "1").expect("written");
        pod.kill(&volume);
        fs::remove_file(volume.join("new")).expect("removed");
        let heard: Vec<_> = watcher.heard().into_iter().filter(|event| event.ends_with(" new")).collect();
        let words = ["CREATE", "OPEN", "MODIFY", "CLOSE_WRITE", "DELETE"];
        assert_eq!(heard, words.map(|word| format!("root {word} new")));
    }
}

#[test]
fn what_somebody_has_left_open_in_podfs_is_not_in_the_way_of_what_containers_have_open() {
    let source = disk_directory();
    let host = format!("{{name: host, hostPath: {{path: {}, type: Directory}}}}", source.path().display());
    let fixture = Fixture::new(&pod(&format!("[{host}]")));
    // The number of a descriptor is taken in a server only when that is started, so these are in the way of any successor.
    let mut running = fixture.run();
    let files: Vec<_> =
        (0..50).map(|n| File::create(running.volume("host").join(n.to_string())).expect("made")).collect();
    fixture.kill_supervisor(&mut running);
    let mut command = fixture.command();
    let leave_open = || match (64..128).all(|number| {
        // SAFETY: nothing but standard input is read, and nobody has anything at these numbers after `fork(2)`.
        unsafe { libc::dup2(0, number) == number }
    }) {
        true => Ok(()),
        false => Err(std::io::Error::last_os_error()),
    };
    // SAFETY: the call is async-signal-safe.
    unsafe { command.pre_exec(leave_open) };
    let mut running = fixture.start_command(command);
    running.wait_ready();
    kill(running.server(), Signal::SIGKILL).expect("it is there");
    running.freed(|| files.iter().for_each(|mut file| file.write_all(b"!").expect("it is open as before")));
    drop(files);
    assert!(running.stop().success());
    fixture.assert_nothing_left();
}
