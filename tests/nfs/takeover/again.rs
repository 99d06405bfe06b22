//! Helper processes of a test: the test program starts itself again, to run a test function that is a helper.
//!
//! The workers in a volume are a helper process because of this: a child process has copies of its parent's descriptors until
//! its exec, which closes them. When a file of a volume is closed, the kernel sends FLUSH to the volume's server and waits for
//! the answer. So if a process with an open file of a volume starts that volume's server, the child waits for itself.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use podfs_fuse::server::process::serve;

/// The environment variable that makes this program a server. The standard input of the server is its control socket.
const SERVER: &str = "PODFS_TEST_SERVER";
/// The pod of the server.
pub const POD: &str = "a-pod";

/// The command that runs the test function `function` of this program, with the environment variable `variable`, which makes
/// the function a helper.
pub fn again(function: &str, variable: &str) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.args(["--exact", function, "--nocapture"]).env(variable, "");
    command
}

/// A helper process. Dropping it kills it.
pub struct Process(pub Child);

impl Process {
    /// Starts a server. Also returns the supervisor's end of its control socket.
    pub fn server() -> (Self, UnixStream) {
        let (ours, theirs) = UnixStream::pair().expect("a socket pair");
        let mut command = again("takeover::again::serving", SERVER);
        command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null());
        (Self(command.spawn().expect("this program can be started again")), ours)
    }

    /// Kills the process, and waits until it has ended.
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

/// This is no test, but the main function of a server.
#[test]
fn serving() {
    if std::env::var_os(SERVER).is_none() {
        return;
    }
    serve("test", POD).expect("served");
    std::process::exit(0);
}
