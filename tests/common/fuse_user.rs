//! A user without privileges that may mount with fusermount3, as on laptops.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use nix::mount::{MntFlags, umount2};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use podfs_fuse::mount::table::mounts_at;
use tempfile::TempDir;

use super::caller::Caller;
use super::eventually;
use super::namespace::{Container, Propagation, bind, mount_tmpfs};

/// The user.
pub const USER: Caller = Caller::new(65534);

/// Runs `test` in a mount namespace in which `/dev/fuse` has the mode that udev sets: each user may use it.
pub fn where_users_may_mount(test: impl FnOnce() + Send + 'static) {
    Container::new(Propagation::Private).run(move || {
        let directory = TempDir::with_prefix("podfs-test-").expect("a directory");
        mount_tmpfs(directory.path());
        let (device, number) = (directory.path().join("fuse"), makedev(10, 229));
        mknod(&device, SFlag::S_IFCHR, Mode::empty(), number).expect("a device");
        fs::set_permissions(&device, Permissions::from_mode(0o666)).expect("the mode is set");
        bind(&device, Path::new("/dev/fuse"));
        umount2(directory.path(), MntFlags::MNT_DETACH).expect("it is mounted in its place");
        drop(directory);
        test();
    });
}

/// A prefix that runs a command as this user.
pub fn as_user(user: Caller) -> Vec<String> {
    ["setpriv", &format!("--reuid={}", user.uid), &format!("--regid={}", user.gid), "--clear-groups", "--"]
        .map(str::to_owned)
        .to_vec()
}

/// Whether a view (`podfs view`) is mounted at a directory.
pub fn is_mounted(directory: &Path) -> bool {
    mounts_at(directory).expect("a mount table").iter().any(|mounted| mounted.fs_type == "fuse.podfs-view")
}

/// The content of a file as the user reads it; none if the user cannot read it.
pub fn read(path: &Path) -> Option<String> {
    USER.run(Path::new("/"), || fs::read_to_string(path).ok())
}

#[track_caller]
pub fn wait_read(path: &Path, content: &str) {
    eventually(&format!("{} is {content:?}", path.display()), || read(path).as_deref() == Some(content));
}
