//! What podfs does on kernels older than this one, forced here.

mod common;

use std::os::fd::AsFd;

use common::{plain_root, start_server, unmount_below};
use nix::errno::Errno;
use podfs_fuse::mount::directories::Directories;
use podfs_fuse::mount::private::{MountOptions, PrivateMount, open_device};
use podfs_fuse::mount::table::mounts_at;
use podfs_fuse::mount::visible::{Leftovers, MountPoint};
use tempfile::TempDir;

#[test]
fn before_linux_6_15_the_private_mount_is_cloned_in_a_namespace_of_its_own() {
    let (client, _server) = start_server();
    let device = open_device().expect("/dev/fuse");
    let mount = PrivateMount::new(device.as_fd(), &MountOptions::default()).expect("a mount");
    let volume = client.serve(device.as_fd(), &plain_root(), false).expect("a volume");
    let clone = mount.read_only_clone_before_6_15().expect("a clone");

    let directory = TempDir::with_prefix("podfs-test-").expect("a directory");
    let point = MountPoint::prepare(directory.path(), Leftovers::RemoveDead, &mut Directories::default());
    let visible = point.expect("a mount point").attach(&clone).expect("attached");
    assert_eq!(mounts_at(visible.path()).expect("a table").len(), 1, "only the visible mount is anywhere");
    let refused = nix::unistd::mkdir(&visible.path().join("x"), nix::sys::stat::Mode::S_IRWXU);
    assert_eq!(refused, Err(Errno::EROFS), "the clone is read-only");

    let before = client.requests(volume).expect("a count");
    let refused = nix::sys::stat::mkdirat(&mount, "y", nix::sys::stat::Mode::S_IRWXU);
    assert_eq!(refused, Err(Errno::EROFS), "the server refuses what was not announced");
    assert!(client.requests(volume).expect("a count") > before, "the private mount still reaches it");
    unmount_below(directory.path());
}
