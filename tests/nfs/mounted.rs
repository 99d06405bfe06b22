//! An export that this process mounts and serves.
#![allow(dead_code, reason = "each test program uses its part")]

use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use podfs_fuse::mount::private::{MountOptions, PrivateMount, open_device};
use podfs_fuse::nfs::options::ExportOptions;
use podfs_fuse::nfs::thread::{NfsThread, ServedExport};
use podfs_fuse::nfs::writeback::log::Log;
use podfs_fuse::region::{Region, VolumeKind};
use podfs_nfs::ExportAddress;
use podfs_nfs::mount::{MountRequest, MountedExport, reach};
use podfs_nfs::rpc::dial::bound;
use rustix::fs::CWD;
use rustix::mount::{MountAttrFlags, MoveMountFlags, UnmountFlags, move_mount, unmount};
use tempfile::TempDir;

use crate::nfs_rig::{Ganesha, Scripted};

/// The time limit of a mount.
const BUDGET: Duration = Duration::from_secs(20);
/// The number of segments of a write-back log.
const SEGMENTS: usize = 64;

static THREAD: LazyLock<NfsThread> = LazyLock::new(|| NfsThread::start().expect("a thread"));

/// A mounted export, without a path. Dropping it unmounts it.
pub struct Mounted {
    mount: PrivateMount,
    region: Arc<Region>,
}

impl Mounted {
    /// Mounts the first export of a server.
    pub fn new(server: &impl Serves) -> Self {
        Self::with(server, |_| {})
    }

    /// Mounts the first export of a server, with options that `change` has changed.
    pub fn with(server: &impl Serves, change: impl FnOnce(&mut ExportOptions)) -> Self {
        let mut options = options(server);
        change(&mut options);
        let device = open_device().expect("/dev/fuse");
        let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
        let permissions = options.permission_check();
        let mount = PrivateMount::of_export(device.as_fd(), attributes, permissions, &MountOptions::default());
        let mount = mount.expect("a mount");
        let region = Arc::new(Region::create(VolumeKind::Nfs).expect("a region"));
        let log = Log::create(SEGMENTS).expect("a log");
        let log = log.as_fd().try_clone_to_owned().expect("a descriptor");
        let sockets = sockets(&options);
        let export = ServedExport { device, region: Arc::clone(&region), log, sockets, options, trace: Arc::default() };
        THREAD.serve(export).expect("served");
        Self { mount, region }
    }

    /// The number of requests that this process has read and not answered.
    pub fn unanswered_requests(&self) -> usize {
        self.region.unanswered()
    }

    /// Sets the read-ahead of the kernel to that of a pod's volumes.
    pub fn read_ahead(&self) {
        self.mount.set_read_ahead(4096).expect("set");
    }

    /// The number of requests that this process has read.
    pub fn requests(&self) -> u64 {
        self.region.requests()
    }

    /// The path of an entry of the mount.
    pub fn at(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}/{name}", self.mount.as_fd().as_raw_fd()))
    }
}

impl Mounted {
    /// Attaches the mount at a path, for other programs.
    pub fn shown(self) -> Shown {
        let directory = TempDir::with_prefix("podfs-test-").expect("a directory");
        let clone = self.mount.read_write_clone().expect("a clone");
        attach(&clone, directory.path());
        Shown { directory, mounted: self }
    }
}

/// A mounted export at a path.
pub struct Shown {
    directory: TempDir,
    pub mounted: Mounted,
}

impl Shown {
    pub fn path(&self) -> &Path {
        self.directory.path()
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        let _ = unmount(self.directory.path(), UnmountFlags::DETACH);
    }
}

/// A mounted tmpfs of 1 MiB. Dropping it unmounts it.
pub struct Tmpfs(TempDir);

impl Tmpfs {
    pub fn new() -> Self {
        let directory = TempDir::with_prefix("podfs-test-").expect("a directory");
        rustix::mount::mount("none", directory.path(), "tmpfs", rustix::mount::MountFlags::empty(), c"size=1m")
            .expect("mounted");
        Self(directory)
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = unmount(self.0.path(), UnmountFlags::DETACH);
    }
}

fn attach(clone: &OwnedFd, path: &Path) {
    move_mount(clone, "", CWD, path, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH).expect("attached");
}

/// Two sockets: one for the connection, and one for a new connection.
pub fn sockets(options: &ExportOptions) -> Vec<OwnedFd> {
    (0..2).map(|_| bound(options.nfs, false).expect("a socket")).collect()
}

/// A server of the export `/export`.
pub trait Serves {
    /// The addresses of the NFS service and of the MOUNT service.
    fn addresses(&self) -> (SocketAddr, SocketAddr);
}

impl Serves for Ganesha {
    fn addresses(&self) -> (SocketAddr, SocketAddr) {
        (self.address(), self.mount_address())
    }
}

impl Serves for Scripted {
    fn addresses(&self) -> (SocketAddr, SocketAddr) {
        (self.address(), self.address())
    }
}

impl Serves for (SocketAddr, SocketAddr) {
    fn addresses(&self) -> (SocketAddr, SocketAddr) {
        *self
    }
}

/// The default options for the export of a server.
pub fn options(server: &impl Serves) -> ExportOptions {
    let (nfs, mount) = server.addresses();
    let export = ExportAddress::parse("the-server", "/export").expect("an address");
    let request = MountRequest {
        port: Some(nfs.port()),
        mount_port: Some(mount.port()),
        reserved_port: false,
        ..MountRequest::new(export.clone(), nfs.ip(), BUDGET)
    };
    let MountedExport { nfs, mountd, root, attributes, limits, one_user } =
        reach(&request).expect("the server answers");
    let options = ExportOptions::new(export, nfs, root.as_bytes(), limits);
    ExportOptions { mountd: Some(mountd), root_attributes: Some(attributes), one_user, ..options }
}
