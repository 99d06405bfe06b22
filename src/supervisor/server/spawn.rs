//! Starts a server, or a supervisor, in its cgroup from its first moment.
//!
//! `clone3(2)` makes the child there (`CLONE_INTO_CGROUP`, Linux 5.7). Moving a process to a cgroup later takes the
//! kernel about ten milliseconds, since it waits for all CPUs: longer than all else between the end of a server and the
//! first answer of the next one. The standard library cannot use `clone3`, so this module does what that does between
//! `fork` and `exec`.

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

/// From `linux/sched.h`; the one in libc is too narrow.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// The variables that a server gets: those for its log. An operator's environment may hold secrets, and a container
/// that controls a server could read them.
const VARIABLES: [&str; 4] = ["RUST_LOG", "RUST_BACKTRACE", "NO_COLOR", "TERM"];

/// The variables that a supervisor does not get: a service manager, or the first process of a container, sets them for
/// the process that starts the supervisor.
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
    /// Its arguments, the first of which is its name.
    pub(crate) arguments: &'a [&'a OsStr],
    /// Its standard input.
    pub(crate) input: OwnedFd,
    /// The directory of its cgroup. Where the kernel does not allow it, the process starts in the cgroup of this one.
    pub(crate) cgroup: Option<BorrowedFd<'a>>,
    /// The namespaces that it enters.
    pub(crate) namespaces: &'a [OwnedFd],
    /// Its role.
    pub(crate) role: ProcessKind,
}

/// The kinds of processes that podfs starts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProcessKind {
    /// In a process group of its own: a Ctrl-C is for the supervisor, which unmounts first. A server ignores SIGTERM and SIGHUP:
    /// when a whole unit or machine stops, the supervisor gets the signal too, and unmounts before it ends the server.
    Server,
    /// In a session of its own, with the environment of this process: it goes on when this process and its terminal are gone.
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
            ProcessKind::Server => VARIABLES.iter().any(|given| name == *given),
            ProcessKind::Supervisor => !OF_PARENT.iter().any(|kept| name == *kept),
        };
        let set = std::env::vars_os().filter(|(name, _)| is_given(name));
        let environment = set.map(|(name, value)| variable(&name, &value)).collect::<Result<Vec<_>, _>>()?;
        let (argv, envp) = (pointers(&arguments), pointers(&environment));
        let (failure, errors) = pipe_with(PipeFlags::CLOEXEC)?;
        // SAFETY: the child makes system calls only, on what was made before, and ends or becomes another program.
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
            // The other end was closed by the program that was executed.
            Err(_end) => Ok(pid),
        }
    }
}

fn variable(name: &OsStr, value: &OsStr) -> io::Result<CString> {
    Ok(CString::new([name.as_bytes(), b"=", value.as_bytes()].concat())?)
}

/// The pointers for `execve(2)`, with a null at the end. They are valid as long as the strings.
fn pointers(strings: &[CString]) -> Vec<*const libc::c_char> {
    strings.iter().map(|string| string.as_ptr()).chain([ptr::null()]).collect()
}

/// Forks, with the child in the cgroup if possible. Returns 0 in the child.
///
/// # Safety
/// The child may only make system calls: other threads of this process may hold locks.
unsafe fn fork_into(cgroup: Option<BorrowedFd<'_>>) -> io::Result<libc::pid_t> {
    if let Some(cgroup) = cgroup {
        // SAFETY: zeros are a valid value of each field.
        let mut how: libc::clone_args = unsafe { std::mem::zeroed() };
        how.flags = CLONE_INTO_CGROUP;
        how.exit_signal = libc::SIGCHLD as u64;
        how.cgroup = cgroup.as_raw_fd() as u64;
        // SAFETY: the struct outlives the call, and its size is given.
        let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw const how, size_of::<libc::clone_args>()) };
        if pid >= 0 {
            return Ok(pid as libc::pid_t);
        }
        // The cgroup is gone, or a sandbox denies the call.
    }
    // SAFETY: the caller is responsible for the child.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        pid => Ok(pid),
    }
}

/// Moves the calling process to these namespaces.
///
/// # Safety
/// To be called in a child that has its memory for itself.
unsafe fn enter(namespaces: &[OwnedFd]) -> bool {
    // SAFETY: the call takes numbers. Zero stands for each kind.
    namespaces.iter().all(|namespace| unsafe { libc::setns(namespace.as_raw_fd(), 0) } == 0)
}

/// Reports the error, and ends the child.
///
/// # Safety
/// To be called in a child that has its memory for itself.
unsafe fn fail(errors: RawFd) -> ! {
    // SAFETY: these calls take numbers, and memory that outlives them.
    unsafe {
        let errno = *libc::__errno_location();
        libc::write(errors, (&raw const errno).cast(), size_of_val(&errno));
        libc::_exit(127)
    }
}

/// Executes the program in the child. If that fails, writes the error to `errors`, which the program closes otherwise.
///
/// # Safety
/// To be called in a child that has its memory for itself; the pointers end with null and point to C strings.
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
        let alone = match role {
            ProcessKind::Server => libc::setpgid(0, 0) == 0,
            ProcessKind::Supervisor => libc::setsid() >= 0,
        };
        let ready = alone && libc::dup2(input, 0) >= 0 && libc::chdir(c"/".as_ptr()) == 0;
        if ready {
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
