//! The server of a passthrough volume is killed between any two of its system calls while it answers an operation: the
//! caller gets the same result as on a disk, and the same state is left. So no effect is lost, and none happens twice.

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

/// An operation, and its preparation.
struct Operation {
    name: &'static str,
    prepare: fn(&Path),
    act: fn(&Path) -> String,
}

const fn operation(name: &'static str, prepare: fn(&Path), act: fn(&Path) -> String) -> Operation {
    Operation { name, prepare, act }
}

/// More system calls than any operation takes.
const STOPS: usize = 400;

fn nothing(_: &Path) {}

fn a_file(directory: &Path) {
    fs::write(directory.join("f"), "0123456789").expect("written");
}

fn two_files(directory: &Path) {
    a_file(directory);
    fs::write(directory.join("g"), "the other").expect("written");
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

fn tell<T: Debug, E: Into<io::Error>>(result: Result<T, E>) -> String {
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

const MAKING: [Operation; 9] = [
    operation("create", nothing, |d| {
        let file = OpenOptions::new().write(true).create_new(true).mode(0o640).open(d.join("f"));
        tell(file.and_then(|file| file.write_at(b"new", 0)))
    }),
    operation("create what is there", a_file, |d| tell(File::create_new(d.join("f")).map(drop))),
    operation("mkdir", nothing, |d| tell(DirBuilder::new().mode(0o750).create(d.join("d")))),
    operation("mkdir where one is", a_directory, |d| tell(fs::create_dir(d.join("d")))),
    operation("mknod", nothing, |d| {
        tell(rustix::fs::mknodat(CWD, d.join("p"), FileType::Fifo, Mode::from_raw_mode(0o600), 0))
    }),
    operation("symlink", nothing, |d| tell(symlink("to somewhere", d.join("l")))),
    operation("link", a_file, |d| tell(fs::hard_link(d.join("f"), d.join("g")))),
    operation("link where one is", two_files, |d| tell(fs::hard_link(d.join("f"), d.join("g")))),
    operation("tmpfile", nothing, |d| {
        let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_TMPFILE).open(d);
        tell(file.and_then(|mut file| {
            file.write_all(b"no name yet")?;
            let named = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
            rustix::fs::linkat(CWD, named, CWD, d.join("named"), AtFlags::SYMLINK_FOLLOW)?;
            file.rewind()?;
            io::read_to_string(file)
        }))
    }),
];

const MOVING: [Operation; 8] = [
    operation("unlink", a_file, |d| tell(fs::remove_file(d.join("f")))),
    operation("unlink what is not there", nothing, |d| tell(fs::remove_file(d.join("f")))),
    operation("rmdir", a_directory, |d| tell(fs::remove_dir(d.join("d")))),
    operation("rename", a_file, |d| tell(fs::rename(d.join("f"), d.join("h")))),
    operation("rename over", two_files, |d| tell(fs::rename(d.join("f"), d.join("g")))),
    operation("exchange", two_files, |d| rename_with(d, RenameFlags::EXCHANGE)),
    operation("rename to a free name", a_file, |d| rename_with(d, RenameFlags::NOREPLACE)),
    operation("rename to a taken name", two_files, |d| rename_with(d, RenameFlags::NOREPLACE)),
];

fn rename_with(directory: &Path, flags: RenameFlags) -> String {
    tell(rustix::fs::renameat_with(CWD, directory.join("f"), CWD, directory.join("g"), flags))
}

const BYTES: [Operation; 10] = [
    operation("read", a_file, |d| tell(fs::read_to_string(d.join("f")))),
    operation("write", a_file, |d| tell(edit(&d.join("f")).and_then(|file| file.write_at(b"abc", 4)))),
    operation("append", a_file, |d| {
        let file = OpenOptions::new().append(true).open(d.join("f"));
        tell(file.and_then(|mut file| {
            file.write_all(b"first")?;
            file.write_all(b"second")?;
            file.stream_position()
        }))
    }),
    operation("truncate", a_file, |d| tell(edit(&d.join("f")).and_then(|file| file.set_len(3)))),
    operation("open and truncate", a_file, |d| tell(fs::write(d.join("f"), "short"))),
    operation("allocate", a_file, |d| {
        let file = edit(&d.join("f"));
        tell(file.and_then(|file| Ok(rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, 8192)?)))
    }),
    operation("copy", two_files, |d| tell(fs::copy(d.join("f"), d.join("g")))),
    operation("seek", a_file, |d| {
        let file = File::open(d.join("f"));
        tell(file.and_then(|file| Ok(rustix::fs::seek(file, rustix::fs::SeekFrom::Hole(0))?)))
    }),
    operation("sync", a_file, |d| {
        tell(edit(&d.join("f")).and_then(|mut file| {
            file.seek(SeekFrom::End(0))?;
            file.write_all(b"kept")?;
            file.sync_all()
        }))
    }),
    operation("an open file without a name", a_file, |d| {
        tell(edit(&d.join("f")).and_then(|mut file| {
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
    operation("look", two_files, |d| tell(fs::metadata(d.join("g")).map(|found| found.len()))),
    operation("chmod", a_file, |d| tell(fs::set_permissions(d.join("f"), permissions(0o604)))),
    operation("chown", a_file, |d| tell(std::os::unix::fs::chown(d.join("f"), Some(7), Some(8)))),
    operation("times", a_file, |d| {
        let long_ago = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000);
        let set = edit(&d.join("f")).and_then(|file| file.set_modified(long_ago));
        tell(set.and_then(|()| fs::metadata(d.join("f"))?.modified()))
    }),
    operation("make an attribute", a_file, |d| {
        tell(rustix::fs::setxattr(d.join("f"), "user.a", b"value", XattrFlags::CREATE))
    }),
    operation("change an attribute", an_attribute, |d| {
        tell(rustix::fs::setxattr(d.join("f"), "user.a", b"other", XattrFlags::REPLACE))
    }),
    operation("make an attribute that is there", an_attribute, |d| {
        tell(rustix::fs::setxattr(d.join("f"), "user.a", b"other", XattrFlags::CREATE))
    }),
    operation("remove an attribute", an_attribute, |d| tell(rustix::fs::removexattr(d.join("f"), "user.a"))),
    operation("read attributes", an_attribute, |d| format!("{:?}", crate::common::twins::attributes(&d.join("f")))),
];

fn an_attribute(directory: &Path) {
    a_file(directory);
    rustix::fs::setxattr(directory.join("f"), "user.a", b"value", XattrFlags::empty()).expect("set");
}

const LISTING: [Operation; 3] = [
    operation("list", a_hundred_files, |d| format!("{:?}", names(d))),
    operation("the status of the file system", nothing, |d| {
        tell(rustix::fs::statvfs(d).map(|status| status.f_namemax))
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
        let other = Flock::lock(edit(&d.join("f")).expect("open"), FlockArg::LockSharedNonblock);
        let other = other.map(drop).map_err(|(_, errno)| errno);
        format!("{:?} {other:?}", lock.map(drop))
    }),
    operation("a lock of an open file", a_file, |d| lock_and_ask(d, libc::F_OFD_SETLK, libc::F_OFD_GETLK)),
    operation("a lock of a process", a_file, |d| lock_and_ask(d, libc::F_SETLK, libc::F_OFD_GETLK)),
];

/// Locks ten bytes, asks what another open file sees of it, and lets go of five.
fn lock_and_ask(directory: &Path, set: i32, get: i32) -> String {
    let (one, other) = (edit(&directory.join("f")).expect("open"), edit(&directory.join("f")).expect("open"));
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
    let taken = tell(call(&one, set, &mut lock(libc::F_WRLCK, 10)));
    let mut seen = lock(libc::F_WRLCK, 10);
    let asked = tell(call(&other, get, &mut seen));
    let given = tell(call(&one, set, &mut lock(libc::F_UNLCK, 5)));
    let mut left = lock(libc::F_WRLCK, 10);
    let again = tell(call(&other, get, &mut left));
    format!("{taken} {asked} {} {} {given} {again} {} {}", seen.l_type, seen.l_len, left.l_start, left.l_len)
}

/// A pod with a volume that the kernel reads and writes by itself, and one that the server reads and writes.
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

    /// Kills the server at each of its stops while it answers.
    #[track_caller]
    fn withstands(&self, operations: &[Operation]) {
        for volume in ["host", "limited"] {
            let path = self.running.volume(volume);
            for operation in operations {
                let stops = self.is_as_on_disk(&path, operation);
                println!("{volume}: {}: {stops} kills", operation.name);
                assert!(stops > 1, "{volume}: {} asks the server", operation.name);
            }
        }
        let log = self.running.log();
        assert!(!log.contains("lacks"), "{log}");
    }

    #[track_caller]
    fn is_as_on_disk(&self, volume: &Path, operation: &Operation) -> usize {
        let Operation { name, prepare, act } = operation;
        let native = disk_directory();
        fs::set_permissions(native.path(), permissions(0o755)).expect("set");
        prepare(native.path());
        let (expected, left) = (act(native.path()), snapshot(native.path()));
        for stop in 0..STOPS {
            let directory = format!("{name} {stop}");
            let path = volume.join(&directory);
            fs::create_dir(&path).and_then(|()| fs::set_permissions(&path, permissions(0o755))).expect("made");
            self.running.freed(|| prepare(&path));
            let server = self.running.server();
            let (told, killed) = self.running.freed(|| killed_at(server, stop, || act(&path)));
            let what = format!("{name}, killed at stop {stop} in {}", volume.display());
            assert_eq!(told, expected, "{what}");
            assert_eq!(snapshot(&path), left, "{what}");
            let source = self.source.join(&directory);
            if source.exists() {
                assert_eq!(snapshot(&source), left, "{what}, behind the mount");
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
    Pod::new().withstands(&MAKING);
}

#[test]
fn a_kill_while_a_file_is_moved_or_removed_fails_no_call() {
    Pod::new().withstands(&MOVING);
}

#[test]
fn a_kill_while_bytes_are_read_or_written_is_not_noticed() {
    Pod::new().withstands(&BYTES);
}

#[test]
fn a_kill_while_attributes_are_read_or_changed_is_not_noticed() {
    Pod::new().withstands(&ATTRIBUTES);
}

#[test]
fn a_kill_while_a_directory_is_listed_is_not_noticed() {
    Pod::new().withstands(&LISTING);
}

#[test]
fn a_kill_while_locks_are_taken_and_given_is_not_noticed() {
    Pod::new().withstands(&LOCKS);
}

#[test]
fn the_successor_answers_requests_that_no_server_has_read() {
    let pod = Pod::new();
    for operation in [&MAKING[..], &MOVING, &BYTES, &ATTRIBUTES, &LISTING, &LOCKS].concat_all() {
        for volume in ["host", "limited"] {
            let path = pod.running.volume(volume).join(format!("{} unread", operation.name));
            let native = disk_directory();
            fs::set_permissions(native.path(), permissions(0o755)).expect("set");
            (operation.prepare)(native.path());
            let expected = (operation.act)(native.path());
            fs::create_dir(&path).and_then(|()| fs::set_permissions(&path, permissions(0o755))).expect("made");
            pod.running.freed(|| (operation.prepare)(&path));
            let server = pod.running.server();
            kill(server, Signal::SIGSTOP).expect("it is there");
            let told = pod.running.freed(|| {
                std::thread::scope(|scope| {
                    let told = scope.spawn(|| (operation.act)(&path));
                    kill(server, Signal::SIGKILL).expect("it is there");
                    told.join().expect("no panic")
                })
            });
            assert_eq!(told, expected, "{} in {volume}", operation.name);
            assert_eq!(snapshot(&path), snapshot(native.path()), "{} in {volume}", operation.name);
        }
    }
}

/// All operations of several lists.
trait ConcatAll<'a> {
    fn concat_all(&self) -> Vec<&'a Operation>;
}

impl<'a> ConcatAll<'a> for [&'a [Operation]; 6] {
    fn concat_all(&self) -> Vec<&'a Operation> {
        self.iter().flat_map(|list| list.iter()).collect()
    }
}
