//! The file system on which the bench measures: a new ext4 with a journal, in a file, on a loop device.
//!
//! The file system that this program is built on may be another kind, nearly full, or without a journal. Without a journal, ext4
//! looks at each inode that was freed in the last minutes before it makes a file, which takes longer than a request does.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use tempfile::TempDir;

/// Bytes of the file, most of which are never written.
const SIZE: u64 = 16 << 30;

static MOUNTED: OnceLock<PathBuf> = OnceLock::new();

/// The file system. Dropping it removes it.
pub struct Disk {
    base: TempDir,
}

/// Mounts the file system. The calling process gets a mount namespace of its own, so its mounts end with it.
pub fn begin() -> Disk {
    unshare(CloneFlags::CLONE_NEWNS).expect("a mount namespace");
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
        .expect("private mounts");
    let base = TempDir::with_prefix_in("podfs-bench-", env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let (image, at) = (base.path().join("image"), base.path().join("disk"));
    File::create_new(&image).and_then(|file| file.set_len(SIZE)).expect("a file");
    std::fs::create_dir(&at).expect("a directory");
    run(Command::new("mkfs.ext4").args(["-q", "-F", "-E", "lazy_itable_init=1"]).arg(&image));
    run(Command::new("mount").args(["-o", "loop,noatime"]).args([&image, &at]));
    MOUNTED.set(at).expect("the only one");
    Disk { base }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // The unmount detaches the loop device, and the file is removed with the directory.
        let _ = umount2(&self.base.path().join("disk"), MntFlags::MNT_DETACH);
    }
}

/// Where the file system is mounted.
pub fn path() -> &'static Path {
    MOUNTED.get().expect("it is mounted first")
}

fn run(command: &mut Command) {
    let status = command.stdout(Stdio::null()).status();
    assert!(status.is_ok_and(|status| status.success()), "{command:?} failed");
}
