//! The features that the crate `fuser` lacks for passthrough volumes. Because `fuser` lacks them, podfs has its own FUSE
//! session (docs/design/sessions.md). If a test fails here, a newer `fuser` may have one of them; then reconsider the decision.
//!
//! `fuser` reads requests from a socket, to which the tests write the requests of a kernel. So a test controls each byte of a
//! request. The tests do not cover what a kernel does after the answer.

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
/// The number of a request (the field `unique`).
const UNIQUE: u64 = 7;
/// The offsets of `nodeid` and `attr.ino` in a `fuse_entry_out`.
const NODE_ID: usize = 0;
const INODE: usize = 40;

/// A call of `fuser` to the file system.
#[derive(Debug, PartialEq)]
enum Call {
    Lock {
        start: u64,
        end: u64,
        kind: i32,
        waits: bool,
    },
    Attribute {
        name: String,
    },
    /// INIT: the greatest number of bytes of a write that `fuser` allows.
    MaxWrite(u32),
}

/// A file system that sends its calls to the test.
struct Recorder {
    calls: Sender<Call>,
    wanted: InitFlags,
}

impl Filesystem for Recorder {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let limit = config.set_max_write(u32::MAX).expect_err("there is a limit");
        self.calls.send(Call::MaxWrite(limit)).expect("the test receives");
        config.add_capabilities(self.wanted).expect("the kernel has the features");
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
        self.calls.send(Call::Lock { start, end, kind, waits }).expect("the test receives");
        // `ok` does not return whether the kernel has received the answer.
        let () = reply.ok();
    }

    fn setxattr(&self, _: &Request, _: INodeNo, name: &OsStr, _: &[u8], _: i32, _: u32, reply: ReplyEmpty) {
        self.calls.send(Call::Attribute { name: name.to_string_lossy().into_owned() }).expect("the test receives");
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
    calls: Receiver<Call>,
    session: JoinHandle<io::Result<()>>,
}

impl Kernel {
    /// Begins a session of a file system that requests these features, which this kernel has.
    fn with(wanted: InitFlags) -> Kernel {
        let (socket, device) = pair();
        let (call_sender, calls) = channel();
        let session = thread::spawn(move || session(device, Recorder { calls: call_sender, wanted })?.run());
        let kernel = Kernel { socket, calls, session };
        kernel.send(INIT, &init());
        let (error, _) = kernel.answer();
        assert_eq!(error, 0, "INIT is answered");
        assert_eq!(
            kernel.calls.recv(),
            Ok(Call::MaxWrite(16 << 20)),
            "writes of up to 16 MiB fit into the only buffer of fuser"
        );
        kernel
    }

    fn send(&self, operation: u32, body: &[u8]) {
        send(self.socket.as_raw_fd(), &request(operation, body), MsgFlags::empty()).expect("the whole request is sent");
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
        self.session.join().expect("the thread does not panic")
    }
}

fn pair() -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).expect("a socket pair")
}

fn session(device: OwnedFd, filesystem: Recorder) -> io::Result<Session<Recorder>> {
    Session::from_fd(filesystem, device, SessionACL::All, Config::default())
}

/// The body of `fuse_init_in`: version 7.45, and all features of the first word of flags, except the flag for a second word.
fn init() -> Vec<u8> {
    let mut body = Vec::new();
    for word in [7, 45, 1 << 17, !INIT_EXT] {
        body.extend(u32::to_ne_bytes(word));
    }
    body.resize(64, 0);
    body
}

/// A request for node 1: its `fuse_in_header` and its body.
fn request(operation: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(u32::to_ne_bytes(40 + u32::try_from(body.len()).expect("a short body")));
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
    let calls = [LK_FLOCK, 0].map(|flags| {
        kernel.send(SETLKW, &lock(flags));
        assert_eq!(kernel.answer().0, 0);
        kernel.calls.recv().expect("fuser calls the file system")
    });
    assert_eq!(calls[0], calls[1]);
    let end = i64::MAX as u64;
    assert_eq!(calls[0], Call::Lock { start: 0, end, kind: i32::from(libc::F_WRLCK as i16), waits: true });
}

#[test]
fn fuser_takes_the_number_of_an_inode_for_that_of_its_node() {
    let kernel = Kernel::with(InitFlags::empty());
    kernel.send(LOOKUP, b"name\0");
    let (error, entry) = kernel.answer();
    assert_eq!(error, 0);
    let number = |offset: usize| u64::from_ne_bytes(entry[offset..offset + 8].try_into().expect("eight bytes"));
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
    let (id_sender, id) = channel();
    let waiting = thread::spawn(move || {
        id_sender.send(rustix::thread::gettid()).expect("the test receives");
        session(device, Recorder { calls: channel().0, wanted: InitFlags::empty() }).map(drop)
    });
    let thread = id.recv().expect("the id of the thread").as_raw_nonzero();
    // The first number in schedstat is the CPU time of the thread in nanoseconds.
    let cpu_time = || {
        let text = fs::read_to_string(format!("/proc/self/task/{thread}/schedstat")).expect("the thread runs");
        text.split(' ').next().and_then(|time| time.parse::<u64>().ok()).expect("a number")
    };
    let start = cpu_time();
    eventually("the thread uses CPU time while it waits", || cpu_time() > start + 20_000_000);
    drop(kernel);
    let _outcome = waiting.join().expect("the thread does not panic");
}

#[test]
fn fuser_continues_after_an_answer_that_it_could_not_deliver() {
    let (socket, device) = pair();
    let (call_sender, calls) = channel();
    let recorder = Recorder { calls: call_sender, wanted: InitFlags::empty() };
    let served = thread::spawn(move || session(device, recorder)?.run());
    send(socket.as_raw_fd(), &request(INIT, &init()), MsgFlags::empty()).expect("sent");
    send(socket.as_raw_fd(), &request(SETLKW, &lock(0)), MsgFlags::empty()).expect("sent");
    // From here on, fuser cannot deliver an answer, but it does not report that to the file system.
    shutdown(socket.as_raw_fd(), Shutdown::Read).expect("shut down");
    assert!(matches!(calls.recv(), Ok(Call::MaxWrite(_))));
    assert!(matches!(calls.recv(), Ok(Call::Lock { .. })));
    drop(socket);
    let _outcome = served.join().expect("the thread does not panic");
}
