//! A process that confines itself like a server, and then tries system calls.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork};
use podfs_fuse::confinement::{Profile, confine};
use podfs_fuse::log::LineFormat;
use podfs_fuse::memory_lock::protect_memory;

/// The outcomes of a probe's attempts, by name, and the log lines that the probe wrote.
pub(super) struct ProbeResult {
    pub(super) outcomes: BTreeMap<String, String>,
    pub(super) log: String,
}

/// The file in which a probe records the outcomes of its attempts.
pub(super) struct Recorder(pub(super) File);

impl Recorder {
    /// Records the result of a system call that returns a negative number when it fails: `done`, or the name of the error.
    pub(super) fn call(&mut self, name: &str, result: impl Into<i64>) {
        let outcome = if result.into() < 0 { format!("{:?}", Errno::last()) } else { "done".to_owned() };
        self.record(name, &outcome);
    }

    pub(super) fn record(&mut self, name: &str, outcome: &str) {
        writeln!(self.0, "{name}={outcome}").expect("written");
    }
}

/// Forks a probe, which confines itself like a server with this profile. Then calls `attempt` in the probe.
#[track_caller]
pub(super) fn probe(profile: Profile, attempt: impl FnOnce(&mut Recorder)) -> ProbeResult {
    let (mut outcomes, recorder) = std::io::pipe().expect("a pipe");
    let (mut lines, log) = std::io::pipe().expect("a pipe");
    // SAFETY: the child has one thread. It takes no lock that another thread of the parent may have held at the time of
    // fork(2): the allocator resets its locks after fork(2), and these tests have no locks.
    match unsafe { fork() }.expect("a process") {
        ForkResult::Child => {
            // SAFETY: no code owns the descriptor of standard error.
            unsafe { libc::dup2(log.as_raw_fd(), libc::STDERR_FILENO) };
            let attempts = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let _limited = protect_memory();
                let confined = confine(profile, LineFormat::Text);
                let mut recorder = Recorder(File::from(OwnedFd::from(recorder)));
                recorder.record("missing", &format!("{:?}", confined.missing));
                attempt(&mut recorder);
            }));
            // SAFETY: this process has nothing to clean up.
            unsafe { libc::_exit(i32::from(attempts.is_err())) }
        }
        ForkResult::Parent { child } => {
            drop((recorder, log));
            let (mut recorded, mut logged) = (String::new(), String::new());
            outcomes.read_to_string(&mut recorded).expect("outcomes");
            lines.read_to_string(&mut logged).expect("a log");
            let status = waitpid(child, None).expect("the probe");
            assert_eq!(status, WaitStatus::Exited(child, 0), "{recorded}\n{logged}");
            let outcomes = recorded.lines().filter_map(|line| line.split_once('='));
            let outcomes = outcomes.map(|(name, outcome)| (name.to_owned(), outcome.to_owned())).collect();
            ProbeResult { outcomes, log: logged }
        }
    }
}

impl ProbeResult {
    /// Checks that every attempt with one of these names had this outcome.
    #[track_caller]
    pub(super) fn assert_all(&self, names: &[&str], outcome: &str) {
        for name in names {
            assert_eq!(self.outcomes.get(*name).map(String::as_str), Some(outcome), "{name}: {}", self.log);
        }
    }

    /// Checks that the log names each of these system calls exactly once.
    #[track_caller]
    pub(super) fn assert_logged_once(&self, names: &[&str]) {
        for name in names {
            let count = self.log.matches(&format!("the system call {name} (")).count();
            assert_eq!(count, 1, "{name} in the log: {}", self.log);
        }
    }
}

/// System calls that could break the confinement. The seccomp filter of no profile allows them.
pub(super) const FORBIDDEN_CALLS: [&str; 19] = [
    "socket",
    "socketpair",
    "ptrace",
    "process_vm_readv",
    "pidfd_getfd",
    "execve",
    "execveat",
    "mount",
    "move_mount",
    "chroot",
    "pivot_root",
    "setns",
    "setuid",
    "setresuid",
    "bpf",
    "init_module",
    "io_uring_setup",
    "perf_event_open",
    "keyctl",
];

/// Tries all of [`FORBIDDEN_CALLS`] and `connect`, twice. The calls that need a process use `parent`, the process that started
/// the probe.
pub(super) fn try_forbidden_calls(recorder: &mut Recorder, parent: Pid) {
    let parent = i64::from(parent.as_raw());
    let abstract_address = [1_u8, 0, 0, b'x'];
    let (shell, arguments) = (c"/bin/sh".as_ptr(), [std::ptr::null::<libc::c_char>()]);
    let mut byte = 0_u8;
    let into = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let mut pair = [0; 2];
    for _ in 0..2 {
        // SAFETY: the kernel executes none of these calls, and the arguments of each are valid for the call.
        unsafe {
            recorder.call("socket", libc::syscall(libc::SYS_socket, libc::AF_INET, libc::SOCK_STREAM, 0));
            let pair_of_sockets =
                libc::syscall(libc::SYS_socketpair, libc::AF_INET, libc::SOCK_STREAM, 0, pair.as_mut_ptr());
            recorder.call("socketpair", pair_of_sockets);
            let abstract_socket = abstract_address.as_ptr();
            recorder.call("connect", libc::syscall(libc::SYS_connect, 0, abstract_socket, abstract_address.len()));
            recorder.call("ptrace", libc::syscall(libc::SYS_ptrace, libc::PTRACE_ATTACH, parent, 0, 0));
            let (here, there) = (&raw const into, &raw const into);
            recorder.call("process_vm_readv", libc::syscall(libc::SYS_process_vm_readv, parent, here, 1, there, 1, 0));
            let process = libc::syscall(libc::SYS_pidfd_open, parent, 0);
            recorder.call("pidfd_getfd", libc::syscall(libc::SYS_pidfd_getfd, process, 0, 0));
            let none = arguments.as_ptr();
            recorder.call("execve", libc::syscall(libc::SYS_execve, shell, none, none));
            let empty = c"".as_ptr();
            recorder.call("execveat", libc::syscall(libc::SYS_execveat, 0, empty, none, none, libc::AT_EMPTY_PATH));
            let (root, tmpfs) = (c"/".as_ptr(), c"tmpfs".as_ptr());
            recorder.call("mount", libc::syscall(libc::SYS_mount, tmpfs, root, tmpfs, 0, 0));
            recorder.call("move_mount", libc::syscall(libc::SYS_move_mount, 0, empty, 0, empty, 0));
            recorder.call("chroot", libc::syscall(libc::SYS_chroot, root));
            recorder.call("pivot_root", libc::syscall(libc::SYS_pivot_root, root, root));
            recorder.call("setns", libc::syscall(libc::SYS_setns, process, libc::CLONE_NEWNS));
            recorder.call("setuid", libc::syscall(libc::SYS_setuid, 0));
            recorder.call("setresuid", libc::syscall(libc::SYS_setresuid, 0, 0, 0));
            recorder.call("bpf", libc::syscall(libc::SYS_bpf, 0, 0, 0));
            recorder.call("init_module", libc::syscall(libc::SYS_init_module, 0, 0, 0));
            recorder.call("io_uring_setup", libc::syscall(libc::SYS_io_uring_setup, 1, 0));
            recorder.call("perf_event_open", libc::syscall(libc::SYS_perf_event_open, 0, 0, 0, 0, 0));
            recorder.call("keyctl", libc::syscall(libc::SYS_keyctl, 0, 0, 0, 0, 0));
        }
    }
}

/// Tries system calls that the seccomp filter allows, with arguments that it does not allow.
pub(super) fn try_forbidden_arguments(recorder: &mut Recorder) {
    const PAGE: usize = 4096;
    let new_user = libc::CLONE_NEWUSER | libc::SIGCHLD;
    let limit = libc::rlimit { rlim_cur: 1, rlim_max: 1 };
    let (none, private) = (std::ptr::null_mut::<libc::c_void>(), libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    let (data, code) = (libc::PROT_READ | libc::PROT_WRITE, libc::PROT_READ | libc::PROT_EXEC);
    // SAFETY: the kernel refuses the calls, except the one that maps a page of memory, which no other code uses.
    unsafe {
        recorder.call("clone into a namespace", libc::syscall(libc::SYS_clone, new_user, 0, 0, 0, 0));
        recorder.call("clone3", libc::syscall(libc::SYS_clone3, 0, 0));
        recorder.call("new code", libc::syscall(libc::SYS_mmap, none, PAGE, code, private, -1, 0));
        let page = libc::mmap(none, PAGE, data, private, -1, 0);
        assert_ne!(page, libc::MAP_FAILED);
        recorder.call("data as code", libc::syscall(libc::SYS_mprotect, page, PAGE, code));
        recorder.call("dumpable", libc::syscall(libc::SYS_prctl, libc::PR_SET_DUMPABLE, 1, 0, 0, 0));
        recorder.call("a limit", libc::syscall(libc::SYS_prlimit64, 0, libc::RLIMIT_CORE, &raw const limit, 0));
        recorder.call("signals by descriptor", libc::syscall(libc::SYS_fcntl, 0, libc::F_SETOWN, 1));
    }
}

/// The names of the attempts of [`try_forbidden_arguments`] that fail with `EPERM`.
pub(super) const FORBIDDEN_ARGUMENTS: [&str; 6] =
    ["clone into a namespace", "new code", "data as code", "dumpable", "a limit", "signals by descriptor"];

/// The operations that a confined server must still be able to do.
pub(super) fn do_usual_work(recorder: &mut Recorder) {
    let sum = std::thread::Builder::new().name("worker".to_owned()).spawn(|| vec![1_u64; 100_000].iter().sum::<u64>());
    recorder.record("a thread", &sum.expect("a thread").join().expect("a sum").to_string());
    // SAFETY: the process that clone(2) starts only waits for a signal. All other calls take numbers, or memory that outlives
    // them.
    unsafe {
        let memory = libc::memfd_create(c"region".as_ptr(), libc::MFD_CLOEXEC);
        recorder.call("a region", libc::ftruncate(memory, 1 << 20));
        let shared =
            libc::mmap(std::ptr::null_mut(), 1 << 20, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, memory, 0);
        recorder.call("mapped", if shared == libc::MAP_FAILED { -1 } else { 0 });
        recorder.call("locked", libc::mlock(shared, 4096));
        let keeper = libc::syscall(libc::SYS_clone, libc::CLONE_FILES | libc::SIGCHLD, 0, 0, 0, 0);
        if keeper == 0 {
            loop {
                libc::poll(std::ptr::null_mut(), 0, -1);
            }
        }
        recorder.call("a keeper", keeper);
        let keeper = i32::try_from(keeper).expect("a pid");
        recorder.call("killed", libc::kill(keeper, libc::SIGKILL));
        recorder.call("awaited", libc::waitpid(keeper, std::ptr::null_mut(), 0));
    }
}

/// The names of the attempts of [`do_usual_work`] with the outcome `done`.
pub(super) const USUAL_WORK: [&str; 6] = ["a region", "mapped", "locked", "a keeper", "killed", "awaited"];
