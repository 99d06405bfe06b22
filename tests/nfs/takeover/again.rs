//! Helper processes of a test: this program, started again to run a test function that is a helper.
//!
//! The worker in a volume is such a process, too. A child process has copies of its parent's descriptors until it executes
//! its program; that closes them, and the kernel sends FLUSH to each file's server and waits for the answer. So a process that
//! starts servers must have no file of a volume open, or it waits for the server that it is about to start.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use podfs_fuse::audit::output::AuditOutput;
use podfs_fuse::server::process::serve;

/// Tells this program that it is a server. Its standard input is the control socket.
const SERVER: &str = "PODFS_TEST_SERVER";
/// The pod of the server.
pub const POD: &str = "a-pod";

/// This program, to do what the test function `function` does when `variable` says that it is to.
pub fn again(function: &str, variable: &str) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.args(["--exact", function, "--nocapture"]).env(variable, "");
    command
}

/// A process that is killed when it is dropped.
pub struct Process(pub Child);

impl Process {
    /// Starts a server. Gives the other end of its control socket, too.
    pub fn server() -> (Self, UnixStream) {
        let (ours, theirs) = UnixStream::pair().expect("a socket pair");
        let mut command = again("takeover::again::serving", SERVER);
        command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null());
        (Self(command.spawn().expect("this program can be started again")), ours)
    }

    /// Kills it, and waits until it is dead.
    pub fn kill(&mut self) {
        // The process may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// No test: what a server does.
#[test]
fn serving() {
    if std::env::var_os(SERVER).is_none() {
        return;
    }
    serve("test", POD, AuditOutput::standard_error()).expect("served");
    std::process::exit(0);
}
