//! Block devices that are files of the disk.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use super::passthrough::disk_directory;

/// A loop device. It is detached when the test ends; declare it before what mounts it.
pub struct LoopDevice {
    path: PathBuf,
    directory: TempDir,
}

impl LoopDevice {
    /// A blank device of so many MiB.
    pub fn new(mib: u64) -> LoopDevice {
        LoopDevice::with(mib, &[])
    }

    /// As [`Self::new`], with these arguments for losetup(8).
    fn with(mib: u64, arguments: &[&str]) -> LoopDevice {
        let directory = disk_directory();
        let file = directory.path().join("disk");
        File::create(&file).and_then(|file| file.set_len(mib << 20)).expect("a file");
        LoopDevice { path: attach(&file, arguments), directory }
    }

    /// Its path: `/dev/loop7`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its path as text.
    pub fn text(&self) -> &str {
        self.path.to_str().expect("text")
    }

    /// Lets nothing be written to it from now on.
    pub fn make_read_only(&mut self) {
        expect(Command::new("losetup").arg("--detach").arg(&self.path));
        self.path = attach(&self.directory.path().join("disk"), &["--read-only"]);
    }

    /// Makes it so many MiB large.
    pub fn grow(&self, mib: u64) {
        let file = File::options().write(true).open(self.directory.path().join("disk")).expect("its file");
        file.set_len(mib << 20).expect("grown");
        expect(Command::new("losetup").arg("--set-capacity").arg(&self.path));
    }

    /// Writes at an offset, past every cache.
    pub fn write(&self, bytes: &[u8], offset: u64) {
        let device = File::options().write(true).open(&self.path).expect("the device");
        device.write_all_at(bytes, offset).expect("written");
        device.sync_all().expect("synced");
    }

    /// Its first MiB.
    pub fn head(&self) -> Vec<u8> {
        let mut bytes = vec![0; 1 << 20];
        File::open(&self.path).and_then(|file| file.read_exact_at(&mut bytes, 0)).expect("read");
        bytes
    }

    /// Runs a program with these arguments and the device.
    #[track_caller]
    pub fn run(&self, program: &str, arguments: &[&str]) {
        expect(Command::new(program).args(arguments).arg(&self.path));
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.path).output();
    }
}

fn attach(file: &Path, arguments: &[&str]) -> PathBuf {
    let text = expect(Command::new("losetup").args(["--find", "--show"]).args(arguments).arg(file));
    PathBuf::from(text.trim())
}

#[track_caller]
fn expect(command: &mut Command) -> String {
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let done = command.env("PATH", path).output().expect("a program");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(done.status.success(), "{command:?}: {}{}", text(&done.stdout), text(&done.stderr));
    text(&done.stdout)
}
