//! Starts servers for tests, which have files of mounts open and so cannot start servers themselves.
//!
//! A process that is started has copies of its parent's descriptors until it executes its program. The execution closes them, and
//! the kernel sends FLUSH to each file's server and waits for the answer. If that server is dead, the kernel waits for its
//! successor: the server that is being started, or one that another test of this process cannot start because it waits, too.
//! So one process starts all servers. It is this program again, started before the first mount is served, and opens no
//! file of any mount.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{LazyLock, Mutex};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

use crate::passthrough::PassthroughOptions;
use crate::protocol::{receive, send};

/// Tells this program that it starts servers.
const SPAWNER: &str = "PODFS_TEST_SPAWNER";
/// Tells this program that it is a server. The value is a [`ServerTask`] as JSON.
const SERVER: &str = "PODFS_TEST_SERVER";
/// The first descriptor that a server inherits. Its standard input and output are the channel.
pub const FIRST: RawFd = 3;
/// The number of inherited descriptors: device, region, source.
const DESCRIPTORS: usize = 3;

/// The task of a server.
#[derive(Serialize, Deserialize)]
pub struct ServerTask {
    /// The process that keeps the predecessor's descriptors, if the server has a predecessor.
    pub keeper: Option<i32>,
    /// The options of the volume.
    pub options: PassthroughOptions,
}

impl ServerTask {
    /// The task that this process was started with, if it is a server.
    pub fn of_this_process() -> Option<Self> {
        let order = std::env::var(SERVER).ok()?;
        Some(serde_json::from_str(&order).expect("JSON"))
    }
}

/// A process that was started. It is killed when dropped.
pub struct Process {
    /// Readable once all of its threads are dead.
    watch: OwnedFd,
}

impl Process {
    /// Starts a server. Returns the process, and this side's end of the channel.
    pub fn start(order: &ServerTask, descriptors: [BorrowedFd<'_>; DESCRIPTORS]) -> (Self, UnixStream) {
        static ONE: LazyLock<Mutex<Spawner>> = LazyLock::new(|| Mutex::new(Spawner::start()));
        let (ours, theirs) = UnixStream::pair().expect("a socket pair");
        let [device, region, source] = descriptors;
        let Spawner { orders, .. } = &*ONE.lock().expect("no panic");
        send(orders, order, &[theirs.as_fd(), device, region, source]).expect("sent");
        let ((), started) = receive(orders).expect("an answer").expect("the spawner lives");
        let [watch] = <[OwnedFd; 1]>::try_from(started).expect("a process");
        (Self { watch }, ours)
    }

    /// Kills the process, and waits until it is dead.
    pub fn kill(&self) {
        // An error means that the process has ended by itself.
        let _ = pidfd_send_signal(&self.watch, Signal::KILL);
        while poll(&mut [PollFd::new(&self.watch, PollFlags::IN)], None) == Err(rustix::io::Errno::INTR) {}
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// This program, started again to run a test function that is a helper, not a test.
fn again(function: &str) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.args(["--exact", function, "--nocapture"]);
    command
}

/// The process that starts servers. It ends when this one does.
struct Spawner {
    orders: UnixStream,
    _process: Child,
}

impl Spawner {
    fn start() -> Self {
        let (orders, theirs) = UnixStream::pair().expect("a socket pair");
        let mut command = again("passthrough::tests::spawner::spawning");
        command.env(SPAWNER, "").stdin(OwnedFd::from(theirs)).stdout(Stdio::null());
        Self { orders, _process: command.spawn().expect("this program can be started again") }
    }
}

/// Not a test: the program of the spawner.
#[test]
fn spawning() {
    if std::env::var_os(SPAWNER).is_none() {
        return;
    }
    let mut servers = Vec::<Child>::new();
    let orders = io::stdin();
    while let Some((order, descriptors)) = receive::<ServerTask>(&orders).expect("an order") {
        servers.retain_mut(|server| matches!(server.try_wait(), Ok(None)));
        let server = start_server(&order, descriptors);
        // The process keeps its number until the wait above reaps it.
        let pid = Pid::from_child(&server);
        servers.push(server);
        let watch = pidfd_open(pid, PidfdFlags::empty()).expect("a process");
        send(&orders, &(), &[watch.as_fd()]).expect("sent");
    }
}

fn start_server(order: &ServerTask, descriptors: Vec<OwnedFd>) -> Child {
    let mut descriptors = descriptors.into_iter();
    let channel = descriptors.next().expect("a channel");
    let mut command = again("passthrough::tests::serving");
    command.env(SERVER, serde_json::to_string(order).expect("JSON"));
    command.stdout(channel.try_clone().expect("a descriptor")).stdin(channel);
    let descriptors: [OwnedFd; DESCRIPTORS] = descriptors.collect::<Vec<_>>().try_into().expect("all of them");
    let numbers = descriptors.each_ref().map(OwnedFd::as_raw_fd);
    // SAFETY: only descriptors are copied, to numbers that are the child's own.
    unsafe {
        command.pre_exec(move || {
            // Copies the descriptors to high numbers first, so that `dup2` overwrites none that is still needed.
            let away = numbers.map(|number| libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 100));
            for (place, number) in (FIRST..).zip(away) {
                if libc::dup2(number, place) == -1 {
                    return Err(io::Error::last_os_error());
                }
            }
            Ok(())
        });
    }
    command.spawn().expect("this program can be started again")
}
