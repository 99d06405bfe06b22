//! A directory of the disk, shown through a passthrough volume with a server process of its own.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;

use podfs_fuse::client::{MountedVolume, ServerClient, VolumeIdentity};
use podfs_fuse::mount::directories::Directories;
use podfs_fuse::mount::point::{MountPoint, OldMountPolicy};
use podfs_fuse::mount::private::{ContainerAccess, MountOptions};
use podfs_fuse::mount::visible::VisibleMount;
use podfs_fuse::passthrough::{CacheMode, DataPath, PassthroughOptions};
use serde_json::Value;
use tempfile::TempDir;

use super::io_uring;
use super::served::end_connection;
use super::{ServerChild, TIMEOUT, start_server, start_server_without_io_uring};

/// A mounted passthrough volume.
///
/// The drop unmounts the volume before it removes the directories, so that it removes nothing through the mount.
pub struct Mounted {
    visible: VisibleMount,
    passthrough: MountedVolume,
    server: ServerChild,
    _point: TempDir,
    source: Source,
}

/// A directory that is shown.
#[derive(Clone)]
enum Source {
    Own(Arc<TempDir>),
    Other(PathBuf),
}

impl Drop for Mounted {
    fn drop(&mut self) {
        end_connection(self.visible.path());
    }
}

impl Mounted {
    /// An empty directory of the disk, mounted for reading and writing.
    pub fn new() -> Self {
        Self::with(PassthroughOptions::default())
    }

    /// As [`Self::new`], with this caching by the kernel.
    pub fn with_cache(cache: CacheMode) -> Self {
        Self::with(PassthroughOptions { cache, ..PassthroughOptions::default() })
    }

    /// As [`Self::new`], with a limit of so many bytes and without other users of the source. Then the server reads and writes,
    /// not the kernel.
    pub fn with_limit(limit: u64) -> Self {
        Self::with(PassthroughOptions { limit: Some(limit), exclusive: true, ..PassthroughOptions::default() })
    }

    /// As [`Self::new`], without other users of the source, as an emptyDir.
    pub fn exclusive() -> Self {
        Self::with(PassthroughOptions { exclusive: true, ..PassthroughOptions::default() })
    }

    /// As an emptyDir with [`CacheMode::Always`]: only callers of this mount use the source, so the kernel caches all names,
    /// attributes and data, and keeps locks itself.
    pub fn alone() -> Self {
        Self::with(PassthroughOptions { exclusive: true, cache: CacheMode::Always, ..PassthroughOptions::default() })
    }

    /// As [`Self::new`], with io_uring requested, and with a server that may not use the system calls of io_uring.
    pub fn refused_io_uring(log: File) -> Self {
        let options = PassthroughOptions { io_uring: true, ..PassthroughOptions::default() };
        let source = Source::Own(Arc::new(disk_directory()));
        Self::start_on(start_server_without_io_uring(log), source, options, ContainerAccess::ReadWrite)
    }

    fn with(options: PassthroughOptions) -> Self {
        Self::start(Source::Own(Arc::new(disk_directory())), options, ContainerAccess::ReadWrite)
    }

    /// Another mount of the same directory, with its own server process.
    pub fn second(&self) -> Self {
        Self::start(self.source.clone(), PassthroughOptions::default(), ContainerAccess::ReadWrite)
    }

    /// The same directory, mounted read-only.
    pub fn read_only(&self) -> Self {
        Self::start(self.source.clone(), PassthroughOptions::default(), ContainerAccess::ReadOnly)
    }

    /// As [`Self::new`], of a directory that the caller has made and removes.
    pub fn of(source: &Path) -> Self {
        Self::of_with_cache(source, CacheMode::default())
    }

    /// As [`Self::of`], with this caching by the kernel.
    pub fn of_with_cache(source: &Path, cache: CacheMode) -> Self {
        Self::start(
            Source::Other(source.to_owned()),
            PassthroughOptions { cache, ..PassthroughOptions::default() },
            ContainerAccess::ReadWrite,
        )
    }

    /// As [`Self::of`], with these options.
    pub fn of_with_options(source: &Path, options: PassthroughOptions) -> Self {
        Self::start(Source::Other(source.to_owned()), options, ContainerAccess::ReadWrite)
    }

    /// As [`Self::of`], with a limit of so many bytes. Files that are already in the directory count.
    pub fn of_with_limit(source: &Path, limit: u64) -> Self {
        let options = PassthroughOptions { limit: Some(limit), ..PassthroughOptions::default() };
        Self::start(Source::Other(source.to_owned()), options, ContainerAccess::ReadWrite)
    }

    fn start(source: Source, options: PassthroughOptions, access: ContainerAccess) -> Self {
        Self::start_on(start_server(), source, options, access)
    }

    fn start_on(
        (client, server): (ServerClient, ServerChild),
        source: Source,
        options: PassthroughOptions,
        access: ContainerAccess,
    ) -> Self {
        let directory = File::open(source.path()).expect("the source opens");
        let options = PassthroughOptions { io_uring: io_uring::is_chosen() || options.io_uring, ..options };
        let passthrough = MountedVolume::of_source(
            &Arc::new(client),
            directory.as_fd(),
            &options,
            &MountOptions::default(),
            &VolumeIdentity::new("data", Value::Null),
        )
        .expect("a mount");
        let directory = TempDir::with_prefix("podfs-test-").expect("a directory");
        let mut directories = Directories::default();
        let point =
            MountPoint::prepare(directory.path(), OldMountPolicy::RemoveDead, &mut directories).expect("a mount point");
        let visible = passthrough.show(&point, access).expect("a visible mount");
        assert_eq!(passthrough.is_over_io_uring(), io_uring::is_chosen(), "the transport is the chosen one");
        Self { visible, passthrough, server, _point: directory, source }
    }

    /// The mount point that containers see.
    pub fn path(&self) -> &Path {
        self.visible.path()
    }

    /// The process id of its server.
    pub fn server(&self) -> u32 {
        self.server.id()
    }

    /// Whether requests come over io_uring.
    pub fn is_over_io_uring(&self) -> bool {
        self.passthrough.is_over_io_uring()
    }

    /// The data path: kernel passthrough, or the server.
    pub fn data_path(&self) -> DataPath {
        self.passthrough.data_path()
    }

    /// Number of requests served so far.
    pub fn requests(&self) -> u64 {
        self.passthrough.requests()
    }

    /// The number of requests of the kernel while `act` runs, by operation, without operations that have none.
    pub fn requests_during(&self, act: impl FnOnce()) -> BTreeMap<&'static str, u64> {
        let watch = self.passthrough.watch();
        let before = watch.requests_by_operation();
        act();
        let mut requests = watch.requests_by_operation();
        for (operation, count) in &mut requests {
            *count -= before.get(operation).copied().unwrap_or_default();
        }
        requests.retain(|_, count| *count > 0);
        requests
    }

    /// The directory that is shown.
    pub fn source(&self) -> &Path {
        self.source.path()
    }
}

impl Source {
    fn path(&self) -> &Path {
        match self {
            Self::Own(directory) => directory.path(),
            Self::Other(path) => path,
        }
    }
}

/// An empty directory on the file system of the build directory, which is on a disk. `/tmp` may be a tmpfs.
pub fn disk_directory() -> TempDir {
    TempDir::with_prefix_in("podfs-test-", env!("CARGO_TARGET_TMPDIR")).expect("a directory")
}

/// The result of `call`. Fails the test if the call hangs, because no operation on a mount may hang.
#[track_caller]
pub fn within_timeout<T: Send + 'static>(what: &str, call: impl FnOnce() -> T + Send + 'static) -> T {
    let (result, came) = channel();
    thread::spawn(move || {
        let _ = result.send(call());
    });
    came.recv_timeout(TIMEOUT).unwrap_or_else(|reason| panic!("{what}: {reason}"))
}
