//! Server processes without a supervisor, and projections of such a server, used through the library.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use nix::mount::{MntFlags, umount2};
use podfs_fuse::client::ServerClient;
use podfs_fuse::client::{Commit, ProjectionMount, VolumeIdentity};
use podfs_fuse::mount::directories::Directories;
use podfs_fuse::mount::point::{MountPoint, OldMountPolicy};
use podfs_fuse::mount::private::MountOptions;
use podfs_fuse::mount::visible::VisibleMount;
use podfs_fuse::projection::image::DirectoryAttributes;
use podfs_fuse::projection::tree::Root;
use podfs_fuse::projection::{FileEntry, ImageLayout};
use podfs_fuse::protocol::Greeting;
use podfs_fuse::protocol::Reporting;
use tempfile::TempDir;

use super::{PODFS_FUSE, io_uring};

pub const DIRECTORIES: DirectoryAttributes = DirectoryAttributes { mode: 0o755, gid: 0 };

/// A server process, killed when the test ends.
pub struct ServerChild(Child);

impl ServerChild {
    pub fn id(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for ServerChild {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a server process without a supervisor, for directories of the host.
pub fn start_server() -> (ServerClient, ServerChild) {
    let profile = if io_uring::is_chosen() { "passthrough-io-uring" } else { "passthrough" };
    start_server_command(&mut server_command(profile))
}

/// As [`start_server`], of a server that may not use the system calls of io_uring and writes JSON log lines to a file.
pub fn start_server_without_io_uring(log: File) -> (ServerClient, ServerChild) {
    start_server_command(server_command("passthrough").args(["--log-format", "json"]).stderr(log))
}

/// Starts a server process that never gets `CAP_SYS_ADMIN`.
pub fn start_server_without_admin() -> (ServerClient, ServerChild) {
    const CAP_SYS_ADMIN: libc::c_ulong = 21;
    let mut command = server_command("passthrough");
    // SAFETY: the call is async-signal-safe.
    unsafe {
        command.pre_exec(|| match libc::prctl(libc::PR_CAPBSET_DROP, CAP_SYS_ADMIN, 0, 0, 0) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    start_server_command(&mut command)
}

fn server_command(profile: &str) -> Command {
    let mut command = Command::new(PODFS_FUSE);
    command.args(["server", "--pod", "test/test", "--uid", "test", "--profile", profile]);
    command
}

fn start_server_command(command: &mut Command) -> (ServerClient, ServerChild) {
    let (ours, theirs) = UnixStream::pair().expect("a socket pair");
    let server = command.stdin(Stdio::from(OwnedFd::from(theirs))).spawn().expect("the server starts");
    let server = ServerChild(server);
    let client = ServerClient::new(ours, Greeting::new("test", "test")).expect("the server answers");
    (client, server)
}

/// A projection with its own server process, used through the library.
pub struct Served {
    pub visible: VisibleMount,
    pub projection: ProjectionMount,
    pub server: ServerChild,
    _directory: TempDir,
}

impl Served {
    /// Mounts an empty projection, visible before its first commit.
    pub fn new(root: &Root) -> Self {
        let (client, server) = start_server_command(&mut server_command("projection"));
        let (options, reporting) = (MountOptions::default(), Reporting::default());
        let projection =
            ProjectionMount::start(&Arc::new(client), root, &options, &VolumeIdentity::default(), &reporting);
        let projection = projection.expect("a mount");
        let directory = TempDir::with_prefix("podfs-test-").expect("a directory");
        let mut directories = Directories::default();
        let point =
            MountPoint::prepare(directory.path(), OldMountPolicy::RemoveDead, &mut directories).expect("a mount point");
        let visible = projection.show(&point).expect("a visible mount");
        Self { visible, projection, server, _directory: directory }
    }

    pub fn with(payload: &[(&str, &str)]) -> Self {
        let mut served = Self::new(&plain_root());
        served.commit(payload);
        served
    }

    pub fn path(&self) -> &Path {
        self.visible.path()
    }

    pub fn commit(&mut self, payload: &[(&str, &str)]) -> Commit {
        self.projection.commit(&layout(payload), DIRECTORIES).expect("a commit")
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        end_connection(self.visible.path());
    }
}

/// Unmounts, and aborts the FUSE connection before its server is killed. Another test may just have forked a process, which has
/// all files of this process until its exec closes them. Without a server, that close would wait for ever for an answer,
/// because `/dev/fuse` is among these files and keeps the connection alive.
pub fn end_connection(mount: &Path) {
    let _ = umount2(mount, MntFlags::MNT_FORCE | MntFlags::MNT_DETACH);
}

pub fn plain_root() -> Root {
    Root { mode: 0o777, gid: 0, directories: Default::default() }
}

pub fn layout<'a>(payload: &[(&'a str, &'a str)]) -> ImageLayout<'a> {
    let entries = payload.iter().map(|(path, content)| FileEntry {
        path,
        content: content.as_bytes(),
        mode: 0o644,
        uid: 0,
        gid: 0,
    });
    ImageLayout::new(entries, DIRECTORIES).expect("a tree")
}
