//! Servers that are killed, and their successors: real mounts, real processes. This program, started again, is the
//! server. A keeper has the descriptors that a successor needs.

mod garbage;
mod opens;
mod outcomes;
mod spawner;
mod storm;
mod survivors;

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

use rustix::mount::{FsPickFlags, fsconfig_reconfigure, fspick};
use tempfile::TempDir;

use super::*;
use crate::mount::private::{MountOptions, PrivateMount, open_device};
use crate::region::VolumeKind;
use spawner::{FIRST, Process, ServerTask};

/// The longest start of a server. It takes milliseconds on a quiet machine.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A mounted directory whose server can be killed.
struct Rig {
    options: PassthroughOptions,
    region: Arc<Region>,
    source: PathBuf,
    mount: PrivateMount,
    /// `None` after a successor has failed: the test closes the device, and the kernel ends all requests.
    device: Mutex<Option<Arc<OwnedFd>>>,
    server: Mutex<Option<TestServer>>,
    /// The next server, which waits.
    successor: Mutex<Option<TestServer>>,
    _base: TempDir,
}

/// A server and its keeper. Both end when the channel does.
struct TestServer {
    process: Process,
    channel: UnixStream,
    keeper: i32,
}

impl Rig {
    fn new(options: PassthroughOptions) -> Self {
        let base = tempfile::tempdir().expect("a directory");
        let source = base.path().join("source");
        std::fs::create_dir(&source).expect("a directory");
        let device = open_device().expect("/dev/fuse");
        let opened = File::open(&source).expect("a directory");
        let mount = PrivateMount::of_source(device.as_fd(), opened.as_fd(), &MountOptions::default());
        let region = Arc::new(Region::create(VolumeKind::Passthrough).expect("a region"));
        let server = TestServer::start(&options, None, [device.as_fd(), region.as_fd(), opened.as_fd()]).begin();
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

    /// A volume whose data goes through the server, with a limit of `limit` bytes.
    fn limited(limit: u64) -> Self {
        Self::new(PassthroughOptions { limit: Some(limit), cache: CacheMode::Always, ..PassthroughOptions::default() })
    }

    /// A volume whose data goes through the kernel, if the kernel can do that.
    fn unlimited() -> Self {
        Self::new(PassthroughOptions { cache: CacheMode::Always, ..PassthroughOptions::default() })
    }

    /// The path of `name` in the mounted volume.
    fn at(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}/{name}", self.mount.as_fd().as_raw_fd()))
    }

    /// Lets the kernel forget the names and inodes that no process uses, by a remount that changes nothing.
    fn forget_unused(&self) {
        let flags = FsPickFlags::FSPICK_CLOEXEC | FsPickFlags::FSPICK_EMPTY_PATH;
        let picked = fspick(self.mount.as_fd(), "", flags).expect("a mount");
        fsconfig_reconfigure(&picked).expect("a remount");
    }

    /// Kills the server. Its successor is there already, and waits.
    fn kill(&self) {
        let (source, device) = (File::open(&self.source).expect("a directory"), self.device());
        let server = self.server.lock().expect("no panic");
        let server = server.as_ref().expect("a server");
        let descriptors = [device.as_fd(), self.region.as_fd(), source.as_fd()];
        let successor = TestServer::start(&self.options, Some(server.keeper), descriptors);
        *self.successor.lock().expect("no panic") = Some(successor);
        server.process.kill();
    }

    fn device(&self) -> Arc<OwnedFd> {
        self.device.lock().expect("no panic").clone().expect("a device")
    }

    fn succeed(&self) {
        let successor = self.successor.lock().expect("no panic").take().expect("a server was killed");
        // The predecessor's keeper ends when the successor has taken over its descriptors.
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

impl TestServer {
    /// Starts a server, which waits.
    fn start(options: &PassthroughOptions, keeper: Option<i32>, descriptors: [BorrowedFd<'_>; 3]) -> Self {
        let (process, channel) = Process::start(&ServerTask { keeper, options: options.clone() }, descriptors);
        channel.set_read_timeout(Some(TIMEOUT)).expect("a socket");
        Self { process, channel, keeper: 0 }
    }

    /// Lets the server serve. `None` if it does not get ready.
    fn begin(mut self) -> Option<Self> {
        self.channel.write_all(b"go\n").ok()?;
        let mut lines = BufReader::new(&self.channel).lines().map_while(Result::ok);
        self.keeper = lines.find_map(|line| line.split_once("ready ")?.1.parse().ok())?;
        Some(self)
    }
}

/// Not a test: the program of a started server.
#[test]
fn serving() {
    let Some(ServerTask { keeper: last, options }) = ServerTask::of_this_process() else { return };
    // SAFETY: the test that starts this program puts them there.
    let [device, region, source] = [0, 1, 2].map(|place| unsafe { OwnedFd::from_raw_fd(FIRST + place) });
    let mut go = [0; 3];
    if io::stdin().read_exact(&mut go).is_err() {
        return;
    }
    let region = Arc::new(Region::adopt(region).expect("a region"));
    let keeper;
    if let Some(last) = last {
        let gone = fetch(last, &descriptors(&region).expect("a region"));
        forget_descriptors(&region, &gone);
        keeper = keep();
        let loaded =
            load(Arc::clone(&region), None, Some(source), own_table(), options, Arc::default()).expect("loaded");
        assert_eq!(loaded.losses(), inherit::LostObjects::default(), "nothing is lost");
        loaded.start(device, None).expect("serving");
    } else {
        region.take_over();
        region.cells().keep_only(&[]);
        keeper = keep();
        serve(device, None, source, own_table(), options, Arc::clone(&region), None, Arc::default()).expect("serving");
    }
    println!("ready {keeper}");
    let _ = io::stdin().read_to_end(&mut Vec::new());
    std::process::exit(0);
}

/// The mounts that this process sees.
fn own_table() -> Arc<MountTable> {
    Arc::new(MountTable::open().expect("a mount table"))
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

/// Gets descriptors from a keeper, under the same numbers; returns those that it could not get.
fn fetch(keeper: i32, numbers: &[RawFd]) -> Vec<RawFd> {
    // SAFETY: numbers only.
    let keeper = unsafe { libc::syscall(libc::SYS_pidfd_open, keeper, 0) } as RawFd;
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
        // SAFETY: the number is free yet, or it is the copy itself.
        unsafe {
            if copy != *number {
                libc::dup3(copy, *number, libc::O_CLOEXEC);
                libc::close(copy);
            }
        }
    }
    missing
}
