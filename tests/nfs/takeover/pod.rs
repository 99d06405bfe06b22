//! A pod with a volume: the server of the pod is a helper process, and the test program is the supervisor.

use std::sync::{Arc, Mutex};

use podfs_fuse::client::MountedVolume;
use podfs_fuse::client::VolumeIdentity;
use podfs_fuse::client::{ServerClient, UnloadableVolume};
use podfs_fuse::mount::point::MountPoint;
use podfs_fuse::mount::private::{ContainerAccess, MountOptions};
use podfs_fuse::mount::visible::{VisibleMount, detach};
use podfs_fuse::nfs::options::ExportOptions;
use podfs_fuse::protocol::Greeting;
use rustix::mount::MountAttrFlags;
use serde_json::Value;
use std::path::Path;
use tempfile::TempDir;

use crate::takeover::again::{POD, Process};

/// A pod with one volume. Dropping it unmounts the volume and ends the server.
pub struct Pod {
    volume: Option<MountedVolume>,
    visible: Option<VisibleMount>,
    directory: TempDir,
    server: Arc<ServerClient>,
    process: Mutex<Process>,
}

impl Pod {
    /// A pod with a volume for the export of `options`.
    pub fn new(options: &ExportOptions) -> Self {
        let (process, control) = Process::server();
        let server = Arc::new(ServerClient::new(control, Greeting::new("test", POD)).expect("a server"));
        let sockets = server.nfs_sockets().join(options, 1, false).expect("sockets");
        let (attributes, mount) = (MountAttrFlags::empty(), MountOptions::default());
        let volume = MountedVolume::of_export(
            &server,
            sockets,
            options,
            attributes,
            &mount,
            &VolumeIdentity::new("a-volume", Value::Null),
        );
        let volume = volume.expect("a volume");
        let directory = TempDir::with_prefix("podfs-test-").expect("a directory");
        let point = MountPoint::of_mount(directory.path()).expect("a point");
        let visible = volume.show(&point, ContainerAccess::ReadWrite).expect("the volume is attached");
        Self { volume: Some(volume), visible: Some(visible), directory, server, process: Mutex::new(process) }
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// The read-ahead of the mount in `/sys/class/bdi`, in KiB.
    pub fn read_ahead(&self) -> u32 {
        let device = std::os::unix::fs::MetadataExt::dev(&std::fs::metadata(self.path()).expect("the root"));
        let (major, minor) = (libc::major(device), libc::minor(device));
        let text = std::fs::read_to_string(format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb")).expect("read");
        text.trim().parse().expect("a number")
    }

    /// Kills the server of the pod, and lets a successor take over.
    pub fn replace_server(&self) {
        let mut process = self.process.lock().expect("no panic");
        // The successor starts before the kill: until its exec, it has copies of this process's files, and the exec closes
        // them, for which it needs the present server.
        let (next, control) = Process::server();
        let successor = self.server.greet(control).expect("the successor answers");
        process.kill();
        let mut keeper = self.server.mark_dead();
        let succession =
            self.server.succeed(successor, &mut keeper, UnloadableVolume::GivenUp).expect("the successor takes over");
        assert!(succession.given_up.is_empty(), "{:?}", succession.given_up);
        *process = next;
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        // After a failed test, a process may still use the volume; a detached mount does not need its end.
        let _ = detach(self.directory.path());
        drop((self.visible.take(), self.volume.take()));
        self.server.end();
    }
}
