//! The server process: started from the running binary, ended with the supervisor.

use std::future::pending;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use podfs_fuse::server::Server;
use tokio::process::{Child, Command};
use tokio::time::timeout;

use super::report::Audience;
use crate::manifest::pod::PodIdentity;

/// A running server, and the connection to it.
pub(super) struct ServerProcess {
    client: Arc<Server>,
    /// Shut down to tell the server that nobody needs it any more.
    control: UnixStream,
    child: Option<Child>,
}

impl ServerProcess {
    /// Starts a server from the same binary, even if another has taken its place on disk. It logs for the same audience.
    pub(super) fn start(pod: &PodIdentity, audience: Audience) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        let child = Command::new("/proc/self/exe")
            .arg0("podfs")
            .args(["server", "--pod", &pod.to_string(), "--log-format", audience.log_format()])
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .current_dir("/")
            // Its own process group: a Ctrl-C is for the supervisor, which unmounts first.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()?;
        let control = ours.try_clone()?;
        Ok(Self { client: Arc::new(Server::new(ours)), control, child: Some(child) })
    }

    pub(super) fn client(&self) -> Arc<Server> {
        Arc::clone(&self.client)
    }

    /// How the server ended. Waits for ever once that was told.
    pub(super) async fn ended(&mut self) -> String {
        let Some(child) = &mut self.child else {
            return pending().await;
        };
        let status = child.wait().await;
        self.child = None;
        status.map_or_else(|error| error.to_string(), |status| status.to_string())
    }

    pub(super) async fn kill(&mut self) {
        if let Some(child) = &mut self.child {
            // It may have ended by itself.
            let _ = child.kill().await;
        }
    }

    /// Lets the server end by itself, or kills it after `patience`.
    pub(super) async fn stop(mut self, patience: Duration) {
        let _ = self.control.shutdown(std::net::Shutdown::Both);
        if let Some(child) = &mut self.child
            && timeout(patience, child.wait()).await.is_err()
        {
            self.kill().await;
        }
    }
}
