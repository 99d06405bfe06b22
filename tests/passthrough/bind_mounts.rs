//! Sources that podfs bind-mounts, because FUSE cannot serve them.

use std::fs;
use std::os::fd::AsFd;
use std::path::Path;

use crate::common::namespace::{Container, Propagation, change_mount};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use podfs_fuse::mount::bind::bind;
use podfs_fuse::mount::directories::Directories;
use podfs_fuse::mount::point::{MountPoint, OldMountPolicy};
use podfs_fuse::mount::private::ContainerAccess;

fn open(path: &Path) -> fs::File {
    fs::File::open(path).expect("the source")
}

fn mount_tmpfs(path: &Path) {
    mount(Some("tmpfs"), path, Some("tmpfs"), MsFlags::empty(), None::<&str>).expect("a tmpfs");
}

/// A host whose `source` is a shared mount with another mount below it, as with systemd. The mounts end with their
/// mount namespace.
fn on_a_host_that_shares_mounts(test: fn(source: &Path, point: &Path)) {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().to_owned();
    Container::new(Propagation::Private).run(move || {
        mount_tmpfs(&path);
        change_mount(&path, MsFlags::MS_SHARED);
        let (source, point) = (path.join("source"), path.join("point"));
        fs::create_dir(&source).expect("a directory");
        mount_tmpfs(&source);
        fs::create_dir(source.join("below")).expect("a directory");
        mount_tmpfs(&source.join("below"));
        fs::write(source.join("below/file"), "kept").expect("written");
        test(&source, &point);
    });
}

#[test]
fn unmounting_a_bind_mount_leaves_what_is_mounted_below_its_source() {
    on_a_host_that_shares_mounts(|source, point| {
        let clone = bind(open(source).as_fd(), ContainerAccess::ReadWrite);
        let mut directories = Directories::default();
        let mount_point = MountPoint::prepare(point, OldMountPolicy::RemoveDead, &mut directories);
        let visible = mount_point.expect("a mount point").attach(&clone.expect("a clone")).expect("attached");
        assert_eq!(fs::read_to_string(point.join("below/file")).expect("read"), "kept");
        visible.unmount().expect("unmounted");
        assert_eq!(fs::read_to_string(source.join("below/file")).expect("the host keeps it"), "kept");
    });
}

#[test]
fn a_bind_mount_follows_what_is_mounted_on_the_host() {
    on_a_host_that_shares_mounts(|source, point| {
        fs::create_dir(point).expect("a directory");
        fs::create_dir(source.join("later")).expect("a directory");
        let clone = bind(open(source).as_fd(), ContainerAccess::ReadWrite).expect("a clone");
        let mount_point = MountPoint::prepare(point, OldMountPolicy::RemoveDead, &mut Directories::default());
        let _visible = mount_point.expect("a mount point").attach(&clone).expect("attached");
        mount_tmpfs(&source.join("later"));
        fs::write(source.join("later/file"), "seen").expect("written");
        assert_eq!(fs::read_to_string(point.join("later/file")).expect("it propagates"), "seen");
        umount2(&source.join("later"), MntFlags::empty()).expect("unmounted");
        assert!(!point.join("later/file").exists());
    });
}

#[test]
fn a_bind_mount_for_looking_refuses_changes_everywhere_in_it() {
    on_a_host_that_shares_mounts(|source, point| {
        fs::create_dir(point).expect("a directory");
        let clone = bind(open(source).as_fd(), ContainerAccess::ReadOnly).expect("a clone");
        let mount_point = MountPoint::prepare(point, OldMountPolicy::RemoveDead, &mut Directories::default());
        let _visible = mount_point.expect("a mount point").attach(&clone).expect("attached");
        for file in [point.join("new"), point.join("below/file")] {
            assert_eq!(fs::write(file, "").expect_err("read-only").raw_os_error(), Some(libc::EROFS));
        }
        fs::write(source.join("below/file"), "changed").expect("the host may");
    });
}
