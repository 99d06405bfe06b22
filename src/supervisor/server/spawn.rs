//! Starting a server, or a supervisor, in its cgroup from its first moment.
//!
//! `clone3(2)` makes the child there (`CLONE_INTO_CGROUP`, Linux 5.7). To enter a cgroup later takes the kernel about ten
//! milliseconds, since it waits for all CPUs: longer than everything else that happens between the end of a server and the
//! first answer of the next one. The standard library cannot do it, so what it does between `fork` and `exec` is done here.

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

/// What a server gets of the environment: how it logs. An operator's environment may hold secrets, and a server that a
/// container has taken over could read them.
const VARIABLES: [&str; 4] = ["RUST_LOG", "RUST_BACKTRACE", "NO_COLOR", "TERM"];

/// What a supervisor does not get of the environment: what a service manager, or the first process of a
/// container, says to the process that starts it.
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

/// What is started.
pub(crate) struct Start<'a> {
    /// The program's path.
    pub(crate) program: &'a Path,
    /// Its arguments, the first of which is its name.
    pub(crate) arguments: &'a [&'a OsStr],
    /// Its standard input.
    pub(crate) input: OwnedFd,
    /// The directory of its cgroup. A process outside does its work as well, where this cannot be had.
    pub(crate) cgroup: Option<BorrowedFd<'a>>,
    /// The namespaces that it enters, if it leaves those of this process.
    pub(crate) namespaces: &'a [OwnedFd],
    /// What it is.
    pub(crate) role: Role,
}

/// What a process is started as.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// In a process group of its own: a Ctrl-C is for the supervisor, which unmounts first. A server ignores SIGTERM and SIGHUP:
    /// when a whole unit or machine stops, the supervisor gets the signal too, and unmounts before it ends the server.
    Server,
    /// In a session of its own, with the environment of this process: it goes on when this process and its terminal are gone.
    Supervisor,
}

impl Start<'_> {
    /// Starts it, in the root directory. Gives its process id.
    ///
    /// # Errors
    /// When there are no more processes or descriptors, or the program cannot be executed.
    pub(crate) fn spawn(self) -> io::Result<i32> {
        let program = CString::new(self.program.as_os_str().as_bytes())?;
        let arguments =
            self.arguments.iter().map(|argument| CString::new(argument.as_bytes())).collect::<Result<Vec<_>, _>>()?;
        let is_given = |name: &OsStr| match self.role {
            Role::Server => VARIABLES.iter().any(|given| name == *given),
            Role::Supervisor => !OF_PARENT.iter().any(|kept| name == *kept),
        };
        let set = std::env::vars_os().filter(|(name, _)| is_given(name));
        let environment = set.map(|(name, value)| variable(&name, &value)).collect::<Result<Vec<_>, _>>()?;
        let (argv, envp) = (pointers(&arguments), pointers(&environment));
        let (failure, tell) = pipe_with(PipeFlags::CLOEXEC)?;
        // SAFETY: the child makes system calls only, on what was made before, and ends or becomes another program.
        let pid = unsafe {
            match fork_into(self.cgroup)? {
                0 => match enter(self.namespaces) {
                    true => become_program(&program, &argv, &envp, self.input.as_raw_fd(), tell.as_raw_fd(), self.role),
                    false => fail(tell.as_raw_fd()),
                },
                pid => pid,
            }
        };
        drop((tell, self.input));
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

/// As `execve(2)` wants them. They are good for as long as the strings.
fn pointers(strings: &[CString]) -> Vec<*const libc::c_char> {
    strings.iter().map(|string| string.as_ptr()).chain([ptr::null()]).collect()
}

/// A child of this process, in a cgroup if that can be had. Gives 0 in the child.
///
/// # Safety
/// The child may make nothing but system calls: other threads held locks when they were left behind.
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
        // The cgroup is gone, or a sandbox does not allow the call.
    }
    // SAFETY: the caller sees to what the child does.
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

/// Ends the child, and reports the error.
///
/// # Safety
/// To be called in a child that has its memory for itself.
unsafe fn fail(tell: RawFd) -> ! {
    // SAFETY: these calls take numbers, and memory that outlives them.
    unsafe {
        let errno = *libc::__errno_location();
        libc::write(tell, (&raw const errno).cast(), size_of_val(&errno));
        libc::_exit(127)
    }
}

/// The life of the child. What fails is written to `tell`, which the program closes.
///
/// # Safety
/// To be called in a child that has its memory for itself; the pointers end with null and point to C strings.
unsafe fn become_program(
    program: &CStr,
    argv: &[*const libc::c_char],
    envp: &[*const libc::c_char],
    input: RawFd,
    tell: RawFd,
    role: Role,
) -> ! {
    // SAFETY: these calls take numbers, and memory that outlives them.
    unsafe {
        let alone = match role {
            Role::Server => libc::setpgid(0, 0) == 0,
            Role::Supervisor => libc::setsid() >= 0,
        };
        let ready = alone && libc::dup2(input, 0) >= 0 && libc::chdir(c"/".as_ptr()) == 0;
        if ready {
            let mut none = std::mem::zeroed();
            libc::sigemptyset(&raw mut none);
            libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut());
            libc::signal(libc::SIGPIPE, libc::SIG_DFL);
            let told_to_end = if role == Role::Server { libc::SIG_IGN } else { libc::SIG_DFL };
            libc::signal(libc::SIGTERM, told_to_end);
            libc::signal(libc::SIGHUP, told_to_end);
            libc::execve(program.as_ptr(), argv.as_ptr(), envp.as_ptr());
        }
        fail(tell)
    }
}
