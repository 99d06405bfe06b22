//! Mounts that tests make for themselves, unmounted at the end.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use tempfile::TempDir;

use super::namespace::bind;

/// A mount on a temporary directory.
pub struct Scratch(TempDir);

impl Scratch {
    /// An empty tmpfs with these options.
    pub fn tmpfs(options: &str) -> Self {
        let scratch = Self::new();
        let failure = "a tmpfs";
        mount(Some("tmpfs"), scratch.path(), Some("tmpfs"), MsFlags::empty(), Some(options)).expect(failure);
        fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o755)).expect("the mode is set");
        scratch
    }

    /// The file system of this type on a device.
    pub fn of_device(device: &Path, kind: &str) -> Self {
        let scratch = Self::new();
        mount(Some(device), scratch.path(), Some(kind), MsFlags::empty(), None::<&str>).expect("a file system");
        scratch
    }

    /// A bind mount of a directory at a path that every user can reach.
    pub fn bind(directory: &Path) -> Self {
        let scratch = Self::new();
        bind(directory, scratch.path());
        scratch
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    fn new() -> Self {
        Self(TempDir::with_prefix("podfs-test-").expect("a directory"))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = umount2(self.path(), MntFlags::MNT_DETACH);
    }
}
