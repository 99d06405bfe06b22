//! The server of a passthrough volume is killed between any two of its system calls while it answers the requests of an
//! operation. The caller must get the same result as on a disk, and the files must be the same afterwards. So no effect
//! is lost, and none happens twice.

use std::ffi::CString;
use std::fmt::Debug;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use crate::common::passthrough::disk_directory;
use crate::common::tracer::killed_at;
use crate::common::twins::{names, snapshot};
use crate::common::*;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, kill};
use rustix::fs::{AtFlags, CWD, FileType, Mode, RenameFlags, XattrFlags};

/// An operation on files in an empty directory.
struct Operation {
    name: &'static str,
    /// Makes the files that the operation needs.
    prepare: fn(&Path),
    /// Executes the operation, and returns its result as a text.
    act: fn(&Path) -> String,
}

const fn operation(name: &'static str, prepare: fn(&Path), act: fn(&Path) -> String) -> Operation {
    Operation { name, prepare, act }
}

/// More system calls than the server makes for any operation.
const STOPS: usize = 400;

fn nothing(_: &Path) {}

fn a_file(directory: &Path) {
    fs::write(directory.join("f"), "0123456789").expect("written");
}

fn two_files(directory: &Path) {
    a_file(directory);
    fs::write(directory.join("g"), "the second").expect("written");
}

fn a_directory(directory: &Path) {
    fs::create_dir(directory.join("d")).expect("made");
}

fn a_few_files(directory: &Path) {
    (0..4).for_each(|n| fs::write(directory.join(format!("file-{n}")), "").expect("written"));
}

fn a_hundred_files(directory: &Path) {
    (0..100).for_each(|n| fs::write(directory.join(format!("file-{n:03}")), "").expect("written"));
}

fn describe<T: Debug, E: Into<io::Error>>(result: Result<T, E>) -> String {
    match result.map_err(Into::into) {
        Ok(value) => format!("{value:?}"),
        Err(error) => format!("{error}"),
    }
}

fn edit(path: &Path) -> io::Result<File> {
    File::options().read(true).write(true).open(path)
}

fn permissions(bits: u32) -> Permissions {
    Permissions::from_mode(bits)
}

const CREATIONS: [Operation; 9] = [
    operation("create", nothing, |d| {
        let file = OpenOptions::new().write(true).create_new(true).mode(0o640).open(d.join("f"));
        describe(file.and_then(|file| file.write_at(b"new", 0)))
    }),
    operation("create an existing file", a_file, |d| describe(File::create_new(d.join("f")).map(drop))),
    operation("mkdir", nothing, |d| describe(DirBuilder::new().mode(0o750).create(d.join("d")))),
    operation("mkdir of an existing directory", a_directory, |d| describe(fs::create_dir(d.join("d")))),
    operation("mknod", nothing, |d| {
        describe(rustix::fs::mknodat(CWD, d.join("p"), FileType::Fifo, Mode::from_raw_mode(0o600), 0))
    }),
    operation("symlink", nothing, |d| describe(symlink("to somewhere", d.join("l")))),
    operation("link", a_file, |d| describe(fs::hard_link(d.join("f"), d.join("g")))),
    operation("link to an existing name", two_files, |d| describe(fs::hard_link(d.join("f"), d.join("g")))),
    operation("tmpfile", nothing, |d| {
        let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_TMPFILE).open(d);
        describe(file.and_then(|mut file| {
            file.write_all(b"no name yet")?;
            let named = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
            rustix::fs::linkat(CWD, named, CWD, d.join("named"), AtFlags::SYMLINK_FOLLOW)?;
            file.rewind()?;
            io::read_to_string(file)
        }))
    }),
];

const REMOVALS_AND_RENAMES: [Operation; 8] = [
    operation("unlink", a_file, |d| describe(fs::remove_file(d.join("f")))),
    operation("unlink of a missing file", nothing, |d| describe(fs::remove_file(d.join("f")))),
    operation("rmdir", a_directory, |d| describe(fs::remove_dir(d.join("d")))),
    operation("rename", a_file, |d| describe(fs::rename(d.join("f"), d.join("h")))),
    operation("rename over", two_files, |d| describe(fs::rename(d.join("f"), d.join("g")))),
    operation("exchange", two_files, |d| rename_with(d, RenameFlags::EXCHANGE)),
    operation("rename to a free name", a_file, |d| rename_with(d, RenameFlags::NOREPLACE)),
    operation("rename to a taken name", two_files, |d| rename_with(d, RenameFlags::NOREPLACE)),
];

fn rename_with(directory: &Path, flags: RenameFlags) -> String {
    describe(rustix::fs::renameat_with(CWD, directory.join("f"), CWD, directory.join("g"), flags))
}

const READS_AND_WRITES: [Operation; 10] = [
    operation("read", a_file, |d| describe(fs::read_to_string(d.join("f")))),
    operation("write", a_file, |d| describe(edit(&d.join("f")).and_then(|file| file.write_at(b"abc", 4)))),
    operation("append", a_file, |d| {
        let file = OpenOptions::new().append(true).open(d.join("f"));
        describe(file.and_then(|mut file| {
            file.write_all(b"first")?;
            file.write_all(b"second")?;
            file.stream_position()
        }))
    }),
    operation("truncate", a_file, |d| describe(edit(&d.join("f")).and_then(|file| file.set_len(3)))),
    operation("open and truncate", a_file, |d| describe(fs::write(d.join("f"), "short"))),
    operation("allocate", a_file, |d| {
        let file = edit(&d.join("f"));
        describe(file.and_then(|file| Ok(rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, 8192)?)))
    }),
    operation("copy", two_files, |d| describe(fs::copy(d.join("f"), d.join("g")))),
    operation("seek", a_file, |d| {
        let file = File::open(d.join("f"));
        describe(file.and_then(|file| Ok(rustix::fs::seek(file, rustix::fs::SeekFrom::Hole(0))?)))
    }),
    operation("sync", a_file, |d| {
        describe(edit(&d.join("f")).and_then(|mut file| {
            file.seek(SeekFrom::End(0))?;
            file.write_all(b"kept")?;
            file.sync_all()
        }))
    }),
    operation("an open file without a name", a_file, |d| {
        describe(edit(&d.join("f")).and_then(|mut file| {
            fs::remove_file(d.join("f"))?;
            file.write_all(b"still")?;
            file.rewind()?;
            let mut text = String::new();
            file.read_to_string(&mut text)?;
            Ok((text, file.metadata()?.len()))
        }))
    }),
];

const ATTRIBUTES: [Operation; 9] = [
    operation("stat", two_files, |d| describe(fs::metadata(d.join("g")).map(|metadata| metadata.len()))),
    operation("chmod", a_file, |d| describe(fs::set_permissions(d.join("f"), permissions(0o604)))),
    operation("chown", a_file, |d| describe(std::os::unix::fs::chown(d.join("f"), Some(7), Some(8)))),
    operation("times", a_file, |d| {
        let long_ago = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000);
        let set = edit(&d.join("f")).and_then(|file| file.set_modified(long_ago));
        describe(set.and_then(|()| fs::metadata(d.join("f"))?.modified()))
    }),
    operation("make an attribute", a_file, |d| {
        describe(rustix::fs::setxattr(d.join("f"), "user.a", b"value", XattrFlags::CREATE))
    }),
    operation("change an attribute", an_attribute, |d| {
        describe(rustix::fs::setxattr(d.join("f"), "user.a", b"other", XattrFlags::REPLACE))
    }),
    operation("make an existing attribute", an_attribute, |d| {
        describe(rustix::fs::setxattr(d.join("f"), "user.a", b"other", XattrFlags::CREATE))
    }),
    operation("remove an attribute", an_attribute, |d| describe(rustix::fs::removexattr(d.join("f"), "user.a"))),
    operation("read attributes", an_attribute, |d| format!("{:?}", crate::common::twins::attributes(&d.join("f")))),
];

fn an_attribute(directory: &Path) {
    a_file(directory);
    rustix::fs::setxattr(directory.join("f"), "user.a", b"value", XattrFlags::empty()).expect("set");
}

const LISTINGS: [Operation; 3] = [
    operation("list", a_hundred_files, |d| format!("{:?}", names(d))),
    operation("the status of the file system", nothing, |d| {
        describe(rustix::fs::statvfs(d).map(|status| status.f_namemax))
    }),
    operation("a directory that is open while it is emptied", a_few_files, |d| {
        let mut listing = fs::read_dir(d).expect("a listing");
        let first = listing.next().map(|entry| entry.map(|_| ()).map_err(|error| error.kind()));
        let removed = names(d).iter().filter(|name| fs::remove_file(d.join(name)).is_ok()).count();
        format!("{first:?} {removed}")
    }),
];

const LOCKS: [Operation; 3] = [
    operation("flock", a_file, |d| {
        let file = edit(&d.join("f")).expect("open");
        let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| errno);
        let conflicting = Flock::lock(edit(&d.join("f")).expect("open"), FlockArg::LockSharedNonblock);
        let conflicting = conflicting.map(drop).map_err(|(_, errno)| errno);
        format!("{:?} {conflicting:?}", lock.map(drop))
    }),
    operation("a lock of an open file", a_file, |d| lock_and_query(d, libc::F_OFD_SETLK, libc::F_OFD_GETLK)),
    operation("a lock of a process", a_file, |d| lock_and_query(d, libc::F_SETLK, libc::F_OFD_GETLK)),
];

/// Locks the first ten bytes through one open file, and then unlocks the first five. After each step, queries the
/// conflicting lock through a second open file.
fn lock_and_query(directory: &Path, set: i32, get: i32) -> String {
    let (owner, second) = (edit(&directory.join("f")).expect("open"), edit(&directory.join("f")).expect("open"));
    let lock = |kind: i32, length| libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: length,
        l_pid: 0,
    };
    let call = |file: &File, command, lock: &mut libc::flock| {
        // SAFETY: the struct outlives the call.
        let result = unsafe { libc::fcntl(file.as_raw_fd(), command, lock) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    let locked = describe(call(&owner, set, &mut lock(libc::F_WRLCK, 10)));
    let mut whole = lock(libc::F_WRLCK, 10);
    let queried = describe(call(&second, get, &mut whole));
    let unlocked = describe(call(&owner, set, &mut lock(libc::F_UNLCK, 5)));
    let mut rest = lock(libc::F_WRLCK, 10);
    let queried_again = describe(call(&second, get, &mut rest));
    let (whole, rest) = ((whole.l_type, whole.l_len), (rest.l_start, rest.l_len));
    format!("{locked} {queried} {whole:?} {unlocked} {queried_again} {rest:?}")
}

/// A pod with two volumes. The kernel reads and writes the files of `host` itself, without the server. The server reads
/// and writes the files of `limited`.
struct Pod {
    running: Running,
    _fixture: Fixture,
    source: PathBuf,
    _disk: tempfile::TempDir,
}

impl Pod {
    fn new() -> Self {
        let disk = disk_directory();
        let source = disk.path().join("source");
        fs::create_dir(&source).expect("made");
        let host = format!("{{name: host, hostPath: {{path: {}, type: Directory}}}}", source.display());
        let fixture = Fixture::new(&pod(&format!("[{host}, {{name: limited, emptyDir: {{sizeLimit: 1Gi}}}}]")));
        let running = fixture.run();
        Self { running, _fixture: fixture, source, _disk: disk }
    }

    /// Checks each operation in both volumes with [`Self::compare_with_disk`].
    #[track_caller]
    fn withstands(&self, operations: &[Operation]) {
        for volume in ["host", "limited"] {
            let path = self.running.volume(volume);
            for operation in operations {
                let stops = self.compare_with_disk(&path, operation);
                println!("{volume}: {}: {stops} kills", operation.name);
                assert!(stops > 1, "{volume}: {} causes a request to the server", operation.name);
            }
        }
        let log = self.running.log();
        assert!(!log.contains("lacks"), "{log}");
    }

    /// Executes the operation on a disk, and again and again in the volume: each time the server is killed one stop
    /// (system call) later, until the operation ends before the kill. Fails the test if a result, or the files
    /// afterwards, differ from those on the disk. Returns the number of kills.
    #[track_caller]
    fn compare_with_disk(&self, volume: &Path, operation: &Operation) -> usize {
        let Operation { name, prepare, act } = operation;
        let native = disk_directory();
        fs::set_permissions(native.path(), permissions(0o755)).expect("set");
        prepare(native.path());
        let (expected, expected_files) = (act(native.path()), snapshot(native.path()));
        for stop in 0..STOPS {
            let directory = format!("{name} {stop}");
            let path = volume.join(&directory);
            fs::create_dir(&path).and_then(|()| fs::set_permissions(&path, permissions(0o755))).expect("made");
            self.running.freed(|| prepare(&path));
            let server = self.running.server();
            let (result, killed) = self.running.freed(|| killed_at(server, stop, || act(&path)));
            let case = format!("{name}, killed at stop {stop} in {}", volume.display());
            assert_eq!(result, expected, "{case}");
            assert_eq!(snapshot(&path), expected_files, "{case}");
            let source = self.source.join(&directory);
            if source.exists() {
                assert_eq!(snapshot(&source), expected_files, "{case}, in the source");
            }
            if !killed {
                return stop;
            }
        }
        panic!("{name} does not end after {STOPS} system calls");
    }
}

#[test]
fn a_kill_while_a_file_is_made_fails_no_call() {
    Pod::new().withstands(&CREATIONS);
}

#[test]
fn a_kill_while_a_file_is_moved_or_removed_fails_no_call() {
    Pod::new().withstands(&REMOVALS_AND_RENAMES);
}

#[test]
fn a_kill_while_bytes_are_read_or_written_is_not_noticed() {
    Pod::new().withstands(&READS_AND_WRITES);
}

#[test]
fn a_kill_while_attributes_are_read_or_changed_is_not_noticed() {
    Pod::new().withstands(&ATTRIBUTES);
}

#[test]
fn a_kill_while_a_directory_is_listed_is_not_noticed() {
    Pod::new().withstands(&LISTINGS);
}

#[test]
fn a_kill_while_locks_are_taken_and_given_is_not_noticed() {
    Pod::new().withstands(&LOCKS);
}

#[test]
fn the_successor_answers_requests_that_no_server_has_read() {
    let pod = Pod::new();
    for operation in
        [&CREATIONS[..], &REMOVALS_AND_RENAMES, &READS_AND_WRITES, &ATTRIBUTES, &LISTINGS, &LOCKS].concat_all()
    {
        for volume in ["host", "limited"] {
            let path = pod.running.volume(volume).join(format!("{} unread", operation.name));
            let native = disk_directory();
            fs::set_permissions(native.path(), permissions(0o755)).expect("set");
            (operation.prepare)(native.path());
            let expected = (operation.act)(native.path());
            fs::create_dir(&path).and_then(|()| fs::set_permissions(&path, permissions(0o755))).expect("made");
            pod.running.freed(|| (operation.prepare)(&path));
            let server = pod.running.server();
            kill(server, Signal::SIGSTOP).expect("the server exists");
            let result = pod.running.freed(|| {
                std::thread::scope(|scope| {
                    let caller = scope.spawn(|| (operation.act)(&path));
                    kill(server, Signal::SIGKILL).expect("the server exists");
                    caller.join().expect("no panic")
                })
            });
            assert_eq!(result, expected, "{} in {volume}", operation.name);
            assert_eq!(snapshot(&path), snapshot(native.path()), "{} in {volume}", operation.name);
        }
    }
}

/// Joins several lists of operations into one.
trait ConcatAll<'a> {
    fn concat_all(&self) -> Vec<&'a Operation>;
}

impl<'a> ConcatAll<'a> for [&'a [Operation]; 6] {
    fn concat_all(&self) -> Vec<&'a Operation> {
        self.iter().flat_map(|list| list.iter()).collect()
    }
}
