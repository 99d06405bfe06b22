//! Code that the benches share: a server process, a tmpfs, medians, tables.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use podfs_fuse::client::ProjectionMount;
use podfs_fuse::client::ServerClient;
use podfs_fuse::client::VolumeIdentity;
use podfs_fuse::confinement::{Profile, confine};
use podfs_fuse::log::LineFormat;
use podfs_fuse::memory_lock;
use podfs_fuse::mount::directories::Directories;
use podfs_fuse::mount::point::{MountPoint, OldMountPolicy};
use podfs_fuse::mount::private::MountOptions;
use podfs_fuse::mount::visible::VisibleMount;
use podfs_fuse::projection::image::DirectoryAttributes;
use podfs_fuse::projection::tree::Root;
use podfs_fuse::projection::{FileEntry, ImageLayout};
use podfs_fuse::protocol::Greeting;
use podfs_fuse::protocol::Reporting;
use podfs_fuse::server::process;

/// The argument that makes this program the server.
pub const SERVE: &str = "--serve";

pub const DIRECTORIES: DirectoryAttributes = DirectoryAttributes { mode: 0o755, gid: 0 };

/// Serves until the bench ends, as `podfs server` does.
pub fn serve() {
    memory_lock::tune_allocator();
    memory_lock::protect_memory().expect("root can lock memory");
    confine(Profile::Projection, LineFormat::Text);
    process::serve("bench", "bench").expect("the bench closes the socket");
}

/// A projection with its own server process, mounted and visible.
pub struct Mounted {
    // Dropped in this order: the volume is unmounted, the projection ends, its server is killed. The projection asks the
    // server to end it: without a server, a keeper of descriptors would hold the socket open without an answer.
    _visible: VisibleMount,
    pub projection: ProjectionMount,
    _server: ServerProcess,
}

/// Killed when it is dropped.
struct ServerProcess(Child);

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Mounted {
    pub fn at(path: &Path, payload: &[(String, Vec<u8>)]) -> Self {
        let (ours, theirs) = UnixStream::pair().expect("a socket pair");
        let server = Command::new("/proc/self/exe")
            .arg(SERVE)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .spawn()
            .expect("this program can be started again");
        let root = Root { mode: 0o777, gid: 0, directories: Default::default() };
        let mut projection = ProjectionMount::start(
            &Arc::new(ServerClient::new(ours, Greeting::new("bench", "bench")).expect("the server answers")),
            &root,
            &MountOptions::default(),
            &VolumeIdentity::default(),
            &Reporting::default(),
        )
        .expect("a mount");
        projection.commit(&layout(payload), DIRECTORIES).expect("a commit");
        let mut directories = Directories::default();
        let point = MountPoint::prepare(path, OldMountPolicy::RemoveDead, &mut directories).expect("a mount point");
        let visible = projection.show(&point).expect("a visible mount");
        Self { _visible: visible, projection, _server: ServerProcess(server) }
    }
}

pub fn layout(payload: &[(String, Vec<u8>)]) -> ImageLayout<'_> {
    let entries = payload.iter().map(|(path, content)| FileEntry { path, content, mode: 0o644, uid: 0, gid: 0 });
    ImageLayout::new(entries, DIRECTORIES).expect("a tree")
}

/// `count` keys of `size` bytes; `round` makes each payload differ from the one before.
pub fn payload(count: usize, size: usize, round: usize) -> Vec<(String, Vec<u8>)> {
    (0..count).map(|key| (format!("key-{key:04}"), vec![b'a' + (round % 26) as u8; size])).collect()
}

/// A tmpfs of its own, unmounted at the end.
pub struct Tmpfs(tempfile::TempDir);

impl Tmpfs {
    pub fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        mount(Some("tmpfs"), directory.path(), Some("tmpfs"), MsFlags::empty(), None::<&str>).expect("a tmpfs");
        Self(directory)
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = umount2(self.0.path(), MntFlags::MNT_DETACH);
    }
}

pub fn median(mut samples: Vec<Duration>) -> Duration {
    samples.sort_unstable();
    samples[samples.len() / 2]
}

/// The time of one call: the mean of `batch` calls.
pub fn per_call(batch: u32, mut call: impl FnMut()) -> Duration {
    let began = Instant::now();
    (0..batch).for_each(|_| call());
    began.elapsed() / batch
}

pub fn row(what: &str, ours: Duration, peer: Duration) {
    let ratio = ours.as_secs_f64() / peer.as_secs_f64();
    println!("{what:<44} {:>12} {:>12} {ratio:>8.2}", show(ours), show(peer));
}

pub fn header(title: &str, peer: &str) {
    println!("\n{title:<44} {:>12} {peer:>12} {:>8}", "podfs", "ratio");
}

pub fn show(duration: Duration) -> String {
    format!("{:.2} us", duration.as_secs_f64() * 1e6)
}
