//! Requests that a server had begun when it was killed, executed or not: the caller sees them executed once.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::thread::{self, JoinHandle};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::io::{read, write};
use rustix::time::{ClockId, clock_gettime};
use zerocopy::IntoBytes;

use super::super::attributes::{NamedFile, check_not_mounted};
use super::*;
use crate::caller::credentials::ActAs;
use crate::region::{FileMark, SLOTS};
use crate::session::abi::OutHeader;
use crate::session::{FuseOperation, Request};

/// The interval at which the test checks whether a call has ended without its request.
const LOOK_AGAIN: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
/// The number of attempts to make a call send its request.
pub(super) const ATTEMPTS: usize = 5;

/// A call that is under way, and its request, which a server has read and not answered.
struct Caught<T> {
    caller: JoinHandle<T>,
    number: u64,
}

impl<T: Send + 'static> Caught<T> {
    /// Kills the server and makes the call. Before the request, the kernel may look for names and extended attributes: the test
    /// answers that they do not exist.
    fn catch(rig: &Rig, name: &str, call: impl FnOnce() -> T + Send + 'static) -> Self {
        Self::try_to_catch(rig, name, call).expect("the call makes its request")
    }

    /// As [`Self::catch`]. `None` if the kernel had forgotten a name that the call needs, so that it ended with the answer about
    /// that name: another process may drop the kernel's caches at any moment.
    fn try_to_catch(rig: &Rig, name: &str, call: impl FnOnce() -> T + Send + 'static) -> Option<Self> {
        // With these attributes cached, the kernel does not ask for them during the call.
        fs::metadata(rig.at("")).expect("attributes");
        rig.kill();
        let device = rig.device();
        let caller = thread::spawn(call);
        let mut input = vec![0_u64; 300_000];
        loop {
            let mut readable = [PollFd::new(&device, PollFlags::IN)];
            while poll(&mut readable, Some(&LOOK_AGAIN)).unwrap_or(0) == 0 {
                if caller.is_finished() {
                    return None;
                }
            }
            let length = match read(&device, input.as_mut_bytes()) {
                Err(rustix::io::Errno::NOENT | rustix::io::Errno::INTR) => continue,
                length => length.expect("a request"),
            };
            let request = Request::parse(&input.as_bytes()[..length]).expect("a request");
            match request.operation {
                FuseOperation::Lookup { .. } | FuseOperation::GetXattr { .. } => {
                    let lookup = matches!(request.operation, FuseOperation::Lookup { .. });
                    let error = if lookup { -libc::ENOENT } else { -libc::ENODATA };
                    let answer = OutHeader { len: 16, error, unique: request.unique };
                    write(&device, answer.as_bytes()).expect("answered");
                }
                FuseOperation::Forget { .. } | FuseOperation::BatchForget { .. } => {}
                _ if request.name() == name => return Some(Self { caller, number: request.number() }),
                operation => panic!("{operation:?} was not expected"),
            }
        }
    }

    /// Records what the dead server did: it began the request with `note`, and then did `work`.
    fn begun(self, rig: &Rig, note: u64, work: impl FnOnce()) -> Self {
        let slot = rig.region.in_flight().slot(0);
        slot.take(self.number);
        slot.begin(None, note);
        work();
        self
    }

    /// As [`begun`](Self::begun), for the removal or rename of the file `name`.
    fn begun_with(self, rig: &Rig, name: &str, work: impl FnOnce()) -> Self {
        let slot = rig.region.in_flight().slot(0);
        slot.take(self.number);
        slot.begin_with(0, mark(rig, name));
        work();
        self
    }

    /// Starts a successor and returns the result of the call.
    fn end(self, rig: &Rig) -> T {
        rig.succeed();
        self.caller.join().expect("no panic")
    }
}

/// Tries a call whose request a dead server had begun: once executed, and once not.
fn executed_or_not(
    name: &str,
    prepare: impl Fn(&Rig),
    note: impl Fn(&Rig) -> u64,
    execute: impl Fn(&Rig),
    call: impl Fn(&Rig) -> Box<dyn FnOnce() -> io::Result<()> + Send>,
    check: impl Fn(&Rig),
) {
    for executed in [true, false] {
        let (rig, caught) = std::iter::repeat_with(|| {
            let rig = Rig::limited(1 << 30);
            prepare(&rig);
            let note = note(&rig);
            let caught = Caught::try_to_catch(&rig, name, call(&rig))?.begun(&rig, note, || {});
            Some((rig, caught))
        })
        .take(ATTEMPTS)
        .flatten()
        .next()
        .expect("the kernel knows the names once");
        if executed {
            execute(&rig);
        }
        let number = caught.number;
        caught.end(&rig).unwrap_or_else(|error| panic!("{name}, executed: {executed}: {error}"));
        check(&rig);
        // The server frees the request's slot after it has sent the answer. A server that is killed between the two leaves the
        // request to replay, and the kernel does not send it again.
        while rig.region.in_flight().unanswered().any(|unanswered| unanswered == number) {
            thread::yield_now();
        }
    }
}

fn nothing(_: &Rig) {}

fn zero(_: &Rig) -> u64 {
    0
}

pub(super) fn put(rig: &Rig, name: &str, text: &str) {
    fs::write(rig.source.join(name), text).expect("written");
    fs::metadata(rig.at(name)).expect("the kernel knows it");
}

fn text(rig: &Rig, name: &str) -> String {
    fs::read_to_string(rig.source.join(name)).expect("a file")
}

#[test]
fn a_directory_is_made_once() {
    let call = |rig: &Rig| {
        let path = rig.at("new");
        Box::new(move || fs::create_dir(path)) as Box<_>
    };
    let execute = |rig: &Rig| fs::create_dir(rig.source.join("new")).expect("a directory");
    executed_or_not("MKDIR", nothing, zero, execute, call, |rig| assert!(rig.source.join("new").is_dir()));
}

#[test]
fn a_foreign_directory_makes_mkdir_fail() {
    let rig = Rig::unlimited();
    let path = rig.at("new");
    fs::metadata(rig.at("")).expect("attributes");
    let caught = Caught::catch(&rig, "MKDIR", move || fs::create_dir(path));
    fs::create_dir(rig.source.join("new")).expect("a directory");
    std::os::unix::fs::chown(rig.source.join("new"), Some(1), Some(1)).expect("its owner");
    let refused = caught.begun(&rig, 0, || {}).end(&rig).expect_err("it is there");
    assert_eq!(refused.raw_os_error(), Some(libc::EEXIST));
}

#[test]
fn an_nfs_server_may_make_a_directory_for_another_user_and_by_a_clock_that_is_behind() {
    let rig = Rig::new(PassthroughOptions { remote: Some(ActAs::Caller), ..PassthroughOptions::default() });
    let path = rig.at("new");
    let caught = Caught::catch(&rig, "MKDIR", move || fs::create_dir(path));
    let now = clock_gettime(ClockId::Realtime);
    let slot = rig.region.in_flight().slot(0);
    slot.take(caught.number);
    slot.begin(Some(Timespec { tv_sec: now.tv_sec + 60, ..now }), 0);
    fs::create_dir(rig.source.join("new")).expect("a directory");
    std::os::unix::fs::chown(rig.source.join("new"), Some(1), Some(1)).expect("its owner");
    caught.end(&rig).expect("made");
}

#[test]
fn a_link_is_made_once() {
    let call = |rig: &Rig| {
        let path = rig.at("new");
        Box::new(move || std::os::unix::fs::symlink("target", path)) as Box<_>
    };
    let execute = |rig: &Rig| std::os::unix::fs::symlink("target", rig.source.join("new")).expect("a link");
    executed_or_not("SYMLINK", nothing, zero, execute, call, |rig| {
        assert_eq!(fs::read_link(rig.source.join("new")).expect("a link"), OsStr::new("target"));
    });
}

#[test]
fn a_file_is_created_once() {
    let call = |rig: &Rig| {
        let path = rig.at("new");
        Box::new(move || File::create_new(path).map(drop)) as Box<_>
    };
    let execute = |rig: &Rig| drop(File::create_new(rig.source.join("new")).expect("a file"));
    executed_or_not("CREATE", nothing, zero, execute, call, |rig| assert_eq!(text(rig, "new"), ""));
}

#[test]
fn a_name_is_added_once() {
    let call = |rig: &Rig| {
        let (old, new) = (rig.at("old"), rig.at("new"));
        Box::new(move || fs::hard_link(old, new)) as Box<_>
    };
    let prepare = |rig: &Rig| put(rig, "old", "text");
    let execute = |rig: &Rig| fs::hard_link(rig.source.join("old"), rig.source.join("new")).expect("a name");
    executed_or_not("LINK", prepare, zero, execute, call, |rig| {
        assert_eq!(fs::metadata(rig.source.join("new")).expect("attributes").nlink(), 2);
    });
}

#[test]
fn a_file_is_removed_once_and_its_space_is_free() {
    let call = |rig: &Rig| {
        let path = rig.at("old");
        Box::new(move || fs::remove_file(path)) as Box<_>
    };
    let prepare = |rig: &Rig| {
        fs::write(rig.at("old"), vec![1; 100_000]).expect("written");
        fs::metadata(rig.at("old")).expect("the kernel knows it");
    };
    // The file's node has the last number that the server gave.
    let number = |rig: &Rig| rig.region.header().counters.next_node.load(std::sync::atomic::Ordering::Relaxed) - 1;
    let execute = |rig: &Rig| fs::remove_file(rig.source.join("old")).expect("removed");
    executed_or_not("UNLINK", prepare, number, execute, call, |rig| {
        assert!(!rig.source.join("old").exists());
        assert_eq!(rig.region.header().counters.used.load(std::sync::atomic::Ordering::Relaxed), 0);
    });
}

#[test]
fn a_directory_is_removed_once() {
    let call = |rig: &Rig| {
        let path = rig.at("old");
        Box::new(move || fs::remove_dir(path)) as Box<_>
    };
    let prepare = |rig: &Rig| fs::create_dir(rig.at("old")).expect("a directory");
    let execute = |rig: &Rig| fs::remove_dir(rig.source.join("old")).expect("removed");
    executed_or_not("RMDIR", prepare, zero, execute, call, |rig| assert!(!rig.source.join("old").exists()));
}

#[test]
fn a_file_is_renamed_once() {
    let call = |rig: &Rig| {
        let (old, new) = (rig.at("old"), rig.at("new"));
        Box::new(move || fs::rename(old, new)) as Box<_>
    };
    // Both files take whole blocks, so that a wrong charge shows.
    let prepare = |rig: &Rig| {
        fs::write(rig.at("old"), vec![1; 8 << 10]).expect("written");
        fs::write(rig.at("new"), vec![2; 100 << 10]).expect("written");
        File::open(rig.at("old")).and_then(|file| file.sync_all()).expect("its blocks are there");
        for name in ["old", "new"] {
            fs::metadata(rig.at(name)).expect("the kernel knows it");
        }
    };
    // The node of the file that is replaced has the last number that the server gave.
    let number = |rig: &Rig| rig.region.header().counters.next_node.load(std::sync::atomic::Ordering::Relaxed) - 1;
    let execute = |rig: &Rig| fs::rename(rig.source.join("old"), rig.source.join("new")).expect("renamed");
    executed_or_not("RENAME", prepare, number, execute, call, |rig| {
        let found = fs::metadata(rig.source.join("new")).expect("attributes");
        assert_eq!(found.len(), 8 << 10);
        assert!(!rig.source.join("old").exists());
        let used = rig.region.header().counters.used.load(std::sync::atomic::Ordering::Relaxed);
        assert_eq!(used, found.blocks() * 512, "the volume is charged with the file that has the name");
    });
}

/// The mark of a file of the source.
fn mark(rig: &Rig, name: &str) -> FileMark {
    let directory = File::open(&rig.source).expect("a directory");
    match check_not_mounted(&directory, OsStr::new(name)) {
        Ok(NamedFile::Marked(mark)) => mark,
        found => panic!("{found:?}"),
    }
}

#[test]
fn a_file_that_gets_a_removed_name_later_is_not_removed() {
    for executed in [true, false] {
        let rig = Rig::unlimited();
        put(&rig, "old", "first");
        let path = rig.at("old");
        let caught = Caught::catch(&rig, "UNLINK", move || fs::remove_file(path)).begun_with(&rig, "old", || {});
        if executed {
            fs::remove_file(rig.source.join("old")).expect("removed");
        }
        // The file system may use the inode number again only if it is free.
        fs::write(rig.source.join("next"), "second").expect("written");
        fs::rename(rig.source.join("next"), rig.source.join("old")).expect("renamed");
        caught.end(&rig).expect("removed");
        assert_eq!(text(&rig, "old"), "second", "executed: {executed}");
    }
}

#[test]
fn a_directory_that_gets_a_removed_name_later_is_not_removed() {
    let rig = Rig::unlimited();
    let made = || fs::create_dir(rig.source.join("old")).expect("a directory");
    made();
    fs::metadata(rig.at("old")).expect("the kernel knows it");
    let path = rig.at("old");
    let caught = Caught::catch(&rig, "RMDIR", move || fs::remove_dir(path));
    let first = mark(&rig, "old");
    let caught = caught.begun_with(&rig, "old", || fs::remove_dir(rig.source.join("old")).expect("removed"));
    made();
    // The file system may use the inode number again at once, in the same tick of its clock.
    while mark(&rig, "old").is_same(first) {
        fs::remove_dir(rig.source.join("old")).expect("removed");
        made();
    }
    caught.end(&rig).expect("removed");
    assert!(rig.source.join("old").is_dir());
}

#[test]
fn a_file_that_gets_a_renamed_name_later_is_not_renamed() {
    let rig = Rig::unlimited();
    put(&rig, "file.tmp", "complete");
    put(&rig, "file", "before");
    let (old, new) = (rig.at("file.tmp"), rig.at("file"));
    let caught = Caught::catch(&rig, "RENAME", move || fs::rename(old, new));
    // A second name of the file keeps its inode number from the next file.
    fs::hard_link(rig.source.join("file.tmp"), rig.source.join("other")).expect("a name");
    let caught = caught.begun_with(&rig, "file.tmp", || {
        fs::rename(rig.source.join("file.tmp"), rig.source.join("file")).expect("renamed");
    });
    fs::write(rig.source.join("file.tmp"), "half").expect("written");
    caught.end(&rig).expect("renamed");
    assert_eq!((text(&rig, "file.tmp"), text(&rig, "file")), ("half".to_owned(), "complete".to_owned()));
}

#[test]
fn a_removal_and_a_rename_of_the_same_file_are_still_done() {
    let rig = Rig::unlimited();
    put(&rig, "old", "text");
    let (old, new) = (rig.at("old"), rig.at("new"));
    let renamed = Caught::catch(&rig, "RENAME", move || fs::rename(old, new)).begun_with(&rig, "old", || {});
    renamed.end(&rig).expect("renamed");
    assert_eq!(text(&rig, "new"), "text");
    fs::metadata(rig.at("new")).expect("the kernel knows it");
    let path = rig.at("new");
    let removed = Caught::catch(&rig, "UNLINK", move || fs::remove_file(path)).begun_with(&rig, "new", || {});
    removed.end(&rig).expect("removed");
    assert_eq!(fs::read_dir(&rig.source).expect("a listing").count(), 0);
}

#[test]
fn a_server_records_the_file_before_it_removes_or_renames_it() {
    let rig = Rig::unlimited();
    // The second name keeps the kernel from forgetting the file, which would be another request.
    put(&rig, "other", "text");
    fs::hard_link(rig.source.join("other"), rig.source.join("old")).expect("a name");
    let file = mark(&rig, "other");
    let recorded = || {
        let slots = (0..SLOTS).filter_map(|slot| rig.region.in_flight().slot(slot).begun()?.file);
        slots.collect::<Vec<_>>()
    };
    assert_eq!(recorded(), []);
    fs::rename(rig.at("old"), rig.at("new")).expect("renamed");
    assert_eq!(recorded(), [file]);
    fs::create_dir(rig.at("directory")).expect("a directory");
    fs::remove_file(rig.at("new")).expect("removed");
    assert!(recorded().contains(&file));
}

#[test]
fn a_removal_that_can_only_fail_is_not_begun() {
    let rig = Rig::unlimited();
    put(&rig, "old", "text");
    fs::remove_file(rig.source.join("old")).expect("removed by another process");
    let failed = fs::remove_file(rig.at("old")).expect_err("it is gone");
    assert_eq!(failed.kind(), io::ErrorKind::NotFound);
    // A successor that found the request begun would take it for executed.
    assert!((0..SLOTS).all(|slot| rig.region.in_flight().slot(slot).begun().is_none()));
}

#[test]
fn a_pipe_that_gets_the_name_of_a_new_file_is_opened_by_the_kernel() {
    let rig = Rig::unlimited();
    let (path, reader) = (rig.at("new"), rig.at("new"));
    let caught = Caught::catch(&rig, "CREATE", move || File::options().append(true).create(true).open(path));
    mknodat(CWD, rig.source.join("new"), FileType::Fifo, Mode::RWXU, 0).expect("a pipe");
    let reader = thread::spawn(move || File::options().read(true).custom_flags(libc::O_NONBLOCK).open(reader));
    let _writer = caught.end(&rig).expect("opened for writing");
    reader.join().expect("no panic").expect("opened for reading");
}

fn rename_with(flags: rustix::fs::RenameFlags) {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    let exchange = flags == RenameFlags::EXCHANGE;
    let call = |rig: &Rig| {
        let (old, new) = (rig.at("old"), rig.at("new"));
        Box::new(move || Ok(renameat_with(CWD, &old, CWD, &new, flags)?)) as Box<_>
    };
    let prepare = |rig: &Rig| {
        put(rig, "old", "first");
        if exchange {
            put(rig, "new", "second");
        }
    };
    let number = |rig: &Rig| fs::metadata(rig.source.join("old")).expect("attributes").ino();
    let execute = |rig: &Rig| {
        let (old, new) = (rig.source.join("old"), rig.source.join("new"));
        renameat_with(CWD, &old, CWD, &new, flags).expect("renamed");
    };
    executed_or_not("RENAME", prepare, number, execute, call, |rig| {
        assert_eq!(text(rig, "new"), "first");
        let old = fs::read_to_string(rig.source.join("old")).ok();
        assert_eq!(old.as_deref(), exchange.then_some("second"));
    });
}

#[test]
fn two_names_are_exchanged_once() {
    rename_with(rustix::fs::RenameFlags::EXCHANGE);
}

#[test]
fn a_rename_that_replaces_nothing_is_done_once() {
    rename_with(rustix::fs::RenameFlags::NOREPLACE);
}

#[test]
fn an_attribute_is_set_and_removed_once() {
    use rustix::fs::{XattrFlags, removexattr, setxattr};
    let prepare = |rig: &Rig| put(rig, "file", "");
    let call = |rig: &Rig| {
        let path = rig.at("file");
        Box::new(move || Ok(setxattr(&path, c"user.test", b"value", XattrFlags::CREATE)?)) as Box<_>
    };
    let set = |rig: &Rig| {
        setxattr(rig.source.join("file"), c"user.test", b"value", XattrFlags::CREATE).expect("set");
    };
    executed_or_not("SETXATTR", prepare, zero, set, call, |_| {});
    let prepare = |rig: &Rig| {
        put(rig, "file", "");
        set(rig);
    };
    let call = |rig: &Rig| {
        let path = rig.at("file");
        Box::new(move || Ok(removexattr(&path, c"user.test")?)) as Box<_>
    };
    let remove = |rig: &Rig| removexattr(rig.source.join("file"), c"user.test").expect("removed");
    executed_or_not("REMOVEXATTR", prepare, zero, remove, call, |_| {});
}

#[test]
fn an_append_takes_effect_once() {
    use std::io::Write;
    use std::os::fd::AsRawFd;
    let append = |path: PathBuf| fs::OpenOptions::new().append(true).open(path).expect("a file");
    let opened = std::cell::RefCell::new(None);
    let prepare = |rig: &Rig| {
        put(rig, "log", "first\n");
        *opened.borrow_mut() = Some(append(rig.at("log")));
    };
    let call = |_: &Rig| {
        let mut file = opened.borrow_mut().take().expect("it was prepared");
        assert!(file.as_raw_fd() >= 0);
        Box::new(move || file.write_all(b"second\n")) as Box<_>
    };
    let execute = |rig: &Rig| append(rig.source.join("log")).write_all(b"second\n").expect("written");
    executed_or_not("WRITE", prepare, |_| 6, execute, call, |rig| assert_eq!(text(rig, "log"), "first\nsecond\n"));
}
