//! A disk that takes no write for a while.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::mount::{MntFlags, MsFlags, mount, umount2};

use super::loop_device::LoopDevice;

/// The file system of a disk. Dropping it unmounts it.
pub struct FreezableDisk {
    at: PathBuf,
}

/// A file system that takes no write: each process that writes waits. Dropping it thaws the file system.
pub struct Frozen<'a>(&'a FreezableDisk);

impl FreezableDisk {
    /// An empty file system.
    pub fn mount(device: &LoopDevice, at: &Path) -> FreezableDisk {
        device.run("mkfs.ext4", &["-q"]);
        fs::create_dir(at).expect("a directory");
        mount(Some(device.path()), at, Some("ext4"), MsFlags::empty(), None::<&str>).expect("a file system");
        let disk = FreezableDisk { at: at.to_owned() };
        fs::remove_dir(at.join("lost+found")).expect("removed");
        disk
    }

    /// Freezes it.
    pub fn freeze(&self) -> Frozen<'_> {
        self.fsfreeze("--freeze");
        Frozen(self)
    }

    /// Where it is mounted.
    pub fn at(&self) -> &Path {
        &self.at
    }

    #[track_caller]
    fn fsfreeze(&self, action: &str) {
        let done = Command::new("/usr/sbin/fsfreeze").arg(action).arg(&self.at).output().expect("a program");
        assert!(done.status.success(), "{action}: {}", String::from_utf8_lossy(&done.stderr));
    }
}

impl Drop for FreezableDisk {
    fn drop(&mut self) {
        let _ = umount2(&self.at, MntFlags::MNT_DETACH);
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        self.0.fsfreeze("--unfreeze");
    }
}
