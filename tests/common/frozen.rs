//! A disk that takes no write for a while, or loses power.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::mount::{MntFlags, MsFlags, mount, umount2};

use super::loop_device::LoopDevice;

/// `EXT4_IOC_SHUTDOWN` and its flag `EXT4_GOING_FLAGS_NOLOGFLUSH` (fs/ext4/ext4.h, Linux 4.11).
const SHUT_DOWN: u32 = 0x8004_587d;
const WITHOUT_WRITING_THE_JOURNAL: u32 = 2;

/// The file system of a disk. Dropping it unmounts it.
pub struct FreezableDisk {
    at: PathBuf,
}

/// A frozen file system: each process that writes to it waits. Dropping this thaws the file system.
pub struct Frozen<'a>(&'a FreezableDisk);

impl FreezableDisk {
    /// An empty file system.
    pub fn mount(device: &LoopDevice, at: &Path) -> FreezableDisk {
        FreezableDisk::mount_with(device, at, &[])
    }

    /// An empty file system that mkfs.ext4 has made with these options.
    pub fn mount_with(device: &LoopDevice, at: &Path, options: &[&str]) -> FreezableDisk {
        device.run("mkfs.ext4", &[&["-q"], options].concat());
        fs::create_dir(at).expect("a directory");
        let disk = FreezableDisk::mount_again(device, at);
        fs::remove_dir(at.join("lost+found")).expect("removed");
        disk
    }

    /// The file system that is on a device already.
    pub fn mount_again(device: &LoopDevice, at: &Path) -> FreezableDisk {
        mount(Some(device.path()), at, Some("ext4"), MsFlags::empty(), None::<&str>).expect("a file system");
        FreezableDisk { at: at.to_owned() }
    }

    /// Stops the file system like a power loss: the device has only what was written to it before, and each later call fails.
    /// The caller drops this after the mounts that use the file system.
    pub fn cut_power(&self) {
        let at = File::open(&self.at).expect("the file system");
        // SAFETY: the kernel reads one u32, from a reference that is valid during the call.
        let outcome = unsafe { libc::ioctl(at.as_raw_fd(), SHUT_DOWN.into(), &WITHOUT_WRITING_THE_JOURNAL) };
        assert_eq!(outcome, 0, "the file system does not stop: {}", std::io::Error::last_os_error());
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
