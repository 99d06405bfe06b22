//! Starts a server, or a supervisor, directly in its cgroup.
//!
//! `clone3(2)` makes the child in the cgroup (`CLONE_INTO_CGROUP`, Linux 5.7). Moving a process to a cgroup later takes the
//! kernel about ten milliseconds, since it waits for all CPUs: longer than all other steps between the end of a server and
//! the first answer of the next one. The standard library cannot use `clone3`, so this module does what the standard
//! library does between `fork` and `exec`.

use std::ffi::{CStr, CString, OsStr};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;

use nix::sys::wait::waitpid;
use nix::unistd::Pid;
use rustix::pipe::{PipeFlags, pipe_with};

/// From `linux/sched.h`. The constant of the crate libc has a type of 32 bits, and this flag is bit 33.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// The environment variables that a server gets: those for its log. An operator's environment may hold secrets, and a
/// container that controls a server could read them.
const VARIABLES: [&str; 4] = ["RUST_LOG", "RUST_BACKTRACE", "NO_COLOR", "TERM"];

/// The environment variables that a supervisor does not get. They are for the process that starts the supervisor alone: a
/// service manager has set them, or the first process of a container.
const OF_PARENT: [&str; 9] = [
    "NOTIFY_SOCKET",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
    "LISTEN_PID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
    "MAINPID",
    "PODFS_LEFT_CONTAINER",
    "PODFS_SERVICE_ACCOUNT",
];

/// A process to start.
pub(crate) struct Start<'a> {
    /// The program's path.
    pub(crate) program: &'a Path,
    /// The arguments, the first of which is the name of the program.
    pub(crate) arguments: &'a [&'a OsStr],
    /// The standard input.
    pub(crate) input: OwnedFd,
    /// The directory of the process's cgroup. If the kernel refuses it, the process starts in the cgroup of this process.
    pub(crate) cgroup: Option<BorrowedFd<'a>>,
    /// The namespaces that the process enters.
    pub(crate) namespaces: &'a [OwnedFd],
    /// The role of the process.
    pub(crate) role: ProcessKind,
}

/// The kinds of processes that podfs starts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProcessKind {
    /// A server starts a new process group: a terminal sends the SIGINT of a Ctrl-C only to the supervisor, which unmounts before
    /// it ends the server. A server ignores SIGTERM and SIGHUP: when a whole unit or machine stops, the supervisor gets the
    /// signal too, and unmounts before it ends the server.
    Server,
    /// A supervisor starts a new session, so that it goes on when this process and its terminal are gone. It gets the
    /// environment of this process, without the variables in [`OF_PARENT`].
    Supervisor,
}

impl Start<'_> {
    /// Starts the process, in the root directory. Returns its process id.
    ///
    /// # Errors
    /// When there are no more processes or descriptors, or the program cannot be executed.
    pub(crate) fn spawn(self) -> io::Result<i32> {
        let program = CString::new(self.program.as_os_str().as_bytes())?;
        let arguments =
            self.arguments.iter().map(|argument| CString::new(argument.as_bytes())).collect::<Result<Vec<_>, _>>()?;
        let is_given = |name: &OsStr| match self.role {
            ProcessKind::Server => VARIABLES.iter().any(|variable| name == *variable),
            ProcessKind::Supervisor => !OF_PARENT.iter().any(|variable| name == *variable),
        };
        let given = std::env::vars_os().filter(|(name, _)| is_given(name));
        let environment = given.map(|(name, value)| variable(&name, &value)).collect::<Result<Vec<_>, _>>()?;
        let (argv, envp) = (pointers(&arguments), pointers(&environment));
        let (failure, errors) = pipe_with(PipeFlags::CLOEXEC)?;
        // SAFETY: the child makes only system calls, with memory that this process allocated before the fork. Then the child
        // ends, or becomes another program.
        let pid = unsafe {
            match fork_into(self.cgroup)? {
                0 => match enter(self.namespaces) {
                    true => {
                        become_program(&program, &argv, &envp, self.input.as_raw_fd(), errors.as_raw_fd(), self.role)
                    }
                    false => fail(errors.as_raw_fd()),
                },
                pid => pid,
            }
        };
        drop((errors, self.input));
        let mut errno = [0; 4];
        match File::from(failure).read_exact(&mut errno) {
            Ok(()) => {
                let _ = waitpid(Pid::from_raw(pid), None);
                Err(io::Error::from_raw_os_error(i32::from_ne_bytes(errno)))
            }
            // The kernel closed the child's end of the pipe, because it executed the program.
            Err(_end_of_file) => Ok(pid),
        }
    }
}

fn variable(name: &OsStr, value: &OsStr) -> io::Result<CString> {
    Ok(CString::new([name.as_bytes(), b"=", value.as_bytes()].concat())?)
}

/// The pointers for `execve(2)`, with a null at the end. They are valid for as long as the strings.
fn pointers(strings: &[CString]) -> Vec<*const libc::c_char> {
    strings.iter().map(|string| string.as_ptr()).chain([ptr::null()]).collect()
}

/// Forks, with the child in the cgroup if the kernel allows that. Returns 0 in the child.
///
/// # Safety
/// The child may only make system calls: other threads of this process may hold locks.
unsafe fn fork_into(cgroup: Option<BorrowedFd<'_>>) -> io::Result<libc::pid_t> {
    if let Some(cgroup) = cgroup {
        // SAFETY: zeros are a valid value of each field.
        let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
        arguments.flags = CLONE_INTO_CGROUP;
        arguments.exit_signal = libc::SIGCHLD as u64;
        arguments.cgroup = cgroup.as_raw_fd() as u64;
        // SAFETY: the struct outlives the call, and its size is given.
        let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw const arguments, size_of::<libc::clone_args>()) };
        if pid >= 0 {
            return Ok(pid as libc::pid_t);
        }
        // The cgroup is gone, or a sandbox denies the call: the child starts in the cgroup of this process.
    }
    // SAFETY: the caller promises that the child makes only system calls.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        pid => Ok(pid),
    }
}

/// Moves the calling process to these namespaces. Returns false if the kernel refuses one.
///
/// # Safety
/// Call it only in a child that shares its memory with no other process.
unsafe fn enter(namespaces: &[OwnedFd]) -> bool {
    // SAFETY: the call takes numbers. Zero means a namespace of any type.
    namespaces.iter().all(|namespace| unsafe { libc::setns(namespace.as_raw_fd(), 0) } == 0)
}

/// Writes the error number of the last system call to `errors`, and ends the child.
///
/// # Safety
/// Call it only in a child that shares its memory with no other process.
unsafe fn fail(errors: RawFd) -> ! {
    // SAFETY: these calls take numbers, and memory that outlives them.
    unsafe {
        let errno = *libc::__errno_location();
        libc::write(errors, (&raw const errno).cast(), size_of_val(&errno));
        libc::_exit(127)
    }
}

/// Executes the program in the child, and the kernel closes `errors` then. If that fails, writes the error number to `errors`.
///
/// # Safety
/// Call it only in a child that shares its memory with no other process. `argv` and `envp` point to C strings, and end with
/// null.
unsafe fn become_program(
    program: &CStr,
    argv: &[*const libc::c_char],
    envp: &[*const libc::c_char],
    input: RawFd,
    errors: RawFd,
    role: ProcessKind,
) -> ! {
    // SAFETY: these calls take numbers, and memory that outlives them.
    unsafe {
        let is_separate = match role {
            ProcessKind::Server => libc::setpgid(0, 0) == 0,
            ProcessKind::Supervisor => libc::setsid() >= 0,
        };
        let is_ready = is_separate && libc::dup2(input, 0) >= 0 && libc::chdir(c"/".as_ptr()) == 0;
        if is_ready {
            let mut none = std::mem::zeroed();
            libc::sigemptyset(&raw mut none);
            libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut());
            libc::signal(libc::SIGPIPE, libc::SIG_DFL);
            let stop_action = if role == ProcessKind::Server { libc::SIG_IGN } else { libc::SIG_DFL };
            libc::signal(libc::SIGTERM, stop_action);
            libc::signal(libc::SIGHUP, stop_action);
            libc::execve(program.as_ptr(), argv.as_ptr(), envp.as_ptr());
        }
        fail(errors)
    }
}
