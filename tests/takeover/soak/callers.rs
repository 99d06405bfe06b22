//! The callers in a passthrough volume during the soak. Each knows the right results of its calls.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use nix::fcntl::{Flock, FlockArg};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

/// A volume, with a directory for each caller.
pub struct Place {
    pub name: &'static str,
    path: PathBuf,
    /// The number of increments of the counter by all callers.
    raised: Mutex<u64>,
}

/// A caller's work: it gives its round to a function that repeats it, and checks what is left.
type Caller = fn(&Place, Repeat<'_>) -> Result<(), String>;

/// Repeats a round, which gets its number, until it fails or the load ends. Gives how many rounds there were.
pub type Repeat<'a> = &'a mut dyn FnMut(&mut dyn FnMut(u64) -> Result<(), String>) -> u64;

/// All of them.
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

/// Bytes that are read over and over.
const LENGTH: usize = 1 << 18;
/// Entries that are listed.
const ENTRIES: usize = 200;
/// The bytes of one write of a caller.
const BLOCK: usize = 3000;

impl Place {
    /// The volume at `path`.
    pub fn new(name: &'static str, path: &Path) -> Self {
        let place = Self { name, path: path.to_owned(), raised: Mutex::new(0) };
        fs::write(place.at("counter"), 0_u64.to_ne_bytes()).expect("written");
        fs::write(place.at("pattern"), pattern()).expect("written");
        ["names", "listed"].iter().for_each(|name| fs::create_dir(place.at(name)).expect("made"));
        (0..ENTRIES).for_each(|n| fs::write(place.at(&format!("listed/entry-{n:04}")), "").expect("written"));
        place
    }

    fn at(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

fn failed(what: &str) -> impl Fn(io::Error) -> String + '_ {
    move |error| format!("{what}: {error}")
}

fn expect<T: PartialEq + std::fmt::Debug>(what: &str, is: T, should: T) -> Result<(), String> {
    if is == should { Ok(()) } else { Err(format!("{what} is {is:?}, not {should:?}")) }
}

/// Every line that was appended is there, once and in its order.
fn append(place: &Place, repeat: Repeat<'_>) -> Result<(), String> {
    /// The number of lines after which the caller checks and truncates the file, so that the last check takes no longer than
    /// any other.
    const LINES: u64 = 10_000;
    let path = place.at("appended");
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

/// Every written block is in the file, whether the file is synced, or closed and opened anew, in between.
fn write(place: &Place, repeat: Repeat<'_>) -> Result<(), String> {
    let path = place.at("written");
    let block = |round: u64| vec![(round % 251) as u8; BLOCK];
    let mut file = File::create_new(&path).map_err(failed("create"))?;
    let rounds = repeat(&mut |round| {
        let at = (round % 100) * BLOCK as u64;
        file.write_all_at(&block(round), at).map_err(failed("write"))?;
        if round % 7 == 0 {
            file.sync_data().map_err(failed("sync"))?;
        }
        if round % 5 == 0 {
            file = File::options().read(true).write(true).open(&path).map_err(failed("open"))?;
        }
        let length = file.metadata().map_err(failed("look"))?.len();
        expect("the length", length, (round.min(99) + 1) * BLOCK as u64)
    });
    let bytes = fs::read(&path).map_err(failed("read"))?;
    let last = |place: u64| (0..rounds).rev().find(|round| round % 100 == place);
    let expected: Vec<u8> = (0..100).filter_map(last).flat_map(block).collect();
    if bytes == expected { Ok(()) } else { Err("the file is not what was written".to_owned()) }
}

fn pattern() -> Vec<u8> {
    (0..LENGTH).map(|at| (at % 253) as u8).collect()
}

/// An unchanged file is always the same, by `read(2)` and through memory, in the cache and out of it.
fn read(place: &Place, repeat: Repeat<'_>) -> Result<(), String> {
    let (file, pattern) = (File::open(place.at("pattern")).map_err(failed("open"))?, pattern());
    repeat(&mut |round| {
        let uncached = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
        uncached.map_err(|errno| failed("advice")(errno.into()))?;
        if round % 2 == 0 {
            let mut bytes = vec![0; LENGTH];
            file.read_exact_at(&mut bytes, 0).map_err(failed("read"))?;
            return if bytes == pattern { Ok(()) } else { Err("what is read is torn".to_owned()) };
        }
        let mapped = Mapped::new(&file).map_err(failed("map"))?;
        if mapped.bytes() == pattern { Ok(()) } else { Err("what is mapped is torn".to_owned()) }
    });
    Ok(())
}

/// A file in memory.
struct Mapped(*mut libc::c_void);

impl Mapped {
    fn new(file: &File) -> io::Result<Self> {
        // SAFETY: a new mapping at an address the kernel chooses aliases nothing.
        let at =
            unsafe { libc::mmap(std::ptr::null_mut(), LENGTH, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(Self(at)) }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the file is as long as the mapping, and no process changes it.
        unsafe { std::slice::from_raw_parts(self.0.cast(), LENGTH) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: it was mapped with this length, and every reference into it has ended.
        unsafe { libc::munmap(self.0, LENGTH) };
    }
}

/// Names are made, moved and removed; each call does its work once.
fn names(place: &Place, repeat: Repeat<'_>) -> Result<(), String> {
    let directory = place.at("names");
    repeat(&mut |round| {
        let at = |name: &str| directory.join(format!("{name} {round}"));
        let (one, other, moved) = (at("a"), at("b"), at("c"));
        let mut file = File::create_new(&one).map_err(failed("create"))?;
        let again = File::create_new(&one).expect_err("it is there").kind();
        expect("a second one", again, io::ErrorKind::AlreadyExists)?;
        fs::hard_link(&one, &other).map_err(failed("link"))?;
        fs::rename(&other, &moved).map_err(failed("rename"))?;
        symlink(&one, &other).map_err(failed("symlink"))?;
        fs::create_dir(at("d")).map_err(failed("mkdir"))?;
        mkfifo(&at("p"), Mode::S_IRUSR).map_err(|errno| failed("mkfifo")(errno.into()))?;
        fs::rename(at("d"), at("e")).map_err(failed("rename of a directory"))?;
        fs::remove_file(&one).map_err(failed("unlink"))?;
        fs::remove_file(&moved).map_err(failed("unlink of the other"))?;
        let gone = fs::remove_file(&moved).expect_err("it is gone").kind();
        expect("a second removal", gone, io::ErrorKind::NotFound)?;
        match use_nameless(&mut file) {
            // Only the server and its keeper had it open.
            Err(error) if error.raw_os_error() == Some(libc::ESTALE) && place.name == "limited" => {}
            text => expect("the content", text.map_err(failed("a file without a name"))?.as_str(), "still here")?,
        }
        fs::remove_file(&other).map_err(failed("unlink of a link"))?;
        fs::remove_file(at("p")).map_err(failed("unlink of a fifo"))?;
        fs::remove_dir(at("e")).map_err(failed("rmdir"))?;
        let left = fs::read_dir(&directory).map_err(failed("list"))?.count();
        expect("what is left", left, 0)
    });
    Ok(())
}

/// Writes a file that has no name any more, and reads it.
fn use_nameless(file: &mut File) -> io::Result<String> {
    file.write_all(b"still here")?;
    file.rewind()?;
    io::read_to_string(File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))?)
}

/// A listing has every entry once, also when the server changes in its middle.
fn list(place: &Place, repeat: Repeat<'_>) -> Result<(), String> {
    let directory = place.at("listed");
    repeat(&mut |_| {
        let mut names = Vec::new();
        for entry in fs::read_dir(&directory).map_err(failed("list"))? {
            names.push(entry.map_err(failed("list on"))?.file_name());
        }
        names.sort_unstable();
        names.dedup();
        expect("how many entries there are", names.len(), ENTRIES)
    });
    Ok(())
}

/// A number that is raised under a lock is raised each time.
fn count(place: &Place, repeat: Repeat<'_>) -> Result<(), String> {
    let path = place.at("counter");
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
    let mut raised = place.raised.lock().expect("no panic");
    *raised += rounds;
    let number = read(&File::open(&path).map_err(failed("open"))?)?;
    // The caller that ends last sees all increments.
    if number >= *raised { Ok(()) } else { Err(format!("the counter is {number} after {raised} rounds")) }
}

/// The kernel never gives a held lock to another process.
fn hold(place: &Place, repeat: Repeat<'_>) -> Result<(), String> {
    let path = place.at("held");
    let file = File::create_new(&path).map_err(failed("create"))?;
    let held = Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, errno)| failed("lock")(errno.into()))?;
    repeat(&mut |_| {
        let file = File::open(&path).map_err(failed("open"))?;
        match Flock::lock(file, FlockArg::LockSharedNonblock) {
            Err((_, nix::errno::Errno::EWOULDBLOCK)) => Ok(()),
            Err((_, errno)) => Err(failed("lock")(errno.into())),
            Ok(_) => Err("a lock that is held was given away".to_owned()),
        }
    });
    held.unlock().map(drop).map_err(|(_, errno)| failed("unlock")(errno.into()))
}
