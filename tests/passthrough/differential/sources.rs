//! The file systems whose directories are compared with volumes of them.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use nix::mount::{MsFlags, mount};

use crate::common::loop_device::LoopDevice;
use crate::common::passthrough::disk_directory;
use crate::common::scratch::Scratch;
use crate::common::stoppable::Stoppable;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceKind {
    Ext4,
    Xfs,
    Btrfs,
    Tmpfs,
    Overlay,
    Bindfs,
}

impl SourceKind {
    /// Whether the file system has file handles, and these last.
    pub fn has_handles(self) -> bool {
        !matches!(self, SourceKind::Overlay | SourceKind::Bindfs)
    }
}

/// A file system with two equal directories: `native` and `shown`, which volumes show.
pub struct SourceDisk {
    pub kind: SourceKind,
    base: PathBuf,
    _parts: Vec<Box<dyn Send + Sync>>,
}

impl SourceDisk {
    pub fn new(kind: SourceKind) -> SourceDisk {
        let (base, parts) = match kind {
            SourceKind::Ext4 => on_device("mkfs.ext4", &["-q"], "ext4"),
            SourceKind::Xfs => on_device("mkfs.xfs", &["-q"], "xfs"),
            SourceKind::Btrfs => on_device("mkfs.btrfs", &["-q"], "btrfs"),
            SourceKind::Tmpfs => of_scratch(Scratch::tmpfs("size=1g"), Vec::new()),
            SourceKind::Overlay => overlay(),
            SourceKind::Bindfs => bindfs(),
        };
        let disk = SourceDisk { kind, base, _parts: parts };
        for directory in [disk.native(), disk.shown()] {
            fs::create_dir(&directory).expect("made");
            fs::set_permissions(&directory, Permissions::from_mode(0o777)).expect("set");
        }
        disk
    }

    pub fn base(&self) -> &Path {
        &self.base
    }

    pub fn native(&self) -> PathBuf {
        self.base.join("native")
    }

    pub fn shown(&self) -> PathBuf {
        self.base.join("shown")
    }

    /// Whether podfs can have its root directory there, and so the content of emptyDirs.
    pub fn has_empty_dirs(&self) -> bool {
        !matches!(self.kind, SourceKind::Overlay | SourceKind::Bindfs)
    }
}

type Parts = Vec<Box<dyn Send + Sync>>;

/// A mounted file system and what it needs, in the order in which they end.
fn of_scratch(scratch: Scratch, mut others: Parts) -> (PathBuf, Parts) {
    let path = scratch.path().to_owned();
    others.insert(0, Box::new(scratch));
    (path, others)
}

fn on_device(program: &str, arguments: &[&str], kind: &str) -> (PathBuf, Parts) {
    let device = LoopDevice::new(600);
    device.run(program, arguments);
    of_scratch(Scratch::of_device(device.path(), kind), vec![Box::new(device)])
}

fn overlay() -> (PathBuf, Parts) {
    let directory = disk_directory();
    let [lower, upper, work, merged] = ["lower", "upper", "work", "merged"].map(|name| directory.path().join(name));
    [&lower, &upper, &work, &merged].into_iter().for_each(|path| fs::create_dir(path).expect("made"));
    let options = format!("lowerdir={},upperdir={},workdir={}", lower.display(), upper.display(), work.display());
    mount(Some("overlay"), &merged, Some("overlay"), MsFlags::empty(), Some(options.as_str())).expect("an overlay");
    (merged.clone(), vec![Box::new(MountedThere(merged)), Box::new(directory)])
}

fn bindfs() -> (PathBuf, Parts) {
    let directory = disk_directory();
    fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).expect("set");
    // Otherwise the kernel would show a file by one of its names as it was before a change by another one, for a second.
    let server =
        Stoppable::with_arguments(directory.path(), &["-o", "attr_timeout=0,entry_timeout=0,negative_timeout=0"]);
    let path = directory.path().to_owned();
    (path.clone(), vec![Box::new(MountedThere(path)), Box::new(server), Box::new(directory)])
}

/// Unmounts what is mounted at the path.
struct MountedThere(PathBuf);

impl Drop for MountedThere {
    fn drop(&mut self) {
        let _ = nix::mount::umount2(&self.0, nix::mount::MntFlags::MNT_DETACH);
    }
}
