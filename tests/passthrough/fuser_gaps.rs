//! The features that the crate `fuser` lacks for passthrough volumes. Because of them, podfs has its own FUSE session
//! (docs/design/sessions.md). A test that fails here shows that a newer `fuser` closes a gap; then reconsider the decision.
//!
//! `fuser` reads requests from a socket, on which the tests write what a kernel would. So each request is exactly the one that is
//! meant. They do not show how a kernel goes on after the answer.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, Generation, INodeNo, InitFlags, KernelConfig, LockOwner,
    ReplyEmpty, ReplyEntry, Request, Session, SessionACL,
};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{AddressFamily, MsgFlags, Shutdown, SockFlag, SockType, recv, send, shutdown, socketpair};

use crate::common::eventually;

// Operations and flags of the protocol: include/uapi/linux/fuse.h.
const LOOKUP: u32 = 1;
const SETXATTR: u32 = 21;
const INIT: u32 = 26;
const SETLKW: u32 = 33;
const INTERRUPT: u32 = 36;
const LK_FLOCK: u32 = 1;
const SETXATTR_EXT: u32 = 1 << 29;
const INIT_EXT: u32 = 1 << 30;
/// The number of a request.
const UNIQUE: u64 = 7;
/// The offsets of `nodeid` and `attr.ino` in a `fuse_entry_out`.
const NODE_ID: usize = 0;
const INODE: usize = 40;

/// A request, as `fuser` passes it to the file system.
#[derive(Debug, PartialEq)]
enum Asked {
    Lock { start: u64, end: u64, kind: i32, waits: bool },
    Attribute { name: String },
    MostBytes(u32),
}

struct Recorder {
    asked: Sender<Asked>,
    wanted: InitFlags,
}

impl Filesystem for Recorder {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let most = config.set_max_write(u32::MAX).expect_err("there is a limit");
        self.asked.send(Asked::MostBytes(most)).expect("the test listens");
        config.add_capabilities(self.wanted).expect("the kernel offers it");
        Ok(())
    }

    fn lookup(&self, _: &Request, _: INodeNo, _: &OsStr, reply: ReplyEntry) {
        reply.entry(&Duration::ZERO, &attributes(42), Generation(0));
    }

    fn setlk(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: LockOwner,
        start: u64,
        end: u64,
        kind: i32,
        _: u32,
        waits: bool,
        reply: ReplyEmpty,
    ) {
        self.asked.send(Asked::Lock { start, end, kind, waits }).expect("the test listens");
        // It says nothing of whether the kernel has taken the answer.
        let () = reply.ok();
    }

    fn setxattr(&self, _: &Request, _: INodeNo, name: &OsStr, _: &[u8], _: i32, _: u32, reply: ReplyEmpty) {
        self.asked.send(Asked::Attribute { name: name.to_string_lossy().into_owned() }).expect("the test listens");
        reply.error(Errno::EPERM);
    }
}

fn attributes(number: u64) -> FileAttr {
    FileAttr {
        ino: INodeNo(number),
        size: 0,
        blocks: 0,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: FileType::RegularFile,
        perm: 0o644,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

/// The kernel's side of a session of `fuser`.
struct Kernel {
    socket: OwnedFd,
    asked: Receiver<Asked>,
    session: JoinHandle<io::Result<()>>,
}

impl Kernel {
    /// Begins a session that asks for these features, which this kernel has.
    fn with(wanted: InitFlags) -> Kernel {
        let (socket, device) = pair();
        let (asked, hears) = channel();
        let session = thread::spawn(move || session(device, Recorder { asked, wanted })?.run());
        let kernel = Kernel { socket, asked: hears, session };
        kernel.send(INIT, &init());
        let (error, _) = kernel.answer();
        assert_eq!(error, 0, "INIT is answered");
        assert_eq!(
            kernel.asked.recv(),
            Ok(Asked::MostBytes(16 << 20)),
            "writes of up to 16 MiB fit into its only buffer"
        );
        kernel
    }

    fn send(&self, operation: u32, body: &[u8]) {
        send(self.socket.as_raw_fd(), &request(operation, body), MsgFlags::empty()).expect("it is taken whole");
    }

    /// The error of the next answer, and its body.
    fn answer(&self) -> (i32, Vec<u8>) {
        let mut answer = vec![0; 4096];
        let length = recv(self.socket.as_raw_fd(), &mut answer, MsgFlags::empty()).expect("an answer");
        assert!(length >= 16, "the session has ended: {:?}", self.session.is_finished());
        let error = i32::from_ne_bytes(answer[4..8].try_into().expect("four bytes"));
        (error, answer[16..length].to_vec())
    }

    /// Closes the kernel's end, and returns the result of the session.
    fn end(self) -> io::Result<()> {
        drop(self.socket);
        self.session.join().expect("it does not panic in this thread")
    }
}

fn pair() -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).expect("a socket pair")
}

fn session(device: OwnedFd, filesystem: Recorder) -> io::Result<Session<Recorder>> {
    Session::from_fd(filesystem, device, SessionACL::All, Config::default())
}

/// The body of `fuse_init_in`: version 7.45, and all features of the first word but that of a second one.
fn init() -> Vec<u8> {
    let mut body = Vec::new();
    for word in [7, 45, 1 << 17, !INIT_EXT] {
        body.extend(u32::to_ne_bytes(word));
    }
    body.resize(64, 0);
    body
}

/// A request about node 1: its `fuse_in_header`, and what follows.
fn request(operation: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(u32::to_ne_bytes(40 + u32::try_from(body.len()).expect("a few")));
    bytes.extend(u32::to_ne_bytes(operation));
    bytes.extend(u64::to_ne_bytes(UNIQUE));
    bytes.extend(u64::to_ne_bytes(1));
    bytes.resize(40, 0);
    bytes.extend(body);
    bytes
}

/// The body of a `SETLKW` for a whole file: `fuse_lk_in`.
fn lock(flags: u32) -> Vec<u8> {
    let mut body = Vec::new();
    for word in [5, 6, 0, i64::MAX as u64] {
        body.extend(u64::to_ne_bytes(word));
    }
    for word in [libc::F_WRLCK as u32, 99, flags, 0] {
        body.extend(u32::to_ne_bytes(word));
    }
    body
}

#[test]
fn fuser_answers_an_interrupt_with_enosys_after_which_a_kernel_sends_none() {
    let kernel = Kernel::with(InitFlags::empty());
    kernel.send(INTERRUPT, &u64::to_ne_bytes(UNIQUE));
    assert_eq!(kernel.answer().0, -libc::ENOSYS);
}

#[test]
fn fuser_does_not_distinguish_locks_of_flock_from_those_of_fcntl() {
    let kernel = Kernel::with(InitFlags::empty());
    let asked = [LK_FLOCK, 0].map(|flags| {
        kernel.send(SETLKW, &lock(flags));
        assert_eq!(kernel.answer().0, 0);
        kernel.asked.recv().expect("it is asked")
    });
    assert_eq!(asked[0], asked[1]);
    let end = i64::MAX as u64;
    assert_eq!(asked[0], Asked::Lock { start: 0, end, kind: i32::from(libc::F_WRLCK as i16), waits: true });
}

#[test]
fn fuser_takes_the_number_of_an_inode_for_that_of_its_node() {
    let kernel = Kernel::with(InitFlags::empty());
    kernel.send(LOOKUP, b"name\0");
    let (error, entry) = kernel.answer();
    assert_eq!(error, 0);
    let number = |at: usize| u64::from_ne_bytes(entry[at..at + 8].try_into().expect("eight bytes"));
    assert_eq!((number(NODE_ID), number(INODE)), (42, 42));
}

#[test]
fn fuser_panics_at_a_setxattr_of_the_form_that_it_can_ask_for() {
    let kernel = Kernel::with(InitFlags::from_bits_retain(u64::from(SETXATTR_EXT)));
    // size, flags, setxattr_flags, padding; then name and value.
    let mut body: Vec<u8> = [3_u32, 0, 1, 0].into_iter().flat_map(u32::to_ne_bytes).collect();
    body.extend(b"user.a\0abc");
    kernel.send(SETXATTR, &body);
    let error = kernel.end().expect_err("the session ends with an error");
    assert!(error.to_string().contains("panicked"), "{error}");
}

#[test]
fn fuser_asks_a_device_that_does_not_block_again_and_again() {
    let (kernel, device) = pair();
    fcntl(&device, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).expect("set");
    let (tell, told) = channel();
    let waiting = thread::spawn(move || {
        tell.send(rustix::thread::gettid()).expect("the test listens");
        session(device, Recorder { asked: channel().0, wanted: InitFlags::empty() }).map(drop)
    });
    let thread = told.recv().expect("its number").as_raw_nonzero();
    // The first number is how long it has run, in nanoseconds.
    let ran = || {
        let text = fs::read_to_string(format!("/proc/self/task/{thread}/schedstat")).expect("it runs");
        text.split(' ').next().and_then(|ran| ran.parse::<u64>().ok()).expect("a number")
    };
    let start = ran();
    eventually("it computes while it waits", || ran() > start + 20_000_000);
    drop(kernel);
    let _how_it_ends = waiting.join().expect("it does not panic");
}

#[test]
fn fuser_continues_after_an_answer_that_it_could_not_deliver() {
    let (socket, device) = pair();
    let (asked, hears) = channel();
    let served = thread::spawn(move || session(device, Recorder { asked, wanted: InitFlags::empty() })?.run());
    send(socket.as_raw_fd(), &request(INIT, &init()), MsgFlags::empty()).expect("sent");
    send(socket.as_raw_fd(), &request(SETLKW, &lock(0)), MsgFlags::empty()).expect("sent");
    // From here on, no answer can be delivered; fuser does not report that to the file system.
    shutdown(socket.as_raw_fd(), Shutdown::Read).expect("shut down");
    assert!(matches!(hears.recv(), Ok(Asked::MostBytes(_))));
    assert!(matches!(hears.recv(), Ok(Asked::Lock { .. })));
    drop(socket);
    let _how_it_ends = served.join().expect("it does not panic");
}
