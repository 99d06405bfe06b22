//! Block devices whose content is a file (loop devices).

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use tempfile::TempDir;

use super::passthrough::disk_directory;

/// Locked while a test attaches or exchanges a file. So no other test takes the number of a device that an exchange
/// detaches for a moment.
static ATTACHING: Mutex<()> = Mutex::new(());

fn attaching() -> MutexGuard<'static, ()> {
    ATTACHING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A loop device. It is detached when the test ends; declare it before the mounts that use it.
pub struct LoopDevice {
    path: PathBuf,
    directory: TempDir,
    /// Whether this is detached already, so that another device may have its number.
    is_detached: bool,
}

impl LoopDevice {
    /// A blank device of `mib` MiB.
    pub fn new(mib: u64) -> LoopDevice {
        LoopDevice::of(disk_directory(), mib)
    }

    /// A blank device of `mib` MiB that can store `kib` KiB. Further writes fail with an I/O error.
    pub fn worn(mib: u64, kib: u64) -> LoopDevice {
        let directory = disk_directory();
        let options = format!("size={kib}k");
        let none = None::<&str>;
        mount(none, directory.path(), Some("tmpfs"), MsFlags::empty(), Some(options.as_str())).expect("a tmpfs");
        LoopDevice::of(directory, mib)
    }

    fn of(directory: TempDir, mib: u64) -> LoopDevice {
        let file = directory.path().join("disk");
        File::create(&file).and_then(|file| file.set_len(mib << 20)).expect("a file");
        LoopDevice { path: attach(&file, &[]), directory, is_detached: false }
    }

    /// Lets a [worn](Self::worn) device store `kib` KiB.
    pub fn allow(&self, kib: u64) {
        let options = format!("size={kib}k");
        let (none, flags) = (None::<&str>, MsFlags::MS_REMOUNT);
        mount(none, self.directory.path(), none, flags, Some(options.as_str())).expect("another size");
    }

    /// Lets a worn device store no more than it has already.
    pub fn wear_out(&self) {
        let usage = nix::sys::statvfs::statvfs(self.directory.path()).expect("a tmpfs");
        self.allow((usage.blocks() - usage.blocks_free()) * usage.fragment_size() / 1024);
    }

    /// Lets each read fail with an I/O error. The content of the device is lost.
    pub fn break_reads(&self) {
        File::create(self.directory.path().join("disk")).expect("its file");
        // Without its cached blocks, the kernel has to read the device again.
        self.run("blockdev", &["--flushbufs"]);
    }

    /// Its path: `/dev/loop7`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its path as text.
    pub fn text(&self) -> &str {
        self.path.to_str().expect("text")
    }

    /// Makes it read-only from now on.
    pub fn make_read_only(&mut self) {
        self.detach();
        self.path = attach(&self.directory.path().join("disk"), &["--read-only"]);
        self.is_detached = false;
    }

    /// Detaches it. The kernel removes it when no process has it open any more.
    pub fn detach(&mut self) {
        expect(Command::new("losetup").arg("--detach").arg(&self.path));
        self.is_detached = true;
    }

    /// Puts another disk of `mib` MiB in its place, with the same path and number.
    pub fn exchange(&self, mib: u64) {
        let _alone = attaching();
        expect(Command::new("losetup").arg("--detach").arg(&self.path));
        let disk = self.directory.path().join("other");
        File::create(&disk).and_then(|file| file.set_len(mib << 20)).expect("a file");
        expect(Command::new("losetup").arg(&self.path).arg(&disk));
    }

    /// Grows it to `mib` MiB.
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
        if !self.is_detached {
            let _ = Command::new("losetup").arg("--detach").arg(&self.path).output();
        }
        // A worn device has a tmpfs there; for others, nothing is mounted.
        let _ = umount2(self.directory.path(), MntFlags::MNT_DETACH);
    }
}

fn attach(file: &Path, arguments: &[&str]) -> PathBuf {
    let _alone = attaching();
    let text = expect(Command::new("losetup").args(["--find", "--show"]).args(arguments).arg(file));
    PathBuf::from(text.trim())
}

#[track_caller]
fn expect(command: &mut Command) -> String {
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let output = command.env("PATH", path).output().expect("a program");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{command:?}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}
