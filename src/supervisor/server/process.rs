//! One server process: started, watched, killed.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use podfs_fuse::confinement::Profile;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::sleep;

use super::program::{ServerProgram, this_podfs};
use super::spawn::{Role, Start};
use super::unkillable;
use crate::manifest::pod::PodIdentity;
use crate::supervisor::run_dir::cgroup::Cgroup;
use crate::supervisor::server::oom;
use crate::supervisor::status::report::Audience;

/// How often podfs checks a process that was killed.
const GLANCE: Duration = Duration::from_millis(50);

/// What a server is started from.
#[derive(Clone, Copy, Debug)]
pub(in crate::supervisor) enum Program<'a> {
    /// The podfs-fuse that this supervisor opened, even if another has taken its place on disk or it is gone from there.
    Own(&'a ServerProgram),
    /// Another podfs, which executes its own podfs-fuse.
    OfPodfs(&'a Path),
}

/// A process that is not one's own, and perhaps not one's child either.
pub(crate) struct Process {
    pid: Pid,
    /// Readable once it has ended. The process keeps its number until then, and no other is taken for it.
    watch: AsyncFd<OwnedFd>,
    /// The way to talk to it, to end a wait for its answer.
    control: Option<UnixStream>,
}

impl Process {
    /// Starts a server that logs for this audience, in this cgroup. Gives the way to talk to it.
    ///
    /// The new process has copies of what is open here, and closes them when it executes its program. Closing a file that
    /// was opened for writing through a volume asks the volume's server (FLUSH), and waits while that is dead. So the
    /// supervisor has none: it opens directories of volumes, and paths only.
    ///
    /// # Errors
    /// When it cannot be started.
    pub(super) fn start(
        program: Program<'_>,
        pod: &PodIdentity,
        profile: Profile,
        audience: Audience,
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
        let words =
            [name, "server", &pod_name, &uid, "--profile", profile.name(), "--log-format", audience.log_format()];
        let words: Vec<_> = words.into_iter().chain(started_by).map(OsStr::new).collect();
        let cgroup = cgroup.map(Cgroup::directory);
        let start = Start {
            program: &path,
            arguments: &words,
            input: theirs.into(),
            cgroup,
            namespaces: &[],
            role: Role::Server,
        };
        let mut process = Self::with_pid(start.spawn()?)?;
        oom::protect_server(process.pid());
        process.control = Some(ours.try_clone()?);
        Ok((process, ours))
    }

    /// Watches a process that runs.
    ///
    /// # Errors
    /// When there is no such process.
    pub(crate) fn with_pid(pid: i32) -> io::Result<Self> {
        let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
        let watch = pidfd_open(pid, PidfdFlags::NONBLOCK)?;
        // SAFETY: the descriptor is owned by what watches it, and stays open for as long.
        let watch = unsafe { AsyncFd::register_with_interest(watch, Interest::READABLE) }?;
        Ok(Self { pid, watch, control: None })
    }

    pub(crate) fn pid(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// What the server is confined to, as its arguments say; nothing if they cannot be read.
    pub(super) fn profile(&self) -> Option<Profile> {
        let arguments = fs::read(format!("/proc/{}/cmdline", self.pid())).ok()?;
        let mut words = arguments.split(|byte| *byte == 0).skip_while(|word| *word != b"--profile");
        words.nth(1).and_then(|name| Profile::named(std::str::from_utf8(name).ok()?))
    }

    /// How it ended: all of its threads.
    pub(crate) async fn ended(&self) -> String {
        // Only a descriptor that is none fails here, and then nothing can be known.
        let _ = self.watch.readable().await;
        self.reap()
    }

    /// How it ended, once it does nothing any more: it has ended, or was killed and [what is left](unkillable) waits for a source.
    pub(super) async fn spent(&self) -> String {
        let remains_only = async {
            loop {
                sleep(GLANCE).await;
                if unkillable::is_spent(self.pid()) {
                    return;
                }
            }
        };
        tokio::select! {
            how = self.ended() => how,
            () = remains_only => "it was killed, and ends when its source answers".to_owned(),
        }
    }

    /// Reaps it in the background, and its children, which become this process's: none stays behind as a zombie. A server and its
    /// children are a process group.
    pub(super) fn leave(self) {
        tokio::spawn(async move {
            self.ended().await;
            let group = nix::unistd::Pid::from_raw(self.pid());
            loop {
                match waitid(Id::PGid(group), WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG) {
                    Ok(WaitStatus::StillAlive) => sleep(GLANCE).await,
                    Ok(_) | Err(Errno::EINTR) => {}
                    // It has no children left.
                    Err(_) => return,
                }
            }
        });
    }

    /// It is dead: ends every wait for its answer. Without this the waits would not end, because its keeper has the other end of
    /// the socket, too.
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

    /// The kernel forgets a child once its exit status was read; the status of other processes' children cannot be read at all.
    fn reap(&self) -> String {
        let status = loop {
            match waitid(Id::PIDFd(self.watch.get_ref().as_fd()), WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG) {
                Err(Errno::EINTR) => {}
                status => break status,
            }
        };
        match status {
            Ok(WaitStatus::Signaled(_, signal, _)) => format!("signal: {} ({signal})", signal as i32),
            Ok(WaitStatus::Exited(_, code)) => format!("exit status: {code}"),
            _ => "it is gone".to_owned(),
        }
    }
}

/// Kills the server of the pod with this uid, if that is what the process is, and waits until it is dead.
pub(crate) fn kill_server(pid: i32, uid: &str) {
    let Some(pid) = Pid::from_raw(pid) else { return };
    // The number is that of one process for as long as this descriptor is open.
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
