//! Locks: flock, POSIX and OFD locks through one mount conflict with locks through another mount of the same directory, and
//! with locks of the host (HP-10).

use std::fs;
use std::path::{Path, PathBuf};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::common::locker::Locker;
use crate::common::passthrough::{Mounted, within_timeout};

const PLACES: [&str; 3] = ["the first mount", "the second mount", "the host"];

const ALL: &[&str] = &["flock", "posix", "ofd"];

/// Two mounts of one directory, which has a file. The directory itself is the third place.
struct Places {
    first: Mounted,
    second: Mounted,
}

impl Places {
    fn new() -> Self {
        let first = Mounted::new();
        let second = first.second();
        fs::write(first.source().join("file"), [0; 100]).expect("written");
        Self { first, second }
    }

    fn directories(&self) -> [&Path; 3] {
        [self.first.path(), self.second.path(), self.first.source()]
    }

    /// The path of the file in each place.
    fn files(&self) -> [PathBuf; 3] {
        self.directories().map(|place| place.join("file"))
    }

    /// A process that can hold a lock and a process that can conflict with it, for each pair of places, also with both
    /// processes in the same place.
    fn pairs(&self) -> impl Iterator<Item = (Locker, Locker, String)> {
        let files = self.files();
        let indexes = (0..3).flat_map(|one| (0..3).map(move |other| (one, other)));
        indexes.map(move |(one, other)| {
            let pair = format!("{} and {}", PLACES[one], PLACES[other]);
            (Locker::with(&files[one]), Locker::with(&files[other]), pair)
        })
    }
}

/// Runs a scenario for each kind of lock and each pair of places, each time with a new file.
#[track_caller]
fn in_all_places(kinds: &[&str], scenario: impl Fn(&str, &mut Locker, &mut Locker)) {
    let places = Places::new();
    let (mut holders, mut others) = (PLACES.map(|_| Locker::new()), PLACES.map(|_| Locker::new()));
    for kind in kinds {
        for (one, holder) in holders.iter_mut().enumerate() {
            for (two, other) in others.iter_mut().enumerate() {
                println!("{kind}: {} and {}", PLACES[one], PLACES[two]);
                let name = format!("{}-{one}-{two}", kind.replace(' ', "-"));
                fs::write(places.first.source().join(&name), [0; 100]).expect("written");
                holder.does(&format!("open f {}", places.directories()[one].join(&name).display()));
                other.does(&format!("open f {}", places.directories()[two].join(&name).display()));
                scenario(kind, holder, other);
                holder.does("reset");
                other.does("reset");
            }
        }
    }
}

#[test]
fn whole_files_are_locked_everywhere_at_once() {
    in_all_places(ALL, |kind, holder, other| {
        holder.does(&format!("lock f {kind} exclusive"));
        other.is_refused(&format!("lock f {kind} exclusive"));
        other.is_refused(&format!("lock f {kind} shared"));
        holder.does(&format!("lock f {kind} shared"));
        other.does(&format!("lock f {kind} shared"));
        holder.is_refused(&format!("lock f {kind} exclusive"));
        holder.does(&format!("lock f {kind} none"));
        other.does(&format!("lock f {kind} exclusive"));
        holder.is_refused(&format!("lock f {kind} shared"));
    });
}

#[test]
fn posix_and_ofd_locks_meet_each_other() {
    in_all_places(&["posix and ofd"], |_, holder, other| {
        holder.does("lock f posix exclusive 0 10");
        other.is_refused("lock f ofd exclusive 5 1");
        other.does("lock f ofd exclusive 10 5");
        holder.is_refused("lock f posix shared 0 20");
        other.does("lock f ofd none 10 5");
        holder.does("lock f posix shared 0 20");
    });
}

#[test]
fn ranges_are_locked_byte_by_byte() {
    in_all_places(&["posix", "ofd"], |kind, holder, other| {
        holder.does(&format!("lock f {kind} exclusive 10 10"));
        other.does(&format!("lock f {kind} exclusive 0 10"));
        other.does(&format!("lock f {kind} exclusive 20 0"));
        other.is_refused(&format!("lock f {kind} shared 19 2"));
        // A hole in the middle of a lock.
        holder.does(&format!("lock f {kind} none 14 2"));
        other.does(&format!("lock f {kind} shared 14 2"));
        other.is_refused(&format!("lock f {kind} shared 13 1"));
        other.is_refused(&format!("lock f {kind} shared 16 1"));
        // The owner may change the lock from exclusive to shared, and back only if no other lock conflicts.
        holder.does(&format!("lock f {kind} shared 10 4"));
        other.does(&format!("lock f {kind} shared 12 1"));
        holder.is_refused(&format!("lock f {kind} exclusive 10 4"));
        // Locks may be beyond the end of the file, and length 0 means to any future end.
        holder.is_refused(&format!("lock f {kind} exclusive 5000000000 1"));
        other.does(&format!("lock f {kind} none 20 0"));
        holder.does(&format!("lock f {kind} exclusive 5000000000 1"));
        other.is_refused(&format!("lock f {kind} shared 20 0"));
    });
}

#[test]
fn getlk_returns_the_conflicting_lock() {
    in_all_places(&["posix", "ofd"], |kind, holder, other| {
        assert_eq!(other.ask(&format!("test f {kind} exclusive 0 0")), "free");
        holder.does(&format!("lock f {kind} exclusive 10 5"));
        holder.does(&format!("lock f {kind} shared 40 2"));
        assert_eq!(other.ask(&format!("test f {kind} shared 0 30")), "exclusive 10 5");
        assert_eq!(other.ask(&format!("test f {kind} exclusive 30 0")), "shared 40 2");
        assert_eq!(other.ask(&format!("test f {kind} shared 30 0")), "free");
        assert_eq!(other.ask(&format!("test f {kind} exclusive 15 25")), "free");
        // A process does not conflict with itself.
        assert_eq!(holder.ask(&format!("test f {kind} exclusive 0 0")), "free");
    });
}

#[test]
fn a_lock_needs_the_right_to_do_what_it_protects() {
    let places = Places::new();
    for file in places.files() {
        let mut locker = Locker::new();
        locker.does(&format!("open f {} read", file.display()));
        assert_eq!(locker.ask("lock f posix exclusive 0 1"), "EBADF");
        locker.does("lock f posix shared 0 1");
        assert_eq!(locker.ask("lock f ofd exclusive 0 1"), "EBADF");
        locker.does("lock f flock exclusive");
        assert_eq!(locker.ask("lock f posix shared -1 1"), "EINVAL");
    }
}

#[test]
fn a_waiting_lock_is_had_when_the_other_one_goes() {
    in_all_places(ALL, |kind, holder, other| {
        holder.does(&format!("lock f {kind} exclusive"));
        other.waits_in(&format!("lock f {kind} exclusive wait"));
        holder.does(&format!("lock f {kind} none"));
        assert_eq!(other.answer(), "ok");
        holder.is_refused(&format!("lock f {kind} shared"));
        holder.waits_in(&format!("lock f {kind} shared wait"));
        other.does("close f");
        assert_eq!(holder.answer(), "ok");
    });
}

/// Makes operations that need answers of the server.
fn use_the_mount(root: &Path) {
    let directory = root.join("new");
    fs::create_dir(&directory).expect("a directory");
    fs::write(directory.join("file"), "content").expect("written");
    assert_eq!(fs::read_to_string(directory.join("file")).expect("a file"), "content");
    assert_eq!(fs::read_dir(&directory).expect("a listing").count(), 1);
    fs::remove_dir_all(&directory).expect("removed");
}

#[test]
fn many_waiting_locks_delay_no_other_request() {
    for kind in ALL {
        let places = Places::new();
        let [file, _, source] = places.files();
        let mut host = Locker::with(&source);
        host.does(&format!("lock f {kind} exclusive"));
        let mut waiting: Vec<_> = (0..16).map(|_| Locker::with(&file)).collect();
        for locker in &mut waiting {
            locker.waits_in(&format!("lock f {kind} shared wait"));
        }
        let root = places.first.path().to_owned();
        within_timeout("use of a mount in which locks wait", move || use_the_mount(&root));
        // The server also answers a request for another lock of the same file.
        let mut other = Locker::with(&file);
        if *kind != "flock" {
            other.is_refused(&format!("lock f {kind} shared 0 1"));
        }
        host.does(&format!("lock f {kind} none"));
        for locker in &mut waiting {
            assert_eq!(locker.answer(), "ok");
        }
    }
}

#[test]
fn a_signal_interrupts_a_waiting_lock() {
    in_all_places(ALL, |kind, holder, other| {
        holder.does(&format!("lock f {kind} exclusive"));
        other.waits_in(&format!("lock f {kind} exclusive wait"));
        other.signal(Signal::SIGUSR1);
        assert_eq!(other.answer(), "EINTR");
        // The interrupted process does not get the lock later.
        holder.does(&format!("lock f {kind} none"));
        holder.does(&format!("lock f {kind} exclusive"));
        // The lock can be requested again.
        other.waits_in(&format!("lock f {kind} shared wait"));
        holder.does(&format!("lock f {kind} none"));
        assert_eq!(other.answer(), "ok");
    });
}

#[test]
fn a_killed_process_does_not_wait_any_more_and_has_nothing() {
    for kind in ALL {
        let places = Places::new();
        for (mut holder, mut other, pair) in places.pairs() {
            println!("{kind}: {pair}");
            holder.does(&format!("lock f {kind} exclusive"));
            other.waits_in(&format!("lock f {kind} exclusive wait"));
            other.dies();
            holder.does(&format!("lock f {kind} none"));
            // The killed process has not got the lock. `wait` allows for the moment in which the kernel still cleans up that
            // process.
            holder.does(&format!("lock f {kind} exclusive wait"));
        }
    }
}

#[test]
fn locks_go_with_their_process() {
    for kind in ALL {
        let places = Places::new();
        for (mut holder, mut other, pair) in places.pairs() {
            println!("{kind}: {pair}");
            holder.does(&format!("lock f {kind} exclusive"));
            other.waits_in(&format!("lock f {kind} exclusive wait"));
            holder.dies();
            assert_eq!(other.answer(), "ok");
        }
    }
}

#[test]
fn flock_and_ofd_locks_stay_until_the_last_descriptor_is_closed() {
    in_all_places(&["flock", "ofd"], |kind, holder, other| {
        holder.does("dup f g");
        holder.does(&format!("lock f {kind} exclusive"));
        // The duplicate of a descriptor has the same lock.
        holder.does(&format!("lock g {kind} exclusive"));
        holder.does("close f");
        other.is_refused(&format!("lock f {kind} shared"));
        holder.does("close g");
        other.does(&format!("lock f {kind} exclusive wait"));
    });
}

#[test]
fn flock_and_ofd_locks_are_a_childs_too() {
    for kind in ["flock", "ofd"] {
        let places = Places::new();
        for (mut holder, mut other, pair) in places.pairs() {
            println!("{kind}: {pair}");
            holder.does(&format!("lock f {kind} exclusive"));
            let child = holder.ask("fork").parse().expect("a process");
            holder.does("close f");
            other.is_refused(&format!("lock f {kind} shared"));
            other.waits_in(&format!("lock f {kind} shared wait"));
            kill(Pid::from_raw(child), Signal::SIGKILL).expect("the child runs");
            assert_eq!(other.answer(), "ok");
        }
    }
}

#[test]
fn posix_locks_are_not_a_childs() {
    let places = Places::new();
    for (mut holder, mut other, pair) in places.pairs() {
        println!("{pair}");
        holder.does("lock f posix exclusive");
        holder.ask("fork").parse::<i32>().expect("a process");
        other.waits_in("lock f posix exclusive wait");
        // The child runs on until its pipe of orders is closed, but it does not have the lock.
        holder.signal(Signal::SIGKILL);
        assert_eq!(other.answer(), "ok");
    }
}

#[test]
fn posix_locks_go_when_any_descriptor_of_the_file_is_closed() {
    let places = Places::new();
    for file in places.files() {
        for other in places.files() {
            let (mut holder, mut other) = (Locker::with(&file), Locker::with(&other));
            // The kernel closes a read-only file without a message if it was opened before the first lock.
            holder.does(&format!("open g {}", file.display()));
            for opened in ["before", "while it is held"] {
                holder.does("lock f posix exclusive 0 10");
                if opened == "while it is held" {
                    holder.does(&format!("open g {} read", file.display()));
                }
                other.is_refused("lock f posix shared 0 10");
                holder.does("close g");
                other.does("lock f posix shared 0 10 wait");
                other.does("lock f posix none");
            }
        }
    }
}

/// A difference from a bind mount in docs/design/passthrough.md: the kernel sends the server no message for such a close.
#[test]
fn a_read_lock_stays_when_a_copy_of_its_read_only_descriptor_is_closed_and_goes_with_the_last_one() {
    let places = Places::new();
    for (place, file) in PLACES.into_iter().zip(places.files()) {
        println!("{place}");
        let (mut holder, mut other) = (Locker::new(), Locker::with(&places.files()[2]));
        holder.does(&format!("open f {} read", file.display()));
        holder.does("lock f posix shared");
        holder.does("dup f g");
        holder.does("close g");
        if place == "the host" {
            other.does("lock f posix exclusive");
        } else {
            other.is_refused("lock f posix exclusive");
            holder.does("close f");
            other.does("lock f posix exclusive wait");
        }
    }
}

#[test]
fn descriptors_of_one_process_compete_by_flock_and_ofd_and_not_by_posix() {
    let places = Places::new();
    for file in places.files() {
        let mut locker = Locker::with(&file);
        locker.does(&format!("open g {}", file.display()));
        locker.does("lock f posix exclusive");
        locker.does("lock g posix exclusive");
        locker.does("lock g posix none");
        for kind in ["flock", "ofd"] {
            locker.does(&format!("lock f {kind} exclusive"));
            locker.is_refused(&format!("lock g {kind} shared"));
            locker.does(&format!("lock f {kind} none"));
            locker.does(&format!("lock g {kind} exclusive"));
            locker.does(&format!("lock g {kind} none"));
        }
    }
}

#[test]
fn locks_stay_with_a_file_that_is_renamed_or_removed() {
    let places = Places::new();
    for kind in ALL {
        let (mut holder, mut other) = (Locker::new(), Locker::new());
        let (mounted, source) = (places.first.path(), places.first.source());
        holder.does(&format!("open f {}", mounted.join(kind).display()));
        other.does(&format!("open f {}", source.join(kind).display()));
        holder.does(&format!("lock f {kind} exclusive"));
        fs::rename(mounted.join(kind), mounted.join("renamed")).expect("renamed");
        other.is_refused(&format!("lock f {kind} shared"));
        fs::remove_file(mounted.join("renamed")).expect("removed");
        other.is_refused(&format!("lock f {kind} shared"));
        holder.does("close f");
        other.does(&format!("lock f {kind} shared wait"));
    }
}

#[test]
fn a_mount_that_goes_takes_its_locks_along() {
    for kind in ALL {
        let places = Places::new();
        let [file, _, source] = places.files();
        let (mut holder, mut host) = (Locker::with(&file), Locker::with(&source));
        holder.does(&format!("lock f {kind} exclusive"));
        host.waits_in(&format!("lock f {kind} exclusive wait"));
        drop(holder);
        let Places { first, second: _second } = places;
        drop(first);
        assert_eq!(host.answer(), "ok");
    }
}
