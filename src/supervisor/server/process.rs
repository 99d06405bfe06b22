//! One server process: starting, watching, killing.

use std::ffi::OsStr;
use std::fmt::{self, Display, Formatter};
use std::fs;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use podfs_fuse::client::{LastKeeper, StartedSuccessor};
use podfs_fuse::confinement::Profile;
use rustix::process::{
    Pid, PidfdFlags, Resource, Signal, getpgid, getrlimit, pidfd_open, pidfd_send_signal, prlimit, setpgid,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::sleep;

use super::program::{ServerProgram, this_podfs};
use super::spawn::{ProcessKind, Start};
use super::unkillable;
use crate::manifest::pod::PodIdentity;
use crate::supervisor::log_format::LogFormat;
use crate::supervisor::run_dir::cgroup::Cgroup;
use crate::supervisor::server::oom;

/// How often podfs checks a process that was killed.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The program that a server is started from.
#[derive(Clone, Copy, Debug)]
pub(in crate::supervisor) enum Program<'a> {
    /// The podfs-fuse that this supervisor has open, even if it was replaced or deleted on disk.
    Own(&'a ServerProgram),
    /// Another podfs, which executes its own podfs-fuse.
    OfPodfs(&'a Path),
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProcessEnd {
    /// By this signal.
    Signal(nix::sys::signal::Signal),
    /// By itself, with this code.
    Exit(i32),
    /// It was killed, and a last thread of it waits for its source.
    Inert,
    /// It was no child of this process.
    Unknown,
}

impl Display for ProcessEnd {
    fn fmt(&self, to: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Signal(signal) => write!(to, "signal: {} ({signal})", *signal as i32),
            Self::Exit(code) => write!(to, "exit status: {code}"),
            Self::Inert => write!(to, "it was killed, and ends when its source answers"),
            Self::Unknown => write!(to, "it is gone"),
        }
    }
}

/// A process that this one watches; it may be no child of this one.
pub(crate) struct WatchedProcess {
    pid: Pid,
    /// The process group that it started in, and that its keepers are in.
    origin: Option<Pid>,
    /// The pidfd: readable once the process has ended, and never that of another process (`pidfd_open(2)`).
    watch: AsyncFd<OwnedFd>,
    /// The control socket. Shutting it down ends a wait for the server's answer.
    control: Option<UnixStream>,
}

impl WatchedProcess {
    /// Starts a server in this cgroup, which logs in this format. Returns the server, and the control socket.
    ///
    /// The new process inherits copies of the open descriptors, and closes them at execve(2). Closing a file that was
    /// opened for writing through a volume sends FLUSH to the volume's server, and waits while that is dead. So the
    /// supervisor has no such file: it opens directories of volumes, and paths only (`O_PATH`).
    ///
    /// # Errors
    /// When it cannot be started.
    pub(super) fn start(
        program: Program<'_>,
        pod: &PodIdentity,
        profile: Profile,
        log_format: LogFormat,
        cgroup: Option<&Cgroup>,
    ) -> io::Result<(Self, UnixStream)> {
        let (ours, theirs) = UnixStream::pair()?;
        let started_by = this_podfs().argument();
        let (path, name, started_by) = match program {
            Program::Own(program) => (program.executable(), podfs_fuse::program::NAME, Some(started_by.as_str())),
            // The other podfs compares its own version.
            Program::OfPodfs(podfs) => (podfs.to_owned(), "podfs", None),
        };
        // In one word with its option, no value can be taken for another option.
        let (pod_name, uid) = (format!("--pod={pod}"), format!("--uid={}", pod.uid));
        let words = [name, "server", &pod_name, &uid, "--profile", profile.name(), "--log-format", log_format.word()];
        let words: Vec<_> = words.into_iter().chain(started_by).map(OsStr::new).collect();
        let cgroup = cgroup.map(Cgroup::directory);
        let start = Start {
            program: &path,
            arguments: &words,
            input: theirs.into(),
            cgroup,
            namespaces: &[],
            role: ProcessKind::Server,
        };
        let mut process = Self::with_pid(start.spawn()?)?;
        oom::protect_server(process.pid());
        process.control = Some(ours.try_clone()?);
        Ok((process, ours))
    }

    /// Lets the keeper of a dead server start the next one, confined to `profile`. Returns it with the control socket,
    /// or `None` if the keeper cannot.
    ///
    /// # Errors
    /// When the keeper does not answer, or there are no more processes or descriptors.
    pub(super) fn start_by_keeper(keeper: &LastKeeper, profile: Profile) -> io::Result<Option<(Self, UnixStream)>> {
        let Some(pid) = keeper.pid() else { return Ok(None) };
        if confined_to(pid) != Some(profile) {
            return Ok(None);
        }
        let Some((StartedSuccessor { pid: started, pidfd }, control)) = keeper.start_successor()? else {
            return Ok(None);
        };
        let mut process = Self::of(Pid::from_raw(started).ok_or(io::ErrorKind::InvalidData)?, pidfd)?;
        process.origin = getpgid(Some(process.pid)).ok();
        // A container that controls the server may have answered for the keeper.
        if !process.is_child() || process.origin != getpgid(Pid::from_raw(pid)).ok() {
            return Err(io::Error::other("the server process that it names is another process"));
        }
        oom::protect_server(started);
        // As a process gets it that this one executes; an operator may have raised it. Without the privilege, it stays
        // as it was.
        let _as_before = prlimit(Some(process.pid), Resource::Nofile, getrlimit(Resource::Nofile));
        process.control = Some(control.try_clone()?);
        Ok(Some((process, control)))
    }

    /// Watches a process that runs.
    ///
    /// # Errors
    /// When there is no such process.
    pub(crate) fn with_pid(pid: i32) -> io::Result<Self> {
        let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
        Self::of(pid, pidfd_open(pid, PidfdFlags::NONBLOCK)?)
    }

    fn of(pid: Pid, pidfd: OwnedFd) -> io::Result<Self> {
        // SAFETY: the descriptor is owned by what watches it, and stays open for as long.
        let watch = unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) }?;
        Ok(Self { pid, origin: None, watch, control: None })
    }

    pub(crate) fn pid(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// What the server is confined to, according to its arguments; `None` if they cannot be read.
    pub(super) fn profile(&self) -> Option<Profile> {
        confined_to(self.pid())
    }

    /// Waits until all of its threads have ended, and returns how.
    pub(crate) async fn ended(&self) -> ProcessEnd {
        // Fails only if the descriptor is invalid; then the end stays unknown.
        let _ = self.watch.readable().await;
        self.reap()
    }

    /// Waits until it has ended, or was killed and [waits for a source](unkillable) with its last thread.
    pub(super) async fn ended_or_inert(&self) -> ProcessEnd {
        let remains_only = async {
            loop {
                sleep(POLL_INTERVAL).await;
                if unkillable::is_inert(self.pid()) {
                    return;
                }
            }
        };
        tokio::select! {
            how = self.ended() => how,
            () = remains_only => ProcessEnd::Inert,
        }
    }

    /// Reaps it in the background, and its children, which become this process's: no zombie stays behind. A server and
    /// its children are one process group, or two.
    pub(super) fn leave(self) {
        tokio::spawn(async move {
            self.ended().await;
            for group in [Some(self.pid), self.origin].into_iter().flatten() {
                reap_group(group).await;
            }
        });
    }

    /// Shuts the control socket down, which ends every wait for an answer of this dead process. Without this the waits
    /// would not end, because its keeper has the other end of the socket, too.
    pub(super) fn hang_up(&self) {
        if let Some(control) = &self.control {
            let _ = control.shutdown(Shutdown::Both);
        }
    }

    pub(crate) fn kill(&self) {
        self.signal(Signal::KILL);
    }

    pub(crate) fn signal(&self, signal: Signal) {
        // It may have ended by itself.
        let _ = pidfd_send_signal(self.watch.get_ref(), signal);
    }

    /// Whether it is a child of this process that was not reaped.
    fn is_child(&self) -> bool {
        let look = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        waitid(Id::PIDFd(self.watch.get_ref().as_fd()), look).is_ok()
    }

    /// Reads the exit status of a child, which the kernel then forgets. The status of another process's child cannot be
    /// read.
    fn reap(&self) -> ProcessEnd {
        let status = loop {
            match waitid(Id::PIDFd(self.watch.get_ref().as_fd()), WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG) {
                Err(Errno::EINTR) => {}
                status => break status,
            }
        };
        match status {
            Ok(WaitStatus::Signaled(_, signal, _)) => ProcessEnd::Signal(signal),
            Ok(WaitStatus::Exited(_, code)) => ProcessEnd::Exit(code),
            _ => ProcessEnd::Unknown,
        }
    }
}

/// Moves a server that a keeper has started to a process group of its own, as a server has that was executed. To be
/// called when it has a keeper: keepers stay in the group of the first server. So the number of that server, from which
/// all of them have their uid, is not given to another process while one of them lives.
pub(super) fn separate(pid: i32) {
    let pid = Pid::from_raw(pid);
    // Fails if it has ended, or is no child of this process.
    let _stays_there = setpgid(pid, pid);
}

/// Reaps the children of this process that are in that group, until there are none.
async fn reap_group(group: Pid) {
    let group = nix::unistd::Pid::from_raw(group.as_raw_nonzero().get());
    loop {
        match waitid(Id::PGid(group), WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG) {
            Ok(WaitStatus::StillAlive) => sleep(POLL_INTERVAL).await,
            Ok(_) | Err(Errno::EINTR) => {}
            // None is left.
            Err(_) => return,
        }
    }
}

/// What the process of a server, or its keeper, is confined to, according to its arguments; `None` if they cannot be
/// read.
fn confined_to(pid: i32) -> Option<Profile> {
    let arguments = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let mut words = arguments.split(|byte| *byte == 0).skip_while(|word| *word != b"--profile");
    words.nth(1).and_then(|name| Profile::named(std::str::from_utf8(name).ok()?))
}

/// Kills the process if it is the server of the pod with this uid, and waits at most two seconds for its end.
pub(crate) fn kill_server(pid: i32, uid: &str) {
    let Some(pid) = Pid::from_raw(pid) else { return };
    // The signal reaches this process or none, also if the kernel gives its number to another one.
    let Ok(watch) = pidfd_open(pid, PidfdFlags::empty()) else { return };
    let command = std::fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).unwrap_or_default();
    let words: Vec<_> = command.split(|byte| *byte == 0).collect();
    // Earlier versions of podfs gave the uid in a word of its own.
    let option = format!("--uid={uid}");
    let is_of_pod = words.contains(&option.as_bytes()) || words.contains(&uid.as_bytes());
    if words.get(1) != Some(&&b"server"[..]) || !is_of_pod {
        return;
    }
    let _ = pidfd_send_signal(&watch, Signal::KILL);
    let mut ended = [rustix::event::PollFd::new(&watch, rustix::event::PollFlags::IN)];
    let limit = rustix::event::Timespec { tv_sec: 2, tv_nsec: 0 };
    let _ = rustix::event::poll(&mut ended, Some(&limit));
}
