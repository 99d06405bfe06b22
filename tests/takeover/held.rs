//! State of a container's processes that must survive a kill of the server, alone or together with its keeper: open files,
//! locks, waits for locks, listings and working directories, watches.

use std::fs::{self, File};
use std::io::{Seek, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};

use crate::common::caller::in_thread;
use crate::common::file_handle::FileHandle;
use crate::common::forgetting::forget_unused;
use crate::common::locker::Locker;
use crate::common::namespace::on_a_host_that_shares_mounts;
use crate::common::passthrough::disk_directory;
use crate::common::watch::Watcher;
use crate::common::*;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::{Signal, kill};
use tempfile::TempDir;

/// For each kind of lock: the orders to a [`Locker`] that take, wait for and release a lock.
const KINDS: [(&str, &str, &str); 3] = [
    ("lock f flock exclusive", "lock f flock exclusive wait", "lock f flock none"),
    ("lock f posix exclusive 0 10", "lock f posix exclusive 5 10 wait", "lock f posix none 0 10"),
    ("lock f ofd exclusive 0 10", "lock f ofd exclusive 5 10 wait", "lock f ofd none 0 10"),
];

/// A pod with three volumes. The kernel reads and writes the files of `host` and `scratch` itself, without the server. The
/// server reads and writes the files of `limited`.
struct Pod {
    running: Running,
    _fixture: Fixture,
    source: TempDir,
}

impl Pod {
    fn new() -> Self {
        let source = disk_directory();
        let host = format!("{{name: host, hostPath: {{path: {}, type: Directory}}}}", source.path().display());
        let fixture = Fixture::new(&pod(&format!(
            "[{host}, {{name: limited, emptyDir: {{sizeLimit: 1Gi}}}}, {{name: scratch, emptyDir: {{}}}}]"
        )));
        let running = fixture.run();
        Self { running, _fixture: fixture, source }
    }

    fn volumes(&self) -> [PathBuf; 2] {
        ["host", "limited"].map(|name| self.running.volume(name))
    }

    /// Kills the server and its keeper, and waits until another server answers.
    fn kill_both(&self, volume: &Path) {
        self.running.kill_server_and_keeper(|| rustix::fs::statvfs(volume).expect("a server answers"));
    }

    /// Kills the server, and waits until another one answers.
    fn kill(&self, volume: &Path) {
        kill(self.running.server(), Signal::SIGKILL).expect("the server exists");
        self.running.freed(|| rustix::fs::statvfs(volume).expect("a server answers"));
    }
}

#[test]
fn a_lock_that_the_next_server_grants_shows_what_the_last_holder_wrote() {
    let pod = Pod::new();
    let volume = pod.running.volume("host");
    for (lock, wait, unlock) in KINDS {
        let name = lock.replace(' ', "-");
        let (shown, source) = (volume.join(&name), pod.source.path().join(&name));
        fs::write(&source, "1234").expect("written");
        let (mut host, mut waiting) = (Locker::with(&source), Locker::new());
        host.does(lock);
        waiting.does(&format!("open f {} write", shown.display()));
        waiting.waits_in(wait);
        pod.kill(&volume);
        // The kernel caches these attributes for a second.
        assert_eq!(fs::metadata(&shown).expect("attributes").len(), 4, "{lock}");
        File::options().append(true).open(&source).expect("a file").write_all(b"567890").expect("written");
        host.does(unlock);
        assert_eq!(waiting.answer(), "ok");
        assert_eq!(waiting.ask("size f"), "10", "{lock}");
    }
}

#[test]
fn a_lock_is_held_over_kills_and_let_go_after() {
    let pod = Pod::new();
    // The kernel itself keeps the locks of the last volume: no process outside of the pod uses its files.
    for volume in pod.volumes().into_iter().chain([pod.running.volume("scratch")]) {
        for (lock, _, unlock) in KINDS {
            let file = volume.join(lock.replace(' ', "-"));
            let (mut owner, mut contender) = (Locker::with(&file), Locker::with(&file));
            owner.does(lock);
            for _ in 0..3 {
                pod.kill(&volume);
                contender.is_refused(lock);
            }
            owner.does(unlock);
            contender.does(lock);
            pod.kill(&volume);
            owner.is_refused(lock);
            contender.dies();
            eventually("the lock of a process that died is free", || owner.ask(lock) == "ok");
        }
    }
}

#[test]
fn a_waiting_lock_call_gets_its_lock_from_the_next_server() {
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
fn a_process_that_waits_for_a_lock_can_be_killed_after_a_takeover() {
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
            eventually("the lock is free", || third.ask(lock) == "ok");
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
fn a_listing_continues_where_it_was() {
    let pod = Pod::new();
    for volume in pod.volumes() {
        let names: Vec<_> = (0..2000).map(|n| format!("entry-{n:04}-{}", "x".repeat(60))).collect();
        let directory = volume.join("many");
        fs::create_dir(&directory).expect("made");
        names.iter().for_each(|name| fs::write(directory.join(name), "").expect("written"));
        let mut listed = Vec::new();
        for (index, entry) in fs::read_dir(&directory).expect("a listing").enumerate() {
            listed.push(entry.expect("an entry").file_name().into_string().expect("text"));
            if index % 500 == 250 {
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
fn a_watch_gets_events_after_a_takeover() {
    let pod = Pod::new();
    for volume in pod.volumes() {
        let watcher = Watcher::on("root", &volume);
        pod.kill(&volume);
        fs::write(volume.join("new"), "1").expect("written");
        pod.kill(&volume);
        fs::remove_file(volume.join("new")).expect("removed");
        let events: Vec<_> = watcher.events().into_iter().filter(|event| event.ends_with(" new")).collect();
        let words = ["CREATE", "OPEN", "MODIFY", "CLOSE_WRITE", "DELETE"];
        assert_eq!(events, words.map(|word| format!("root {word} new")));
    }
}

#[test]
fn descriptors_that_podfs_inherited_do_not_collide_with_open_files_of_containers() {
    let source = disk_directory();
    let host = format!("{{name: host, hostPath: {{path: {}, type: Directory}}}}", source.path().display());
    let fixture = Fixture::new(&pod(&format!("[{host}]")));
    // The next supervisor inherits descriptors with the numbers of the containers' open files, and its servers could inherit
    // them. So a successor could find the numbers of the open files taken.
    let mut running = fixture.run();
    let files: Vec<_> =
        (0..50).map(|n| File::create(running.volume("host").join(n.to_string())).expect("made")).collect();
    fixture.kill_supervisor(&mut running);
    let mut command = fixture.command();
    let leave_open = || {
        for number in 64..128 {
            // A number in use may be that of the pipe for podfs's readiness.
            // SAFETY: the calls only duplicate standard input to a number that is free.
            if unsafe { libc::fcntl(number, libc::F_GETFD) == -1 && libc::dup2(0, number) != number } {
                return Err(std::io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: both calls are async-signal-safe.
    unsafe { command.pre_exec(leave_open) };
    let mut running = fixture.start_command(command);
    running.wait_ready();
    kill(running.server(), Signal::SIGKILL).expect("the server exists");
    running.freed(|| files.iter().for_each(|mut file| file.write_all(b"!").expect("the file is still open")));
    drop(files);
    assert!(running.stop().success());
    fixture.assert_nothing_left();
}

#[test]
fn open_files_are_reopened_when_the_keeper_is_killed_too() {
    let pod = Pod::new();
    for volume in pod.volumes() {
        fs::write(volume.join("f"), "0123456789").expect("written");
        let mut file = File::options().read(true).write(true).open(volume.join("f")).expect("open");
        let reader = File::open(volume.join("f")).expect("open");
        let mut log = File::options().append(true).create(true).open(volume.join("log")).expect("open");
        let inode = fs::metadata(volume.join("f")).expect("attributes").ino();
        for round in 0..3_u8 {
            pod.kill_both(&volume);
            file.write_all(&[b'a' + round]).expect("the file is still open");
            log.write_all(b"line\n").expect("the file is still open");
            let mut byte = [0];
            reader.read_exact_at(&mut byte, u64::from(round)).expect("the file is still open");
            assert_eq!(byte, [b'a' + round]);
            assert!((&reader).write(b"x").is_err(), "the file is open for reading only");
        }
        file.sync_all().expect("synced");
        file.set_len(4).expect("shortened");
        pod.kill_both(&volume);
        // The next server also handles a close of a file that it has not reopened yet, and another open of this file.
        drop(reader);
        assert_eq!(fs::read_to_string(volume.join("f")).expect("read"), "abc3");
        assert_eq!(fs::read_to_string(volume.join("log")).expect("read"), "line\n".repeat(3));
        assert_eq!(fs::metadata(volume.join("f")).expect("attributes").ino(), inode);
    }
}

#[test]
fn an_open_file_that_is_removed_right_after_both_were_killed_can_be_used_on() {
    let pod = Pod::new();
    for volume in pod.volumes() {
        let names = ["removed", "replaced"];
        let open = |name| File::options().read(true).write(true).create(true).truncate(false).open(volume.join(name));
        let mut files = names.map(|name| open(name).expect("made"));
        fs::write(volume.join("other"), "").expect("written");
        pod.running.kill_server_and_keeper(|| {
            fs::remove_file(volume.join("removed")).expect("removed");
            fs::rename(volume.join("other"), volume.join("replaced")).expect("replaced");
        });
        for file in &mut files {
            file.write_all(b"still here").expect("the file is still open");
            file.rewind().expect("rewound");
            assert_eq!(std::io::read_to_string(file).expect("read"), "still here");
        }
    }
}

#[test]
fn only_files_without_a_name_are_lost_with_the_keeper_and_say_so() {
    let pod = Pod::new();
    let [host, limited] = pod.volumes();
    let free_blocks = |volume: &Path| rustix::fs::statvfs(volume).expect("a server answers").f_bavail;
    for volume in [&host, &limited] {
        let before = free_blocks(volume);
        let open = || File::options().read(true).write(true).create_new(true).open(volume.join("f")).expect("made");
        let mut unnamed = File::options();
        let unnamed = unnamed.read(true).write(true).custom_flags(libc::O_TMPFILE).open(volume).expect("made");
        let mut files = [open(), unnamed];
        fs::remove_file(volume.join("f")).expect("removed");
        files.iter_mut().for_each(|file| file.write_all(&[7; 100_000]).expect("written"));
        pod.kill_both(volume);
        for file in &mut files {
            let mut bytes = [0; 4];
            let (read, length) = (file.read_exact_at(&mut bytes, 0), file.metadata().map(|metadata| metadata.len()));
            if volume == &host {
                // The kernel reads and writes the files of this volume itself, and has them open.
                read.expect("the file is still open");
                assert_eq!((bytes, length.expect("attributes")), ([7; 4], 100_000));
                continue;
            }
            let written = file.write(b"more");
            for errno in [read.err(), length.err(), written.err(), file.sync_all().err()] {
                assert_eq!(errno.and_then(|error| error.raw_os_error()), Some(libc::ESTALE));
            }
        }
        if volume == &limited {
            pod.running.wait_log("2 open files without a name went with the server and its keeper");
            eventually("the space of the lost files is free again", || free_blocks(volume) == before);
        }
        drop(files);
        fs::write(volume.join("f"), "1").expect("the volume can still be used");
        fs::remove_file(volume.join("f")).expect("removed");
    }
}

#[test]
fn a_listing_and_a_working_directory_stay_usable_when_the_keeper_is_killed_too() {
    let pod = Pod::new();
    for volume in pod.volumes() {
        let names: Vec<_> = (0..2000).map(|n| format!("entry-{n:04}-{}", "x".repeat(60))).collect();
        let directory = volume.join("many");
        fs::create_dir(&directory).expect("made");
        names.iter().for_each(|name| fs::write(directory.join(name), "").expect("written"));
        let mut listed = Vec::new();
        for (index, entry) in fs::read_dir(&directory).expect("a listing").enumerate() {
            listed.push(entry.expect("an entry").file_name().into_string().expect("text"));
            if index % 500 == 250 {
                pod.kill_both(&volume);
            }
        }
        listed.sort_unstable();
        assert_eq!(listed, names);
        in_thread(&directory, || {
            pod.kill_both(&volume);
            fs::write("f", "1").expect("written");
            assert_eq!(fs::read_to_string("f").expect("read"), "1");
        });
    }
}

#[test]
fn locks_are_taken_again_when_the_keeper_is_killed_too() {
    let pod = Pod::new();
    for volume in pod.volumes() {
        for (lock, wait, unlock) in KINDS {
            let file = volume.join(lock.replace(' ', "-"));
            let (mut owner, mut contender, mut waiter) =
                (Locker::with(&file), Locker::with(&file), Locker::with(&file));
            owner.does(lock);
            waiter.waits_in(wait);
            for _ in 0..3 {
                pod.kill_both(&volume);
                contender.is_refused(lock);
            }
            // A released lock stays released after the kill.
            owner.does(unlock);
            assert_eq!(waiter.answer(), "ok", "{wait} in {}", volume.display());
            pod.kill_both(&volume);
            owner.is_refused(&wait.replace(" wait", ""));
            waiter.dies();
            eventually("the lock of a process that died is free", || contender.ask(lock) == "ok");
            pod.kill_both(&volume);
            owner.is_refused(lock);
        }
    }
}

#[test]
fn parts_of_a_file_are_locked_again_as_they_were() {
    let pod = Pod::new();
    for volume in pod.volumes() {
        let file = volume.join("parts");
        let (mut owner, mut contender) = (Locker::with(&file), Locker::with(&file));
        ["posix exclusive 0 100", "posix none 40 20", "posix shared 80 20"]
            .iter()
            .for_each(|order| owner.does(&format!("lock f {order}")));
        pod.kill_both(&volume);
        for (range, exclusive, shared) in [
            ("0 40", "exclusive 0 40", "exclusive 0 40"),
            ("40 20", "free", "free"),
            ("60 20", "exclusive 60 20", "exclusive 60 20"),
            ("80 20", "shared 80 20", "free"),
        ] {
            assert_eq!(contender.ask(&format!("test f posix exclusive {range}")), exclusive);
            assert_eq!(contender.ask(&format!("test f posix shared {range}")), shared);
        }
    }
}

#[test]
fn the_owner_of_a_lock_that_another_process_got_meanwhile_gets_eio() {
    let pod = Pod::new();
    let source = pod.source.path();
    let volume = pod.running.volume("host");
    for (lock, wait, unlock) in KINDS {
        let name = lock.replace(' ', "-");
        let (mut owner, mut host) = (Locker::with(&volume.join(&name)), Locker::with(&source.join(&name)));
        let mut bystander = Locker::with(&volume.join(&name));
        owner.does(lock);
        // When the kernel closes the open files of the dead server and keeper, it gives the lock to this process of the host at
        // once.
        host.waits_in(wait);
        pod.kill_both(&volume);
        assert_eq!(host.answer(), "ok", "{wait}");
        assert_eq!(owner.ask(lock), "EIO");
        assert_eq!(owner.ask(unlock), "EIO");
        // The next server still returns EIO to the owner.
        pod.kill(&volume);
        assert_eq!(owner.ask(lock), "EIO");
        bystander.is_refused(&wait.replace(" wait", ""));
        host.does(unlock.replace("0 10", "5 10").as_str());
        bystander.does(lock);
        bystander.does(unlock);
        // A new open of the file does not have the error of the earlier open file.
        owner.ask("close f");
        owner.does(&format!("open f {}", volume.join(&name).display()));
        owner.does(lock);
    }
    pod.running.wait_log("lost their locks with the server and its keeper");
}

#[test]
fn file_handles_lead_to_forgotten_files_after_kills() {
    let pod = Pod::new();
    for volume in pod.volumes() {
        fs::create_dir(volume.join("directory")).expect("made");
        fs::write(volume.join("directory/file"), "text").expect("written");
        let [file, directory] = ["directory/file", "directory"].map(|name| FileHandle::of(&volume.join(name)));
        for kill in [Pod::kill, Pod::kill_both, Pod::kill, Pod::kill_both] {
            forget_unused(&volume);
            kill(&pod, &volume);
            let file = file.open(&volume, libc::O_RDONLY).expect("the file");
            assert_eq!(std::io::read_to_string(file).expect("read"), "text");
            directory.open(&volume, libc::O_RDONLY | libc::O_DIRECTORY).expect("the directory");
        }
    }
}

#[test]
fn mounts_below_the_source_are_found_again_when_the_keeper_is_killed_too() {
    find_mounts_below_again();
}

#[test]
fn mounts_below_the_source_are_found_again_on_a_host_that_shares_them() {
    on_a_host_that_shares_mounts(find_mounts_below_again);
}

fn find_mounts_below_again() {
    let source = disk_directory();
    let [disk, file, proc] = ["disk", "file", "proc"].map(|name| source.path().join(name));
    [&disk, &proc].iter().for_each(|at| fs::create_dir(at).expect("made"));
    fs::write(&file, "").expect("written");
    let other_directory = disk_directory();
    fs::write(other_directory.path().join("f"), "elsewhere").expect("written");
    let nothing = None::<&str>;
    mount(Some("tmpfs"), &disk, Some("tmpfs"), MsFlags::empty(), nothing).expect("a tmpfs");
    mount(Some(&other_directory.path().join("f")), &file, nothing, MsFlags::MS_BIND, nothing).expect("a bind mount");
    mount(Some("proc"), &proc, Some("proc"), MsFlags::empty(), nothing).expect("proc");
    let host = format!("{{name: host, hostPath: {{path: {}, type: Directory}}}}", source.path().display());
    let fixture = Fixture::new(&pod(&format!("[{host}]")));
    let mut running = fixture.run();
    let volume = running.volume("host");
    fs::write(volume.join("disk/f"), "below").expect("written");
    let open = ["disk/f", "file"].map(|name| File::open(volume.join(name)).expect("open"));
    let proc_file = File::open(volume.join("proc/version")).expect("open");
    let inodes = || ["disk", "disk/f", "file"].map(|name| fs::metadata(volume.join(name)).expect("attributes").ino());
    let before = inodes();
    for _ in 0..2 {
        running.kill_server_and_keeper(|| rustix::fs::statvfs(&volume).expect("a server answers"));
        for (mut file, content) in open.iter().zip(["below", "elsewhere"]) {
            file.rewind().expect("rewound");
            assert_eq!(std::io::read_to_string(file).expect("read"), content);
            file.metadata().expect("attributes");
        }
        assert_eq!(inodes(), before);
        // proc has no file handles, so the next server cannot reopen open files of it. A container can open them again.
        let errno = proc_file.metadata().expect_err("the open file is lost").raw_os_error();
        assert_eq!(errno, Some(libc::ESTALE));
        assert!(fs::read_to_string(volume.join("proc/version")).expect("read").starts_with("Linux"));
    }
    drop((open, proc_file));
    assert!(running.stop().success());
    [&disk, &file, &proc].iter().for_each(|at| umount2(*at, MntFlags::MNT_DETACH).expect("unmounted"));
    fixture.assert_nothing_left();
}

#[test]
fn open_files_stay_the_right_ones_when_the_keeper_answers_late() {
    // More than the keeper hands over with one message.
    const FILES: usize = 498;
    let pod = Pod::new();
    let limited = pod.running.volume("limited");
    let content = |number: usize| format!("{number:06}");
    let files: Vec<_> = (0..FILES)
        .map(|number| {
            let path = limited.join(number.to_string());
            fs::write(&path, content(number)).expect("written");
            File::open(&path).expect("a file")
        })
        .collect();
    // A file without a name is lost with the keeper.
    let mut nameless = File::create_new(limited.join("nameless")).expect("a file");
    fs::remove_file(limited.join("nameless")).expect("removed");
    let (keeper, server) = (pod.running.keepers()[0], pod.running.server());
    kill(keeper, Signal::SIGSTOP).expect("stopped");
    kill(server, Signal::SIGKILL).expect("killed");
    // The supervisor gives the first successor up, which has asked the keeper.
    pod.running.wait_log("podfs cannot start a server for the volumes: the keeper of the last server does not answer");
    kill(keeper, Signal::SIGCONT).expect("it continues");
    for (number, file) in files.iter().enumerate() {
        let mut read = [0; 6];
        file.read_exact_at(&mut read, 0).expect("read");
        assert_eq!(String::from_utf8_lossy(&read), content(number), "{}", pod.running.log());
    }
    nameless.write_all(b"1").expect("the keeper has kept it");
}
