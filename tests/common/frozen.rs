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

/// A frozen file system: each process that writes to it waits. Dropping this thaws the file system.
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

    /// Freezes the file system.
    pub fn freeze(&self) -> Frozen<'_> {
        self.fsfreeze("--freeze");
        Frozen(self)
    }

    /// The mount point.
    pub fn at(&self) -> &Path {
        &self.at
    }

    #[track_caller]
    fn fsfreeze(&self, action: &str) {
        let output = Command::new("/usr/sbin/fsfreeze").arg(action).arg(&self.at).output().expect("a program");
        assert!(output.status.success(), "{action}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

impl Drop for FreezableDisk {
    fn drop(&mut self) {
        let _ = umount2(&self.at, MntFlags::MNT_DETACH);
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        // A second panic would abort the test program, which leaves the mounts and processes of all its tests.
        let unfrozen = Command::new("/usr/sbin/fsfreeze").arg("--unfreeze").arg(&self.0.at).output();
        assert!(std::thread::panicking() || unfrozen.is_ok_and(|output| output.status.success()), "it stays frozen");
    }
}
