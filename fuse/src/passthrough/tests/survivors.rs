//! State that survives a kill of an idle server.

use std::fs::{self, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::sync::atomic::Ordering::Relaxed;

use rustix::fs::OFlags;

use super::handle::FileHandle;
use super::*;

fn both() -> [Rig; 2] {
    [Rig::unlimited(), Rig::limited(64 << 20)]
}

#[test]
fn open_files_stay_usable() {
    for rig in both() {
        let mut file = OpenOptions::new().read(true).write(true).create_new(true).open(rig.at("file")).expect("a file");
        let mut log = OpenOptions::new().append(true).create(true).open(rig.at("log")).expect("a file");
        let mut gone = OpenOptions::new().read(true).write(true).create_new(true).open(rig.at("gone")).expect("a file");
        let number = fs::metadata(rig.at("file")).expect("attributes").ino();
        fs::remove_file(rig.at("gone")).expect("removed");
        for round in 0..3_u8 {
            file.write_all(&[b'a' + round]).expect("written");
            gone.write_all(&[b'x' + round]).expect("written");
            log.write_all(b"line\n").expect("written");
            rig.kill_and_succeed();
        }
        file.seek(SeekFrom::Start(0)).expect("the beginning");
        let mut text = String::new();
        file.read_to_string(&mut text).expect("read");
        assert_eq!(text, "abc");
        let mut bytes = [0; 3];
        gone.read_exact_at(&mut bytes, 0).expect("read");
        assert_eq!(&bytes, b"xyz");
        assert_eq!(fs::read_to_string(rig.source.join("log")).expect("read"), "line\n".repeat(3));
        assert_eq!(fs::metadata(rig.at("file")).expect("attributes").ino(), number);
        assert_eq!(file.metadata().expect("attributes").len(), 3);
        drop((file, gone, log));
        // The successor knows the handles that the kernel releases here.
        fs::write(rig.at("file"), "new").expect("written");
        assert_eq!(fs::read_to_string(rig.source.join("file")).expect("read"), "new");
    }
}

#[test]
fn memory_of_forgotten_files_is_freed_also_by_successors() {
    const FILES: usize = 40_000;
    let rig = Rig::unlimited();
    let names = || (0..FILES).map(|n| format!("file-{n}"));
    names().for_each(|name| drop(File::create(rig.source.join(name)).expect("a file")));
    let look = || assert!(names().all(|name| fs::metadata(rig.at(&name)).is_ok()));
    let memory = || rustix::fs::fstat(rig.region.as_fd()).expect("attributes").st_blocks as usize * 512;
    look();
    let full = memory();
    assert!(full > FILES * 128, "{full} bytes");
    let mut open = OpenOptions::new().read(true).write(true).open(rig.at("file-5000")).expect("a file");
    let number = open.metadata().expect("attributes").ino();
    for _ in 0..2 {
        let deadline = std::time::Instant::now() + TIMEOUT;
        while {
            // The kernel keeps names that are in use at this moment.
            rig.forget_unused();
            memory() > full / 2
        } {
            assert!(std::time::Instant::now() < deadline, "{} of {full} bytes are left", memory());
            std::thread::sleep(Duration::from_millis(10));
        }
        open.write_all(b"x").expect("written");
        rig.kill_and_succeed();
        assert!(memory() < full * 2 / 3, "the successor leaves holes alone: {} of {full} bytes", memory());
        assert_eq!(fs::metadata(rig.at("file-5000")).expect("attributes").ino(), number);
        open.write_all(b"y").expect("written");
        look();
        assert!(memory() < full * 5 / 4, "holes are used: {} of {full} bytes", memory());
        rig.kill_and_succeed();
        look();
    }
    assert_eq!(fs::read_to_string(rig.source.join("file-5000")).expect("read"), "xyxy");
}

#[test]
fn file_handles_of_callers_lead_to_forgotten_files_also_in_successors() {
    const LOOKUP: u32 = 1;
    for rig in both() {
        fs::create_dir_all(rig.at("above/below")).expect("directories");
        fs::write(rig.at("above/below/file"), "text").expect("written");
        let handle = |name| FileHandle::of(File::open(rig.at(name)).expect("open").as_fd()).expect("a handle").0;
        let (file, directory) = (handle("above/below/file"), handle("above/below"));
        let lookups =
            || rig.region.counts().requests().find(|(opcode, _)| *opcode == LOOKUP).map_or(0, |(_, count)| count);
        // Opens a file by its handle. Returns whether the kernel had forgotten the file, so that it sent a LOOKUP.
        let root = File::open(rig.at("")).expect("the root");
        let open_anew = |handle: &FileHandle, flags| {
            let before = lookups();
            let opened = handle.open(root.as_fd(), flags).map(File::from).expect("opened");
            (opened, lookups() > before)
        };
        let mut found = (false, false);
        let deadline = std::time::Instant::now() + TIMEOUT;
        while found != (true, true) {
            assert!(std::time::Instant::now() < deadline, "the kernel forgets: {found:?}");
            rig.forget_unused();
            rig.kill_and_succeed();
            let (opened, asked) = open_anew(&file, OFlags::RDONLY);
            found.0 |= asked;
            assert_eq!(io::read_to_string(&opened).expect("read"), "text");
            drop(opened);
            let (opened, asked) = open_anew(&directory, OFlags::RDONLY | OFlags::DIRECTORY);
            found.1 |= asked;
            let within = fs::read_dir(format!("/proc/self/fd/{}", opened.as_raw_fd())).expect("a listing");
            let names: Vec<_> = within.map(|entry| entry.expect("an entry").file_name()).collect();
            assert_eq!(names, ["file"]);
        }
    }
}

#[test]
fn a_directory_listing_continues_where_it_was() {
    let private = PassthroughOptions { exclusive: true, cache: CacheMode::Always, ..PassthroughOptions::default() };
    // In a private volume, the kernel reads directories without OPENDIR.
    for rig in [Rig::unlimited(), Rig::new(private)] {
        let names = || (0..2000).map(|n| format!("a-rather-long-name-of-a-file-{n}"));
        fs::create_dir(rig.source.join("many")).expect("a directory");
        names().for_each(|name| drop(File::create(rig.source.join("many").join(name)).expect("a file")));
        let mut listing = fs::read_dir(rig.at("many")).expect("a directory");
        let mut found = Vec::new();
        for round in 0..4 {
            let some = listing.by_ref().take(if round == 3 { 2000 } else { 300 });
            found.extend(some.map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8")));
            rig.kill_and_succeed();
        }
        found.sort_unstable();
        let mut wanted: Vec<_> = names().collect();
        wanted.sort_unstable();
        assert_eq!(found, wanted);
    }
}

#[test]
fn owners_keep_their_locks() {
    use nix::fcntl::{Flock, FlockArg};
    for rig in both() {
        fs::write(rig.source.join("file"), "").expect("written");
        let open = || OpenOptions::new().read(true).write(true).open(rig.at("file")).expect("a file");
        let (ours, theirs) = (open(), open());
        let ours = Flock::lock(ours, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| errno).expect("locked");
        rig.kill_and_succeed();
        rig.kill_and_succeed();
        let (theirs, refused) = Flock::lock(theirs, FlockArg::LockExclusiveNonblock).expect_err("it is locked");
        assert_eq!(refused, nix::errno::Errno::EAGAIN);
        drop(ours);
        Flock::lock(theirs, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| errno).expect("it is free");
    }
}

#[test]
fn a_wait_for_a_lock_continues_and_ends_with_the_lock() {
    use nix::fcntl::{Flock, FlockArg};
    let rig = Rig::unlimited();
    fs::write(rig.source.join("file"), "").expect("written");
    let open = || OpenOptions::new().read(true).write(true).open(rig.at("file")).expect("a file");
    let (ours, theirs) = (open(), open());
    let ours = Flock::lock(ours, FlockArg::LockExclusive).map_err(|(_, errno)| errno).expect("locked");
    let waiter = std::thread::spawn(move || Flock::lock(theirs, FlockArg::LockExclusive).map(drop).map_err(|_| ()));
    // When the region has the wait, the caller waits.
    while rig.region.waits().all().next().is_none() {
        std::thread::yield_now();
    }
    rig.kill_and_succeed();
    assert!(!waiter.is_finished());
    drop(ours);
    waiter.join().expect("no panic").expect("locked");
}

/// Tries to lock `file`, which another owner than that of the process's `fcntl` locks.
fn lock_apart(file: &File, kind: libc::c_int) -> nix::Result<()> {
    use nix::fcntl::{FcntlArg, fcntl};
    // SAFETY: zeroes are a lock on the whole file.
    let lock = libc::flock { l_type: kind as libc::c_short, ..unsafe { std::mem::zeroed() } };
    fcntl(file, FcntlArg::F_OFD_SETLK(&lock)).map(drop)
}

#[test]
fn a_thread_keeps_the_lock_for_which_it_waited_while_its_process_closed_the_file_elsewhere() {
    use nix::fcntl::{FcntlArg, fcntl};
    for takeover in [false, true] {
        let rig = Rig::unlimited();
        fs::write(rig.source.join("file"), "").expect("written");
        let open = || OpenOptions::new().read(true).write(true).open(rig.at("file")).expect("a file");
        let (theirs, ours, elsewhere) = (open(), open(), open());
        lock_apart(&theirs, libc::F_WRLCK).expect("it is free");
        let waiter = std::thread::spawn(move || {
            // SAFETY: as above.
            let lock = libc::flock { l_type: libc::F_WRLCK as libc::c_short, ..unsafe { std::mem::zeroed() } };
            fcntl(&ours, FcntlArg::F_SETLKW(&lock)).map(|_| ours)
        });
        while rig.region.waits().all().next().is_none() {
            std::thread::yield_now();
        }
        drop(elsewhere);
        if takeover {
            rig.kill_and_succeed();
        }
        lock_apart(&theirs, libc::F_UNLCK).expect("unlocked");
        let ours = waiter.join().expect("no panic").expect("locked");
        assert_eq!(lock_apart(&theirs, libc::F_WRLCK), Err(nix::errno::Errno::EAGAIN), "takeover: {takeover}");
        if takeover {
            rig.kill_and_succeed();
            assert_eq!(lock_apart(&theirs, libc::F_WRLCK), Err(nix::errno::Errno::EAGAIN), "its successor has it, too");
        }
        // The process closes a descriptor of the file. The keeper of a dead server holds the lock a moment longer.
        drop(open());
        while lock_apart(&theirs, libc::F_WRLCK).is_err() {
            assert!(takeover, "the lock is given up");
            std::thread::yield_now();
        }
        drop(ours);
    }
}

#[test]
fn a_removed_special_file_stays_for_processes_that_have_it_open() {
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    let rig = Rig::unlimited();
    for replaced in [false, true] {
        let made = rig.at("fifo");
        mknodat(CWD, &made, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a FIFO");
        let inside = OpenOptions::new().read(true).write(true).open(&made).expect("it is open on both ends");
        if replaced {
            fs::write(rig.at("other"), "").expect("written");
            fs::rename(rig.at("other"), &made).expect("renamed");
        } else {
            fs::remove_file(&made).expect("removed");
        }
        assert_eq!(inside.metadata().expect("attributes").nlink(), 0);
        rig.kill_and_succeed();
        assert_eq!(inside.metadata().expect("attributes").nlink(), 0);
        inside.set_permissions(fs::Permissions::from_mode(0o640)).expect("a mode");
        assert_eq!(inside.metadata().expect("attributes").mode() & 0o777, 0o640);
        if replaced {
            fs::remove_file(&made).expect("removed");
        }
    }
}

#[test]
fn a_directory_that_a_rename_replaces_stays_for_processes_inside_it() {
    let rig = Rig::unlimited();
    for name in ["old", "new"] {
        fs::create_dir(rig.at(name)).expect("a directory");
    }
    // As a working directory: the server does not open it.
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let inside = File::from(rustix::fs::open(rig.at("new"), flags, rustix::fs::Mode::empty()).expect("a directory"));
    fs::rename(rig.at("old"), rig.at("new")).expect("renamed");
    // The server keeps the last directories open, but not for a successor.
    rig.kill_and_succeed();
    assert_eq!(inside.metadata().expect("attributes").nlink(), 0);
}

#[test]
fn a_removed_directory_stays_for_processes_inside_it() {
    let rig = Rig::unlimited();
    fs::create_dir(rig.at("directory")).expect("a directory");
    let inside = File::open(rig.at("directory")).expect("a directory");
    fs::remove_dir(rig.at("directory")).expect("removed");
    rig.kill_and_succeed();
    assert_eq!(inside.metadata().expect("attributes").nlink(), 0);
    let within = format!("/proc/self/fd/{}/name", inside.as_raw_fd());
    assert_eq!(File::create(within).expect_err("no files any more").raw_os_error(), Some(libc::ENOENT));
}

#[test]
fn blocks_of_the_root_that_are_free_of_charge_stay_so() {
    let rig = Rig::limited(1 << 20);
    let used = || rig.region.header().counters.used.load(Relaxed);
    let create = |number: usize| drop(File::create(rig.at(&format!("{number:0200}"))).expect("room"));
    (0..200).for_each(create);
    assert!(used() > 0, "the root has grown");
    // As after a request that found no room, when most names of the root were gone.
    rig.region.header().root_free.store(1 << 19, Relaxed);
    create(200);
    assert_eq!(used(), 0);
    rig.kill_and_succeed();
    create(201);
    assert_eq!(used(), 0);
}

#[test]
fn the_space_of_a_limited_volume_is_known_without_a_walk() {
    let rig = Rig::limited(1 << 20);
    fs::write(rig.at("file"), vec![0; 600 << 10]).expect("there is room");
    let used = rig.region.header().counters.used.load(std::sync::atomic::Ordering::Relaxed);
    rig.kill_and_succeed();
    assert_eq!(rig.region.header().counters.used.load(std::sync::atomic::Ordering::Relaxed), used);
    let refused = fs::write(rig.at("more"), vec![0; 600 << 10]).expect_err("there is no room");
    assert_eq!(refused.raw_os_error(), Some(libc::ENOSPC));
    fs::remove_file(rig.at("file")).expect("removed");
    fs::write(rig.at("more"), vec![0; 600 << 10]).expect("there is room again");
}

#[test]
fn backing_files_are_closed_once() {
    let rig = Rig::unlimited();
    fs::write(rig.source.join("file"), "text").expect("written");
    for _ in 0..3 {
        let first = File::open(rig.at("file")).expect("a file");
        rig.kill_and_succeed();
        let second = File::open(rig.at("file")).expect("the same way as the first");
        drop(first);
        rig.kill_and_succeed();
        let mut bytes = [0; 4];
        second.read_exact_at(&mut bytes, 0).expect("read");
        assert_eq!(&bytes, b"text");
    }
}
