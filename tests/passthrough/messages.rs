//! Requests that the kernel does not send, because it has the answer in its caches or handles a lock itself. The tests count
//! the requests by operation.

use std::fs::{self, File};
use std::io::{self, IsTerminal, Write};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::thread;
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, RenameFlags, linkat, mknodat, openat, renameat_with};

use crate::common::eventually;
use crate::common::locker::Locker;
use crate::common::passthrough::Mounted;
use crate::common::undisturbed::undisturbed;

#[test]
fn isatty_is_one_message_each_time() {
    // open(3) of Python before 3.14 calls it.
    for mounted in [Mounted::new(), Mounted::alone(), Mounted::with_limit(1 << 30)] {
        fs::write(mounted.path().join("file"), "x").expect("written");
        let file = File::open(mounted.path().join("file")).expect("a file");
        let requests = mounted.requests_during(|| {
            for _ in 0..10 {
                assert!(!file.is_terminal());
                assert_eq!(io::Error::last_os_error().raw_os_error(), Some(libc::ENOTTY));
            }
        });
        assert_eq!(requests.get("IOCTL"), Some(&10), "{requests:?}");
    }
}

#[test]
fn an_absent_name_is_looked_up_once_in_a_private_empty_dir() {
    let mounted = Mounted::alone();
    let absent = mounted.path().join("absent");
    undisturbed(|| {
        assert!(!absent.exists());
        let requests = mounted.requests_during(|| (0..100).for_each(|_| assert!(!absent.exists())));
        if requests.contains_key("LOOKUP") { Err(format!("{requests:?}")) } else { Ok(()) }
    });
}

#[test]
fn an_absent_name_is_looked_up_each_time_if_the_source_may_change() {
    let mounted = Mounted::new();
    let absent = mounted.path().join("absent");
    let requests = mounted.requests_during(|| (0..100).for_each(|_| assert!(!absent.exists())));
    assert_eq!(requests.get("LOOKUP"), Some(&100), "{requests:?}");
    fs::write(mounted.source().join("absent"), "").expect("written");
    assert!(absent.exists(), "the new file is visible at once");
}

#[test]
fn a_new_file_is_visible_although_its_absence_was_cached() {
    let mounted = Mounted::alone();
    let root = mounted.path();
    let other = root.join("other");
    type Creation<'a> = (&'a str, &'a dyn Fn(&Path));
    let creations: [Creation<'_>; 8] = [
        ("create", &|new| drop(File::create_new(new).expect("created"))),
        ("mkdir", &|new| fs::create_dir(new).expect("created")),
        ("symlink", &|new| symlink("file", new).expect("a link")),
        ("mknod", &|new| mknodat(CWD, new, FileType::Fifo, Mode::RUSR, 0).expect("created")),
        ("link", &|new| fs::hard_link(&other, new).expect("linked")),
        ("rename", &|new| {
            fs::rename(&other, new).expect("renamed");
            assert!(!other.exists(), "the old name");
        }),
        ("exchange", &|new| {
            File::create_new(new).expect("created");
            renameat_with(CWD, &other, CWD, new, RenameFlags::EXCHANGE).expect("exchanged");
        }),
        ("tmpfile", &|new| {
            let nameless = openat(CWD, root, OFlags::TMPFILE | OFlags::RDWR, Mode::RUSR).expect("a file");
            linkat(&nameless, c"", CWD, new, AtFlags::EMPTY_PATH).expect("linked");
        }),
    ];
    for (name, create) in creations {
        for round in 0..3 {
            let new = root.join(name);
            File::create(&other).expect("created");
            (0..2).for_each(|_| assert!(!new.exists(), "{name} {round}"));
            create(&new);
            let metadata = fs::symlink_metadata(&new).unwrap_or_else(|error| panic!("{name} {round}: {error}"));
            assert!(fs::read_dir(root).expect("a listing").flatten().any(|entry| entry.file_name() == name), "{name}");
            if metadata.is_dir() { fs::remove_dir(&new) } else { fs::remove_file(&new) }.expect("removed");
            assert!(fs::symlink_metadata(&new).is_err(), "{name} {round}");
        }
    }
}

/// The orders that take and release each kind of lock.
const LOCKS: [(&str, &str); 3] = [
    ("lock f flock exclusive", "lock f flock none"),
    ("lock f posix exclusive 0 10", "lock f posix none 0 10"),
    ("lock f ofd exclusive 0 10", "lock f ofd none 0 10"),
];

#[test]
fn the_kernel_keeps_locks_by_itself_where_nothing_else_uses_the_source() {
    let mounted = Mounted::alone();
    let file = mounted.path().join("file");
    let requests = mounted.requests_during(|| {
        for (lock, unlock) in LOCKS {
            let (mut owner, mut other) = (Locker::with(&file), Locker::with(&file));
            owner.does(lock);
            other.is_refused(lock);
            other.waits_in(&format!("{lock} wait"));
            owner.does(unlock);
            assert_eq!(other.answer(), "ok", "{lock}");
            owner.is_refused(lock);
            // The lock of a process ends with it.
            other.dies();
            owner.does(lock);
        }
        // A POSIX lock ends when its process closes any descriptor of the file, also a read-only one.
        let (mut owner, mut other) = (Locker::with(&file), Locker::with(&file));
        owner.does("lock f posix exclusive 0 10");
        owner.does(&format!("open reader {} read", file.display()));
        other.is_refused("lock f posix exclusive 0 10");
        owner.does("close reader");
        other.does("lock f posix exclusive 0 10");
    });
    let lock_requests: Vec<_> = ["SETLK", "SETLKW", "GETLK", "FLUSH"]
        .into_iter()
        .filter(|operation| requests.contains_key(operation))
        .collect();
    assert!(lock_requests.is_empty(), "{requests:?}");
}

#[test]
fn a_close_is_a_message_only_where_it_may_end_a_lock_that_the_server_has_taken() {
    for (mounted, flushes) in [(Mounted::alone(), false), (Mounted::new(), true)] {
        let requests = mounted.requests_during(|| {
            for number in 0..10 {
                let mut file = File::create_new(mounted.path().join(number.to_string())).expect("created");
                file.write_all(b"content").expect("written");
            }
        });
        assert_eq!(requests.get("CREATE"), Some(&10), "{requests:?}");
        assert_eq!(requests.contains_key("FLUSH"), flushes, "{requests:?}");
    }
}

#[test]
fn directories_of_a_private_empty_dir_are_opened_synced_and_listed_again_with_few_messages() {
    let mounted = Mounted::alone();
    let directory = mounted.path().join("directory");
    fs::create_dir(&directory).expect("a directory");
    (0..10).for_each(|number| fs::write(directory.join(number.to_string()), "").expect("written"));
    let list = || assert_eq!(fs::read_dir(&directory).expect("a listing").count(), 10);
    // After the first OPENDIR, the kernel sends no more.
    list();
    undisturbed(|| {
        list();
        let requests = mounted.requests_during(|| (0..100).for_each(|_| list()));
        if requests.is_empty() { Ok(()) } else { Err(format!("{requests:?}")) }
    });
    let requests = mounted.requests_during(|| {
        (0..10).for_each(|_| File::open(&directory).and_then(|opened| opened.sync_all()).expect("synced"));
    });
    assert_eq!(requests.into_iter().collect::<Vec<_>>(), [("FSYNCDIR", 10)]);
}

#[test]
fn listings_of_a_host_path_that_does_not_change_are_read_once() {
    let mounted = Mounted::new();
    let directory = mounted.path().join("directory");
    fs::create_dir(&directory).expect("a directory");
    (0..10).for_each(|number| fs::write(directory.join(number.to_string()), "").expect("written"));
    // The server lets the kernel cache a listing only some time after the last change: a directory that has just changed could
    // change again with the same mtime.
    thread::sleep(Duration::from_millis(200));
    let list = || assert_eq!(fs::read_dir(&directory).expect("a listing").count(), 10);
    undisturbed(|| {
        list();
        let requests = mounted.requests_during(|| (0..100).for_each(|_| list()));
        if requests.contains_key("READDIR") || requests.contains_key("READDIRPLUS") {
            return Err(format!("{requests:?}"));
        }
        assert_eq!(requests.get("OPENDIR"), Some(&100), "{requests:?}");
        Ok(())
    });
}

#[test]
fn attributes_come_with_the_names_of_a_host_path_again_after_their_names_were_cached() {
    let mounted = Mounted::new();
    (0..100).for_each(|number| fs::write(mounted.path().join(number.to_string()), "").expect("written"));
    fs::create_dir(mounted.path().join("directory")).expect("a directory");
    thread::sleep(Duration::from_millis(200));
    let look = || {
        let listed = fs::read_dir(mounted.path()).expect("a listing");
        assert_eq!(listed.filter(|entry| entry.as_ref().is_ok_and(|entry| entry.metadata().is_ok())).count(), 101);
    };
    (0..3).for_each(|_| assert_eq!(fs::read_dir(mounted.path()).expect("a listing").count(), 101));
    for _ in 0..2 {
        thread::sleep(Duration::from_millis(1100));
        look();
    }
    thread::sleep(Duration::from_millis(1100));
    let requests = mounted.requests_during(look);
    assert!(requests.get("LOOKUP").is_none_or(|lookups| *lookups < 20), "{requests:?}");
}

#[test]
fn a_listing_of_a_host_path_shows_each_change_of_the_host_to_the_next_caller_at_once() {
    let mounted = Mounted::new();
    let names = || {
        let listed = fs::read_dir(mounted.path()).expect("a listing");
        let mut names: Vec<_> = listed.map(|entry| entry.expect("an entry").file_name()).collect();
        names.sort_unstable();
        names
    };
    for round in 0..60 {
        // In some rounds, a change follows a listing at once; in the others, the kernel has cached the listing before.
        let pause = || {
            if round % 3 == 0 {
                thread::sleep(Duration::from_millis(120))
            }
        };
        let (one, two) = (format!("a{round}"), format!("b{round}"));
        fs::write(mounted.source().join(&one), "").expect("written");
        pause();
        (0..2).for_each(|_| assert_eq!(names(), [&*one], "{round}"));
        fs::rename(mounted.source().join(&one), mounted.source().join(&two)).expect("renamed");
        pause();
        (0..2).for_each(|_| assert_eq!(names(), [&*two], "{round}"));
        fs::remove_file(mounted.source().join(&two)).expect("removed");
        pause();
        (0..2).for_each(|_| assert!(names().is_empty(), "{round}"));
    }
}

#[test]
fn a_caller_that_keeps_a_directory_of_a_host_path_open_sees_changes_of_the_host_within_a_second() {
    let mounted = Mounted::new();
    fs::write(mounted.source().join("first"), "").expect("written");
    thread::sleep(Duration::from_millis(200));
    assert_eq!(fs::read_dir(mounted.path()).expect("a listing").count(), 1);
    // Each listing uses the same open directory, from its beginning.
    let mut open = Dir::read_from(File::open(mounted.path()).expect("a directory")).expect("a directory");
    let mut names = || {
        open.rewind();
        let names = open.by_ref().map(|entry| entry.expect("an entry").file_name().to_owned());
        names.filter(|name| !name.to_bytes().starts_with(b".")).count()
    };
    for count in 2..5 {
        thread::sleep(Duration::from_millis(200));
        fs::write(mounted.source().join(count.to_string()), "").expect("written");
        eventually("the change is visible", || names() == count);
    }
}

#[test]
fn a_listing_of_a_private_empty_dir_shows_each_change_at_once() {
    let mounted = Mounted::alone();
    let names = || {
        let listed = fs::read_dir(mounted.path()).expect("a listing");
        let mut names: Vec<_> = listed.map(|entry| entry.expect("an entry").file_name()).collect();
        names.sort_unstable();
        names
    };
    for round in 0..200 {
        let (one, two) = (format!("a{round}"), format!("b{round}"));
        fs::write(mounted.path().join(&one), "").expect("written");
        assert_eq!(names(), [&*one], "{round}");
        fs::rename(mounted.path().join(&one), mounted.path().join(&two)).expect("renamed");
        assert_eq!(names(), [&*two], "{round}");
        fs::remove_file(mounted.path().join(&two)).expect("removed");
        assert!(names().is_empty(), "{round}");
    }
}
