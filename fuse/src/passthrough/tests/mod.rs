//! Servers that are killed, and their successors: real mounts, real processes. This program, started again, is the
//! server; what a successor needs of its descriptors, a keeper has.

mod garbage;
mod outcomes;
mod storm;
mod survivors;

use std::fs::File;
use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Mutex;

use tempfile::TempDir;

use super::*;
use crate::mount::private::{MountOptions, PrivateMount, open_device};
use crate::region::Kind;

/// Tells this program that it is a server: the keeper of its predecessor's descriptors, or `new`.
const ROLE: &str = "PODFS_TEST_SERVER";
/// How the volume is served, as JSON.
const OPTIONS: &str = "PODFS_TEST_OPTIONS";
/// Where the server finds its descriptors: device, region, source.
const FIRST: RawFd = 3;

/// A mounted directory whose server can be killed.
struct Rig {
    options: Options,
    region: Arc<Region>,
    source: PathBuf,
    mount: PrivateMount,
    /// None once everything is lost: then nobody waits for an answer any more.
    device: Mutex<Option<Arc<OwnedFd>>>,
    server: Mutex<Option<Server>>,
    /// The one that is to succeed it, and waits.
    successor: Mutex<Option<Server>>,
    _base: TempDir,
}

/// A server and its keeper. Both end when their standard input does.
struct Server {
    process: Child,
    output: Lines<BufReader<ChildStdout>>,
    input: ChildStdin,
    keeper: String,
}

impl Rig {
    fn new(options: Options) -> Self {
        let base = tempfile::tempdir().expect("a directory");
        let source = base.path().join("source");
        std::fs::create_dir(&source).expect("a directory");
        let device = open_device().expect("/dev/fuse");
        let opened = File::open(&source).expect("a directory");
        let mount = PrivateMount::of_source(device.as_fd(), opened.as_fd(), &MountOptions::default());
        let region = Arc::new(Region::create(Kind::Passthrough).expect("a region"));
        let server = Server::spawn(&options, "new", &[device.as_fd(), region.as_fd(), opened.as_fd()]).begin();
        let (mount, device) = (mount.expect("a mount"), Mutex::new(Some(Arc::new(device))));
        assert!(server.is_some(), "the server gets ready");
        Self {
            options,
            region,
            source,
            mount,
            device,
            server: Mutex::new(server),
            successor: Mutex::default(),
            _base: base,
        }
    }

    /// Whose data goes through the server, with so many bytes to fill.
    fn limited(limit: u64) -> Self {
        Self::new(Options { limit: Some(limit), cache: Cache::Always, ..Options::default() })
    }

    /// Whose data goes through the kernel, if it can.
    fn unlimited() -> Self {
        Self::new(Options { cache: Cache::Always, ..Options::default() })
    }

    /// What is shown under that name.
    fn at(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}/{name}", self.mount.as_fd().as_raw_fd()))
    }

    /// A program that is started closes what it is not to have, which the kernel tells the server; so the successor is
    /// started before.
    fn kill(&self) {
        let (source, device) = (File::open(&self.source).expect("a directory"), self.device());
        let mut server = self.server.lock().expect("no panic");
        let server = server.as_mut().expect("a server");
        let descriptors = [device.as_fd(), self.region.as_fd(), source.as_fd()];
        *self.successor.lock().expect("no panic") = Some(Server::spawn(&self.options, &server.keeper, &descriptors));
        server.process.kill().expect("it is a child");
        server.process.wait().expect("it is a child");
    }

    fn device(&self) -> Arc<OwnedFd> {
        self.device.lock().expect("no panic").clone().expect("a device")
    }

    fn succeed(&self) {
        let successor = self.successor.lock().expect("no panic").take().expect("a server was killed");
        // The keeper before goes when the successor has what it kept.
        let ready = successor.begin();
        let succeeded = ready.is_some();
        *self.server.lock().expect("no panic") = ready;
        if !succeeded {
            drop(self.device.lock().expect("no panic").take());
            panic!("there is no successor");
        }
    }

    fn kill_and_succeed(&self) {
        self.kill();
        self.succeed();
    }
}

impl Server {
    /// Starts one, which waits.
    fn spawn(options: &Options, role: &str, descriptors: &[BorrowedFd<'_>; 3]) -> Self {
        let numbers = descriptors.map(|descriptor| descriptor.as_raw_fd());
        let mut command = Command::new("/proc/self/exe");
        command.args(["--exact", "passthrough::tests::serving", "--nocapture"]);
        command.env(ROLE, role).env(OPTIONS, serde_json::to_string(options).expect("JSON"));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        // SAFETY: only descriptors are copied, to numbers that are the child's own.
        unsafe {
            command.pre_exec(move || {
                // Away from where they are to be, so that none is overwritten before it is copied.
                let away = numbers.map(|number| libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 100));
                for (place, number) in (FIRST..).zip(away) {
                    if libc::dup2(number, place) == -1 {
                        return Err(io::Error::last_os_error());
                    }
                }
                Ok(())
            });
        }
        let mut process = command.spawn().expect("this program can be started again");
        let input = process.stdin.take().expect("a pipe");
        let output = BufReader::new(process.stdout.take().expect("a pipe")).lines();
        Self { process, output, input, keeper: String::new() }
    }

    /// Lets it serve. None if it ends before it is ready.
    fn begin(mut self) -> Option<Self> {
        self.input.write_all(b"go\n").ok()?;
        let ready = |line: io::Result<String>| Some(line.ok()?.split_once("ready ")?.1.to_owned());
        self.keeper = self.output.find_map(ready)?;
        Some(self)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// No test: what a started server does.
#[test]
fn serving() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let options: Options = serde_json::from_str(&std::env::var(OPTIONS).expect("options")).expect("JSON");
    // SAFETY: whoever starts this program puts them there.
    let [device, region, source] = [0, 1, 2].map(|place| unsafe { OwnedFd::from_raw_fd(FIRST + place) });
    let mut go = [0; 3];
    if io::stdin().read_exact(&mut go).is_err() {
        return;
    }
    let region = Arc::new(Region::adopt(region).expect("a region"));
    let keeper;
    if role == "new" {
        region.take_over();
        region.cells().keep_only(&[]);
        keeper = keep();
        serve(device, source, options, Arc::clone(&region), Arc::default()).expect("serving");
    } else {
        let missing = fetch(&role, &descriptors(&region).expect("a region"));
        keeper = keep();
        let loaded = load(Arc::clone(&region), Some(source), options, &missing, Arc::default()).expect("loaded");
        assert_eq!(loaded.losses(), tables::Losses::default(), "nothing is lost");
        loaded.start(device).expect("serving");
    }
    println!("ready {keeper}");
    let _ = io::stdin().read_to_end(&mut Vec::new());
    std::process::exit(0);
}

/// A process that shares this one's descriptors, and outlives it until standard input ends.
fn keep() -> i32 {
    let flags = libc::CLONE_FILES | libc::SIGCHLD;
    // SAFETY: like fork; the child makes system calls only.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
    if pid == 0 {
        let mut input = libc::pollfd { fd: 0, events: 0, revents: 0 };
        // SAFETY: as above; the array outlives the call.
        while unsafe { libc::poll(&raw mut input, 1, -1) } != 1 {}
        // SAFETY: nothing of the parent's is run.
        unsafe { libc::_exit(0) };
    }
    i32::try_from(pid).ok().filter(|pid| *pid > 0).expect("a keeper")
}

/// Gets descriptors from a keeper, under the same numbers; those that cannot be had are told.
fn fetch(keeper: &str, numbers: &[RawFd]) -> Vec<RawFd> {
    let pid: libc::pid_t = keeper.parse().expect("a process");
    // SAFETY: numbers only.
    let keeper = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) } as RawFd;
    assert!(keeper >= 0, "the keeper lives");
    // SAFETY: it was just made.
    let keeper = unsafe { OwnedFd::from_raw_fd(keeper) };
    let mut missing = Vec::new();
    for number in numbers {
        // SAFETY: numbers only.
        let copy = unsafe { libc::syscall(libc::SYS_pidfd_getfd, keeper.as_raw_fd(), *number, 0) } as RawFd;
        if copy < 0 {
            missing.push(*number);
            continue;
        }
        // SAFETY: nobody has the number yet, or it is the copy itself.
        unsafe {
            if copy != *number {
                libc::dup3(copy, *number, libc::O_CLOEXEC);
                libc::close(copy);
            }
        }
    }
    missing
}
