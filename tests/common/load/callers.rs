//! The callers that use a passthrough volume during the soak tests. Each checks the results of its calls.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use nix::fcntl::{Flock, FlockArg};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

/// A volume that the callers use, with the files that they need.
pub struct TestVolume {
    pub name: &'static str,
    path: PathBuf,
    /// How often all callers together have incremented the counter.
    increments: Mutex<u64>,
}

/// The work of a caller: it passes one round of its calls to a [`Repeat`] function, and checks the files after the last round.
type Caller = fn(&TestVolume, Repeat<'_>) -> Result<(), String>;

/// A function that repeats a round until it fails or the load ends. The round gets its number. Returns the number of rounds.
pub type Repeat<'a> = &'a mut dyn FnMut(&mut dyn FnMut(u64) -> Result<(), String>) -> u64;

/// The callers, and their names for messages.
pub const CALLERS: [(&str, Caller); 8] = [
    ("appends", append),
    ("writes", write),
    ("reads", read),
    ("names", names),
    ("listings", list),
    ("a counter under a lock", count),
    ("the same counter", count),
    ("a lock that is held", hold),
];

/// The length of the file that [`read()`] reads.
const LENGTH: usize = 1 << 18;
/// The number of entries of the directory that [`list()`] lists.
const ENTRIES: usize = 200;
/// The length of one write of [`write()`].
const BLOCK: usize = 3000;

impl TestVolume {
    /// The volume at `path`.
    pub fn new(name: &'static str, path: &Path) -> Self {
        let volume = Self { name, path: path.to_owned(), increments: Mutex::new(0) };
        fs::write(volume.at("counter"), 0_u64.to_ne_bytes()).expect("written");
        fs::write(volume.at("pattern"), pattern()).expect("written");
        ["names", "listed"].iter().for_each(|name| fs::create_dir(volume.at(name)).expect("made"));
        (0..ENTRIES).for_each(|n| fs::write(volume.at(&format!("listed/entry-{n:04}")), "").expect("written"));
        volume
    }

    fn at(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

/// A function that adds the name of a failed call to its error.
fn failed(call: &str) -> impl Fn(io::Error) -> String + '_ {
    move |error| format!("{call}: {error}")
}

fn expect<T: PartialEq + std::fmt::Debug>(property: &str, actual: T, expected: T) -> Result<(), String> {
    if actual == expected { Ok(()) } else { Err(format!("{property} is {actual:?}, not {expected:?}")) }
}

/// Appends lines, and checks that the file has every line once, and in the right order.
fn append(volume: &TestVolume, repeat: Repeat<'_>) -> Result<(), String> {
    /// The number of lines after which the caller checks and truncates the file, so that the last check takes no longer than
    /// any other.
    const LINES: u64 = 10_000;
    let path = volume.at("appended");
    let mut file = OpenOptions::new().append(true).create_new(true).open(&path).map_err(failed("create"))?;
    let check = |rounds: u64| {
        let text = fs::read_to_string(&path).map_err(failed("read"))?;
        let lines: String = (rounds - rounds % LINES..rounds).map(|round| format!("line {round}\n")).collect();
        if text == lines { Ok(()) } else { Err(format!("{} bytes after {rounds} lines", text.len())) }
    };
    let rounds = repeat(&mut |round| {
        file.write_all(format!("line {round}\n").as_bytes()).map_err(failed("append"))?;
        if round % LINES == LINES - 1 {
            let text = fs::read_to_string(&path).map_err(failed("read"))?;
            expect("the number of lines", text.lines().count() as u64, LINES)?;
            file.set_len(0).map_err(failed("truncate"))?;
        }
        Ok(())
    });
    check(rounds)
}

/// Writes blocks, and sometimes syncs the file, or closes it and opens it again. Checks that every written block is in the
/// file.
fn write(volume: &TestVolume, repeat: Repeat<'_>) -> Result<(), String> {
    let path = volume.at("written");
    let block = |round: u64| vec![(round % 251) as u8; BLOCK];
    let mut file = File::create_new(&path).map_err(failed("create"))?;
    let rounds = repeat(&mut |round| {
        let offset = (round % 100) * BLOCK as u64;
        file.write_all_at(&block(round), offset).map_err(failed("write"))?;
        if round % 7 == 0 {
            file.sync_data().map_err(failed("sync"))?;
        }
        if round % 5 == 0 {
            file = File::options().read(true).write(true).open(&path).map_err(failed("open"))?;
        }
        let length = file.metadata().map_err(failed("stat"))?.len();
        expect("the length", length, (round.min(99) + 1) * BLOCK as u64)
    });
    let bytes = fs::read(&path).map_err(failed("read"))?;
    let last_round = |index: u64| (0..rounds).rev().find(|round| round % 100 == index);
    let expected: Vec<u8> = (0..100).filter_map(last_round).flat_map(block).collect();
    if bytes == expected { Ok(()) } else { Err("the file does not contain the written blocks".to_owned()) }
}

fn pattern() -> Vec<u8> {
    (0..LENGTH).map(|at| (at % 253) as u8).collect()
}

/// Reads a file that no process changes, by `read(2)` and through a mapping, after the kernel has dropped its cached pages.
/// Checks that the bytes are always the same.
fn read(volume: &TestVolume, repeat: Repeat<'_>) -> Result<(), String> {
    let (file, pattern) = (File::open(volume.at("pattern")).map_err(failed("open"))?, pattern());
    repeat(&mut |round| {
        let uncached = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
        uncached.map_err(|errno| failed("advice")(errno.into()))?;
        if round % 2 == 0 {
            let mut bytes = vec![0; LENGTH];
            file.read_exact_at(&mut bytes, 0).map_err(failed("read"))?;
            return if bytes == pattern { Ok(()) } else { Err("read(2) returned wrong bytes".to_owned()) };
        }
        let mapped = Mapped::new(&file).map_err(failed("map"))?;
        if mapped.bytes().map_err(failed("load from the mapping"))? == pattern {
            Ok(())
        } else {
            Err("the mapping has wrong bytes".to_owned())
        }
    });
    Ok(())
}

/// A mapping of the first [`LENGTH`] bytes of a file.
struct Mapped(*mut libc::c_void);

impl Mapped {
    fn new(file: &File) -> io::Result<Self> {
        // SAFETY: a new mapping at an address the kernel chooses aliases nothing.
        let address =
            unsafe { libc::mmap(std::ptr::null_mut(), LENGTH, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        if address == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(Self(address)) }
    }

    /// The bytes of the mapping. If the kernel cannot read a page, the result is an error: an ordinary load would end the test program by
    /// SIGBUS, which leaves the mounts and processes of all its tests.
    fn bytes(&self) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; LENGTH];
        let mapped = libc::iovec { iov_base: self.0, iov_len: LENGTH };
        let copied = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: LENGTH };
        // SAFETY: the kernel writes no more than `LENGTH` bytes to `bytes`, which has as many.
        let read = unsafe { libc::process_vm_readv(libc::getpid(), &copied, 1, &mapped, 1, 0) };
        match usize::try_from(read) {
            Ok(LENGTH) => Ok(bytes),
            Ok(_) => Err(io::Error::from_raw_os_error(libc::EFAULT)),
            Err(_) => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping has this length, and no reference into it exists any more.
        unsafe { libc::munmap(self.0, LENGTH) };
    }
}

/// Makes, renames and removes files, links and directories, and checks that each call has its effect exactly once.
fn names(volume: &TestVolume, repeat: Repeat<'_>) -> Result<(), String> {
    let directory = volume.at("names");
    repeat(&mut |round| {
        let at = |name: &str| directory.join(format!("{name} {round}"));
        let (path, link, renamed) = (at("a"), at("b"), at("c"));
        let mut file = File::create_new(&path).map_err(failed("create"))?;
        let again = File::create_new(&path).expect_err("the file exists").kind();
        expect("the error of a second creation", again, io::ErrorKind::AlreadyExists)?;
        fs::hard_link(&path, &link).map_err(failed("link"))?;
        fs::rename(&link, &renamed).map_err(failed("rename"))?;
        symlink(&path, &link).map_err(failed("symlink"))?;
        fs::create_dir(at("d")).map_err(failed("mkdir"))?;
        mkfifo(&at("p"), Mode::S_IRUSR).map_err(|errno| failed("mkfifo")(errno.into()))?;
        fs::rename(at("d"), at("e")).map_err(failed("rename of a directory"))?;
        fs::remove_file(&path).map_err(failed("unlink"))?;
        fs::remove_file(&renamed).map_err(failed("unlink of the renamed link"))?;
        let again = fs::remove_file(&renamed).expect_err("the file is removed").kind();
        expect("the error of a second removal", again, io::ErrorKind::NotFound)?;
        match use_nameless(&mut file) {
            // In this volume only the server and its keeper have the file open, and both were killed at once.
            Err(error) if error.raw_os_error() == Some(libc::ESTALE) && volume.name == "limited" => {}
            text => expect("the content", text.map_err(failed("a file without a name"))?.as_str(), "still here")?,
        }
        fs::remove_file(&link).map_err(failed("unlink of a symbolic link"))?;
        fs::remove_file(at("p")).map_err(failed("unlink of a fifo"))?;
        fs::remove_dir(at("e")).map_err(failed("rmdir"))?;
        let remaining = fs::read_dir(&directory).map_err(failed("list"))?.count();
        expect("the number of remaining entries", remaining, 0)
    });
    Ok(())
}

/// Writes to a file that has no name any more, and reads it.
fn use_nameless(file: &mut File) -> io::Result<String> {
    file.write_all(b"still here")?;
    file.rewind()?;
    io::read_to_string(File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))?)
}

/// Lists a directory, and checks that the listing has every entry once, also when another server continues it.
fn list(volume: &TestVolume, repeat: Repeat<'_>) -> Result<(), String> {
    let directory = volume.at("listed");
    repeat(&mut |_| {
        let mut names = Vec::new();
        for entry in fs::read_dir(&directory).map_err(failed("list"))? {
            names.push(entry.map_err(failed("continue to list"))?.file_name());
        }
        names.sort_unstable();
        names.dedup();
        expect("the number of entries", names.len(), ENTRIES)
    });
    Ok(())
}

/// Increments a counter in a file under a lock, and checks that no increment is lost. Two callers do this with the same file.
fn count(volume: &TestVolume, repeat: Repeat<'_>) -> Result<(), String> {
    let path = volume.at("counter");
    let read = |file: &File| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, 0).map_err(failed("read")).map(|()| u64::from_ne_bytes(bytes))
    };
    let rounds = repeat(&mut |_| {
        let file = File::options().read(true).write(true).open(&path).map_err(failed("open"))?;
        let lock = Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, errno)| failed("lock")(errno.into()))?;
        let number = read(&lock)?;
        lock.write_all_at(&(number + 1).to_ne_bytes(), 0).map_err(failed("write"))?;
        lock.unlock().map(drop).map_err(|(_, errno)| failed("unlock")(errno.into()))
    });
    let mut increments = volume.increments.lock().expect("no panic");
    *increments += rounds;
    let number = read(&File::open(&path).map_err(failed("open"))?)?;
    // The caller that ends last must find the increments of all callers.
    if number >= *increments { Ok(()) } else { Err(format!("the counter is {number} after {increments} increments")) }
}

/// Holds a lock, and checks that no other open file gets it.
fn hold(volume: &TestVolume, repeat: Repeat<'_>) -> Result<(), String> {
    let path = volume.at("held");
    let file = File::create_new(&path).map_err(failed("create"))?;
    let held = Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, errno)| failed("lock")(errno.into()))?;
    repeat(&mut |_| {
        let file = File::open(&path).map_err(failed("open"))?;
        match Flock::lock(file, FlockArg::LockSharedNonblock) {
            Err((_, nix::errno::Errno::EWOULDBLOCK)) => Ok(()),
            Err((_, errno)) => Err(failed("lock")(errno.into())),
            Ok(_) => Err("another open file got the held lock".to_owned()),
        }
    });
    held.unlock().map(drop).map_err(|(_, errno)| failed("unlock")(errno.into()))
}
