//! One server process: starting it, watching it, killing it.

use std::ffi::OsStr;
use std::fmt::{self, Display, Formatter};
use std::fs;
use std::io::{self, ErrorKind};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use podfs_fuse::client::{LastFdKeeper, StartedSuccessor};
use podfs_fuse::confinement::Profile;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
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

/// The longest wait for the end of a process that has closed its socket, or that podfs has killed.
const END_TIMEOUT: Timespec = Timespec { tv_sec: 2, tv_nsec: 0 };
/// The time between two checks of a process that was killed.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The program that a server is started from.
#[derive(Clone, Copy, Debug)]
pub(in crate::supervisor) enum Program<'a> {
    /// The podfs-fuse that this supervisor has open, even if its file was replaced or deleted on disk.
    Own(&'a ServerProgram),
    /// The podfs at this path, of another version. As `podfs server` it executes the podfs-fuse of its version.
    OfPodfs(&'a Path),
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProcessEnd {
    /// This signal ended it.
    Signal(nix::sys::signal::Signal),
    /// It exited with this code.
    Exit(i32),
    /// It was killed, and its last threads still wait for a source ([`unkillable`]).
    Inert,
    /// It is gone, and the kernel does not say how it ended, because it was no child of this process.
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

/// A process that this process watches. It need not be a child of this process.
pub(crate) struct WatchedProcess {
    pid: Pid,
    /// For a server that a keeper has started: the process group in which it started, and in which its keepers stay.
    origin: Option<Pid>,
    /// The pidfd: readable once the process has ended. It never refers to another process (`pidfd_open(2)`).
    watch: AsyncFd<OwnedFd>,
    /// For a server that was not adopted: the control socket. Shutting it down ends a wait for the server's answer.
    control: Option<UnixStream>,
}

impl WatchedProcess {
    /// Starts a server in this cgroup, which logs in this format. Returns the server, and the control socket.
    ///
    /// The new process inherits copies of this process's descriptors, which the kernel closes at execve(2). Closing a
    /// file that was opened for writing through a volume sends FLUSH to the volume's server, and waits while that
    /// server is dead. So the supervisor opens no such file: of a volume it opens only directories, and files with
    /// `O_PATH`.
    ///
    /// # Errors
    /// When the server cannot be started.
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
            // That podfs passes its own version to its podfs-fuse, which compares the two.
            Program::OfPodfs(podfs) => (podfs.to_owned(), "podfs", None),
        };
        // Each value is in one word with its option, so that podfs-fuse takes no value for another option.
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

    /// Makes the keeper of a dead server start the next server, confined to `profile`. Returns the server and the
    /// control socket, or `None` if the keeper cannot start such a server.
    ///
    /// # Errors
    /// When the keeper does not answer, or there are no more processes or descriptors.
    pub(super) fn start_by_keeper(keeper: &LastFdKeeper, profile: Profile) -> io::Result<Option<(Self, UnixStream)>> {
        let Some(pid) = keeper.pid() else { return Ok(None) };
        if confined_to(pid) != Some(profile) {
            return Ok(None);
        }
        let Some((StartedSuccessor { pid: started, pidfd }, control)) = keeper.start_successor()? else {
            return Ok(None);
        };
        let mut process = Self::of(Pid::from_raw(started).ok_or(ErrorKind::InvalidData)?, pidfd)?;
        process.origin = getpgid(Some(process.pid)).ok();
        // A container that has taken control of the dead server may have made the keeper name any process.
        if !process.is_child() || process.origin != getpgid(Pid::from_raw(pid)).ok() {
            return Err(io::Error::other("the server process that it names is another process"));
        }
        oom::protect_server(started);
        // A server that this process executes inherits this process's limit of open files, which an operator may have
        // raised since the keeper started. Without the privilege to set it, the limit stays the keeper's.
        let _keepers_limit = prlimit(Some(process.pid), Resource::Nofile, getrlimit(Resource::Nofile));
        process.control = Some(control.try_clone()?);
        Ok(Some((process, control)))
    }

    /// Watches the process with this id.
    ///
    /// # Errors
    /// When there is no such process.
    pub(crate) fn with_pid(pid: i32) -> io::Result<Self> {
        let pid = Pid::from_raw(pid).ok_or(ErrorKind::InvalidInput)?;
        Self::of(pid, pidfd_open(pid, PidfdFlags::NONBLOCK)?)
    }

    fn of(pid: Pid, pidfd: OwnedFd) -> io::Result<Self> {
        // SAFETY: the `AsyncFd` owns the descriptor, and closes it when it is dropped.
        let watch = unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) }?;
        Ok(Self { pid, origin: None, watch, control: None })
    }

    pub(crate) fn pid(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// The confinement profile of the server, according to its arguments; `None` if they cannot be read.
    pub(super) fn profile(&self) -> Option<Profile> {
        confined_to(self.pid())
    }

    /// Waits until all threads of the process have ended. Returns how the process ended.
    pub(crate) async fn ended(&self) -> ProcessEnd {
        // Fails only if the descriptor is invalid; then the end stays unknown.
        let _ = self.watch.readable().await;
        self.reap()
    }

    /// Waits until the process has ended, or was killed and is [inert](unkillable).
    pub(super) async fn ended_or_inert(&self) -> ProcessEnd {
        let inert = async {
            loop {
                sleep(POLL_INTERVAL).await;
                if unkillable::is_inert(self.pid()) {
                    return;
                }
            }
        };
        tokio::select! {
            end = self.ended() => end,
            () = inert => ProcessEnd::Inert,
        }
    }

    /// Reaps the process in the background, and then its children, which the kernel makes children of this process: no
    /// zombie stays behind. A server and its children are in one process group, or in two.
    pub(super) fn reap_in_background(self) {
        tokio::spawn(async move {
            self.ended().await;
            for group in [Some(self.pid), self.origin].into_iter().flatten() {
                reap_group(group).await;
            }
        });
    }

    /// Shuts down the control socket of this dead server, which ends every wait for an answer of it. Otherwise the
    /// waits would not end: the server's keeper also has the other end of the socket open.
    pub(super) fn hang_up(&self) {
        if let Some(control) = &self.control {
            let _ = control.shutdown(Shutdown::Both);
        }
    }

    pub(crate) fn kill(&self) {
        self.signal(Signal::KILL);
    }

    pub(crate) fn signal(&self, signal: Signal) {
        // The kernel refuses only if the process has ended.
        let _ = pidfd_send_signal(self.watch.get_ref(), signal);
    }

    /// The reason why a server does not get ready, if it closed its socket: how it ended. Kills a server that did not end.
    pub(super) fn why_not_ready(&self, error: io::Error) -> io::Error {
        let is_closed =
            matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::UnexpectedEof);
        let mut ended = [PollFd::new(self.watch.get_ref(), PollFlags::IN)];
        let has_ended = is_closed && poll(&mut ended, Some(&END_TIMEOUT)) == Ok(1);
        self.kill();
        match if has_ended { self.reap() } else { ProcessEnd::Unknown } {
            ProcessEnd::Unknown => error,
            end => io::Error::new(error.kind(), format!("the server ended before it was ready ({end})")),
        }
    }

    /// Whether the process is a child of this process that was not reaped.
    fn is_child(&self) -> bool {
        let without_reaping = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        waitid(Id::PIDFd(self.watch.get_ref().as_fd()), without_reaping).is_ok()
    }

    /// Reads the exit status of a child that has ended, and the kernel then releases its process id. This process
    /// cannot read the status of another process's child.
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

/// Moves a server that a keeper has started to a process group of its own, as an executed server has. Call it when the
/// server has a keeper of its own: keepers stay in the group of the first server. All these processes have their user
/// id from the process id of the first server. While one of them is in that group, the kernel gives the number to no
/// other process.
pub(super) fn separate(pid: i32) {
    let pid = Pid::from_raw(pid);
    // Fails if the server has ended, or is no child of this process.
    let _same_group = setpgid(pid, pid);
}

/// Reaps the children of this process that are in this process group, until there are none.
async fn reap_group(group: Pid) {
    let group = nix::unistd::Pid::from_raw(group.as_raw_nonzero().get());
    loop {
        match waitid(Id::PGid(group), WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG) {
            Ok(WaitStatus::StillAlive) => sleep(POLL_INTERVAL).await,
            Ok(_) | Err(Errno::EINTR) => {}
            // The group has no child of this process any more.
            Err(_) => return,
        }
    }
}

/// The confinement profile of a server or a keeper, according to its arguments; `None` if they cannot be read.
fn confined_to(pid: i32) -> Option<Profile> {
    let arguments = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let mut words = arguments.split(|byte| *byte == 0).skip_while(|word| *word != b"--profile");
    words.nth(1).and_then(|name| Profile::named(std::str::from_utf8(name).ok()?))
}

/// Kills the process if it is the server of the pod with this uid, and waits at most two seconds for its end.
pub(crate) fn kill_server(pid: i32, uid: &str) {
    let Some(pid) = Pid::from_raw(pid) else { return };
    // The pidfd refers to this process for ever, even if the kernel gives its id to another process after its end.
    let Ok(watch) = pidfd_open(pid, PidfdFlags::empty()) else { return };
    let command = std::fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).unwrap_or_default();
    let words: Vec<_> = command.split(|byte| *byte == 0).collect();
    // Earlier versions of podfs passed the uid as a separate word.
    let option = format!("--uid={uid}");
    let is_of_pod = words.contains(&option.as_bytes()) || words.contains(&uid.as_bytes());
    if words.get(1) != Some(&&b"server"[..]) || !is_of_pod {
        return;
    }
    let _ = pidfd_send_signal(&watch, Signal::KILL);
    let mut ended = [PollFd::new(&watch, PollFlags::IN)];
    let _ = poll(&mut ended, Some(&END_TIMEOUT));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_server_that_ends_before_it_is_ready_is_reported_with_its_end() {
        let mut child = std::process::Command::new("sh").args(["-c", "exit 7"]).spawn().expect("a shell");
        let process = WatchedProcess::with_pid(child.id().cast_signed()).expect("a process");
        let error = process.why_not_ready(ErrorKind::ConnectionReset.into());
        assert_eq!(error.to_string(), "the server ended before it was ready (exit status: 7)");
        child.wait().expect_err("it was reaped");
    }
}
