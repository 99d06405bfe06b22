//! The fallbacks of podfs for older kernels, which the tests use on this kernel.

use std::fs;
use std::os::fd::AsFd;
use std::sync::Arc;

use crate::common::{DIRECTORIES, layout, plain_root, start_server, unmount_below};
use nix::errno::Errno;
use podfs_fuse::client::ProjectionMount;
use podfs_fuse::client::VolumeIdentity;
use podfs_fuse::mount::directories::Directories;
use podfs_fuse::mount::point::{MountPoint, OldMountPolicy};
use podfs_fuse::mount::private::{MountOptions, MountPointType, PrivateMount, open_device};
use podfs_fuse::mount::table::mounts_at;
use podfs_fuse::protocol::Reporting;
use tempfile::TempDir;

#[test]
fn before_linux_6_15_the_private_mount_is_cloned_in_a_namespace_of_its_own() {
    let (client, _server) = start_server();
    let (root, options, reporting) = (plain_root(), MountOptions::default(), Reporting::default());
    let projection = ProjectionMount::start(&Arc::new(client), &root, &options, &VolumeIdentity::default(), &reporting);
    let mut projection = projection.expect("a mount");
    let directory = TempDir::with_prefix("podfs-test-").expect("a directory");
    let point = MountPoint::prepare(directory.path(), OldMountPolicy::RemoveDead, &mut Directories::default());
    let visible = projection.show_as_before_6_15(&point.expect("a mount point")).expect("attached");
    assert_eq!(mounts_at(visible.path()).expect("a table").len(), 1, "only the visible mount is attached");
    let refused = nix::unistd::mkdir(&visible.path().join("x"), nix::sys::stat::Mode::S_IRWXU);
    assert_eq!(refused, Err(Errno::EROFS), "the clone is read-only");

    projection.commit(&layout(&[("a", "1")]), DIRECTORIES).expect("the private mount can still be used");
    assert_eq!(fs::read_to_string(visible.path().join("a")).expect("a file"), "1");

    // In this way, the kernel clones a private mount only once. So podfs makes another private mount of the same file
    // system.
    visible.unmount().expect("unmounted");
    let point = MountPoint::prepare(directory.path(), OldMountPolicy::RemoveDead, &mut Directories::default());
    let again = projection.show_as_before_6_15(&point.expect("a mount point")).expect("attached again");
    assert_eq!(fs::read_to_string(again.path().join("a")).expect("a file"), "1");
    let mount = mounts_at(again.path()).expect("a table").remove(0);
    assert!(mount.read_only, "{mount:?}");
    projection.commit(&layout(&[("a", "2")]), DIRECTORIES).expect("the private mount can still be used");
    assert_eq!(fs::read_to_string(again.path().join("a")).expect("a file"), "2");
    unmount_below(directory.path());
}

#[test]
fn before_linux_6_15_a_mount_of_a_single_file_is_cloned_the_same_way() {
    // The test needs no server: the kernel does not request the attributes of the root for these operations.
    let device = open_device().expect("/dev/fuse");
    let options = MountOptions { shape: MountPointType::File, ..Default::default() };
    let mount = PrivateMount::new(device.as_fd(), &options).expect("a mount");
    let clone = mount.read_only_clone_before_6_15().expect("a clone");

    let directory = TempDir::with_prefix("podfs-test-").expect("a directory");
    let (path, mut directories) = (directory.path().join("file"), Directories::default());
    let point = MountPoint::prepare_shape(&path, MountPointType::File, OldMountPolicy::RemoveDead, &mut directories);
    let visible = point.expect("a mount point").attach(&clone).expect("attached");
    assert_eq!(mounts_at(visible.path()).expect("a table").len(), 1, "only the visible mount is attached");
    unmount_below(directory.path());
}
