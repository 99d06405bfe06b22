//! Leaving a container: the `podfs node` of a DaemonSet continues on the node itself (`--on-host`).
//!
//! The kernel kills all processes of a container when it ends, so no process that serves volumes may be in it. The container's
//! first process installs the programs on the node (`programs`) and starts the daemon from there:
//!
//! 1. The daemon has the node's mounts and root directory. So each path of its options is a path of the node, its mounts appear on
//!    the node, and the container needs no directory of the node for it.
//! 2. The daemon keeps the container's network, and stays in the container's cgroup: it ends with the container, and its memory and
//!    CPU time count there.
//! 3. Its supervisors belong to the node: transient units where the node has systemd; elsewhere processes with the namespaces of the
//!    node's first process, in a cgroup outside of what the kubelet kills. The end of the container does not reach them.
//! 4. The container's first process stays in the container, so that `kubectl exec` works. It forwards signals and ends with
//!    the daemon's exit status; when it is killed, the kernel kills the daemon.
//!
//! The option `--on-host` decides, not a check of the namespaces: podfs can also be in the mount namespace of a test, of a
//! unit or of a sandbox, which it must not leave.

mod programs;

use std::env;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, exit};
use std::sync::mpsc::channel;
use std::thread;

use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use tracing::{info, warn};

use self::programs::Programs;
use crate::kube::settings::SERVICE_ACCOUNT;
use crate::supervisor::run_dir::trust;

/// The node's first process, where the container shares the node's process ids.
const FIRST: &str = "/proc/1";
/// The environment variable that the first process of the container sets for the daemon that it starts on the node.
pub(crate) const LEFT: &str = "PODFS_LEFT_CONTAINER";
/// The signals that the container's first process forwards.
const FORWARDED: [Signal; 3] = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP];

/// Why the daemon cannot continue on the node.
#[derive(Debug, thiserror::Error)]
pub enum OnHostError {
    /// This process sees no other process of the node, or is in no container.
    #[error(
        "--on-host: process 1 has the same mounts as podfs, so it is not that of a node whose container podfs runs in; give the \
         container hostPID: true, or leave out --on-host where podfs runs in no container"
    )]
    NoNode,
    /// The node's namespaces cannot be entered.
    #[error("--on-host: cannot enter the namespaces of the node: {0}; give the container privileged: true")]
    Namespaces(#[source] io::Error),
    /// The programs cannot be copied.
    #[error("--on-host: cannot install the programs in {} of the node: {cause}", .directory.display())]
    Install {
        /// The directory of the node.
        directory: PathBuf,
        /// The error of the system call.
        #[source]
        cause: io::Error,
    },
    /// The copy does not start.
    #[error(
        "--on-host: the node cannot start {}: {cause}; it needs glibc 2.34 or later, and a directory that is not mounted noexec",
        .program.display()
    )]
    Start {
        /// The program on the node.
        program: PathBuf,
        /// The error of the system call.
        #[source]
        cause: io::Error,
    },
}

/// Whether this process is the daemon that a container's first process has started on the node.
pub fn has_left_container() -> bool {
    env::var_os(LEFT).is_some()
}

/// Starts the daemon on the node with these arguments, from a copy of the programs in a directory of the node, and ends this
/// process when the daemon has ended. Must be called in a process without other threads.
///
/// # Errors
/// When this process is in no container of a node, or the daemon cannot be started.
pub fn continue_on_node(directory: &Path, arguments: Vec<OsString>) -> Result<(), OnHostError> {
    let node = NodeNamespaces::open()?;
    let failed = |cause| OnHostError::Install { directory: directory.to_owned(), cause };
    let programs = Programs::own().map_err(failed)?;
    let account = account();
    let mut signals = SigSet::empty();
    FORWARDED.iter().chain([&Signal::SIGCHLD]).for_each(|signal| signals.add(*signal));
    signals.thread_block().map_err(|errno| OnHostError::Namespaces(errno.into()))?;
    let (sender, receiver) = channel();
    let directory = directory.to_owned();
    // The kernel kills the daemon when the thread that has started it ends (`PR_SET_PDEATHSIG`).
    thread::spawn(move || {
        let started = node.enter().and_then(|()| start(&directory, &programs, &arguments, account));
        let _ = sender.send(started);
        loop {
            thread::park();
        }
    });
    let pid = receiver.recv().expect("the thread never ends")?;
    wait(pid, &signals)
}

/// The path of the container's service account that is valid on the node for as long as this process lives.
fn account() -> Option<PathBuf> {
    let directory = Path::new(SERVICE_ACCOUNT).canonicalize().ok()?;
    let below = directory.strip_prefix("/").ok()?;
    Some(Path::new("/proc").join(std::process::id().to_string()).join("root").join(below))
}

/// Installs the programs and starts the daemon. Must be called by a thread that has entered the node.
fn start(
    directory: &Path,
    programs: &Programs,
    arguments: &[OsString],
    account: Option<PathBuf>,
) -> Result<Pid, OnHostError> {
    let failed = |cause| OnHostError::Install { directory: directory.to_owned(), cause };
    trust::check(directory).map_err(|untrusted| failed(untrusted.into()))?;
    let program = programs.install(directory).map_err(failed)?;
    let mut command = Command::new(&program);
    command.arg0("podfs").args(arguments).env(LEFT, "1");
    if let Some(account) = account {
        command.env(crate::kube::settings::SERVICE_ACCOUNT_VARIABLE, account);
    }
    // SAFETY: the child makes two system calls, which take numbers and memory of its own.
    unsafe {
        command.pre_exec(|| {
            SigSet::empty().thread_set_mask()?;
            match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        });
    }
    let child = command.spawn().map_err(|cause| OnHostError::Start { program: program.clone(), cause })?;
    info!("podfs node continues on the node, as {} (pid {})", program.display(), child.id());
    match programs::remove_unused(directory, &program) {
        Ok(removed) => {
            removed.iter().for_each(|path| info!("no process runs {} any more; it is removed", path.display()))
        }
        Err(error) => warn!("podfs cannot remove programs of earlier versions in {}: {error}", directory.display()),
    }
    Ok(Pid::from_raw(child.id().cast_signed()))
}

/// Forwards signals until the daemon has ended, and ends with its exit status.
fn wait(pid: Pid, signals: &SigSet) -> ! {
    loop {
        match signals.wait() {
            Ok(Signal::SIGCHLD) | Err(_) => match waitpid(pid, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::Exited(_, code)) => exit(code),
                Ok(WaitStatus::Signaled(_, signal, _)) => exit(128 + signal as i32),
                Ok(_) => {}
                Err(_no_child) => exit(1),
            },
            Ok(signal) => drop(kill(pid, signal)),
        }
    }
}

/// The namespaces and the root directory of the node that the daemon enters: the node's mounts, and whole paths of cgroups.
struct NodeNamespaces {
    mounts: OwnedFd,
    cgroups: OwnedFd,
    root: OwnedFd,
}

impl NodeNamespaces {
    fn open() -> Result<NodeNamespaces, OnHostError> {
        let open =
            |name: &str| File::open(format!("{FIRST}/{name}")).map(OwnedFd::from).map_err(OnHostError::Namespaces);
        let identity = |file: &File| file.metadata().map(|file| (file.dev(), file.ino()));
        let mounts = File::from(open("ns/mnt")?);
        let own = File::open("/proc/self/ns/mnt").and_then(|own| identity(&own)).map_err(OnHostError::Namespaces)?;
        if identity(&mounts).map_err(OnHostError::Namespaces)? == own {
            return Err(OnHostError::NoNode);
        }
        Ok(NodeNamespaces { mounts: mounts.into(), cgroups: open("ns/cgroup")?, root: open("root")? })
    }

    /// Moves the calling thread to the node, and with it the processes that it starts later.
    fn enter(&self) -> Result<(), OnHostError> {
        let entered = || {
            unshare(CloneFlags::CLONE_FS)?;
            setns(self.cgroups.as_fd(), CloneFlags::CLONE_NEWCGROUP)?;
            setns(self.mounts.as_fd(), CloneFlags::CLONE_NEWNS)?;
            nix::unistd::fchdir(self.root.as_fd())?;
            nix::unistd::chroot(".")
        };
        entered().map_err(|errno| OnHostError::Namespaces(errno.into()))
    }
}

/// The namespaces of the node that a daemon outside of its container does not have, for the supervisors that it starts.
///
/// # Errors
/// When they cannot be opened.
pub(in crate::node) fn namespaces_of_node() -> io::Result<Vec<OwnedFd>> {
    let open = |name: &&str| File::open(format!("{FIRST}/ns/{name}")).map(OwnedFd::from);
    ["net", "ipc", "uts"].iter().map(open).collect()
}
