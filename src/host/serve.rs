//! The choice for a source: podfs serves it through FUSE, or the kernel alone shows it by a bind mount.
//!
//! The kernel finds the other end of a socket, a FIFO or a device by its inode. A file system between container and source has
//! inodes of its own, so these files do not work through FUSE. podfs shows them, the directories that usually have them, and the
//! kernel's own file systems by a bind mount, unless the pod asks for FUSE.

use std::path::{Path, PathBuf};

use rustix::fs::{fstat, fstatfs, stat};

use super::memory::HUGETLBFS;
use super::{FileKind, HostError, HostSource};
use crate::volume::ServedBy;

/// Directories of the node in which containers mainly use sockets and devices.
const LIVE: [&str; 5] = ["/run", "/var/run", "/dev", "/proc", "/sys"];

/// The magic numbers (`statfs(2)`) of file systems that are no storage: proc, sysfs, cgroup, cgroup2, devpts, debugfs, tracefs,
/// securityfs, bpf, mqueue, hugetlbfs.
const KERNEL: [u32; 11] = [
    0x9fa0,
    0x6265_6572,
    0x0027_e0eb,
    0x6367_7270,
    0x1cd1,
    0x6462_6720,
    0x7472_6163,
    0x7363_6673,
    0xcafe_4a11,
    0x1980_0202,
    HUGETLBFS,
];

/// Chooses between FUSE and a bind mount for `source` at `mount_point`. `wish` is the choice of the pod's annotation.
///
/// # Errors
/// When the annotation asks for FUSE, and the source is a socket, a FIFO or a device.
pub fn choose(source: &HostSource, wish: Option<ServedBy>, mount_point: &Path) -> Result<ServedBy, HostError> {
    let special = !matches!(source.kind(), FileKind::Directory | FileKind::File);
    match wish {
        Some(ServedBy::Fuse) if special => Err(HostError::Refused(
            "a socket, FIFO or device cannot be served through FUSE; set the annotation podfs.io/host-path.VOLUME of this \
             volume to bind, or remove it"
                .to_owned(),
        )),
        Some(wish) => Ok(wish),
        None if special || is_live(source) || contains(source, mount_point) => Ok(ServedBy::Bind),
        None => Ok(ServedBy::Fuse),
    }
}

/// Whether the source is in a directory with sockets and devices, or on one of the kernel's own file systems.
fn is_live(source: &HostSource) -> bool {
    let below = |path: &Path| {
        LIVE.iter().any(|live| {
            let real = Path::new(live).canonicalize();
            path.starts_with(live) || real.is_ok_and(|real| path.starts_with(real))
        })
    };
    source.real_path().is_ok_and(|path| below(&path)) || is_kernels(source)
}

/// Whether the source is on one of the kernel's own file systems.
fn is_kernels(source: &HostSource) -> bool {
    // Truncated on purpose: the magic numbers have 32 bits, and their type differs between architectures.
    let magic = fstatfs(source).map_or(0, |found| found.f_type as u32);
    // devtmpfs has the magic number of tmpfs. The kernel has one devtmpfs, so podfs compares the device number with that of /dev.
    let is_devtmpfs = match (fstat(source), stat("/dev"), stat("/")) {
        (Ok(source), Ok(dev), Ok(root)) => dev.st_dev != root.st_dev && source.st_dev == dev.st_dev,
        _ => false,
    };
    KERNEL.contains(&magic) || is_devtmpfs
}

/// Whether the source contains the volume's mount point. Through FUSE, a request for the mount point would make the server wait for
/// itself.
fn contains(source: &HostSource, mount_point: &Path) -> bool {
    let existing = |path: &Path| path.ancestors().find_map(|ancestor| ancestor.canonicalize().ok());
    let inside: Option<PathBuf> = std::path::absolute(mount_point).ok().and_then(|path| existing(&path));
    source.kind() == FileKind::Directory
        && matches!((source.real_path(), inside), (Ok(outer), Some(inner)) if inner.starts_with(&outer))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    fn chosen(path: &Path, wish: Option<ServedBy>) -> Result<ServedBy, String> {
        let source = HostSource::open(path).expect("it is there");
        choose(&source, wish, Path::new("/nowhere/podfs")).map_err(|error| error.to_string())
    }

    #[test]
    fn storage_is_served_through_fuse_and_live_directories_are_bound() {
        let base = tempfile::tempdir().expect("a directory");
        let (file, socket) = (base.path().join("file"), base.path().join("socket"));
        std::fs::write(&file, "").expect("a file");
        drop(UnixListener::bind(&socket).expect("a socket"));
        for storage in [base.path(), &file] {
            assert_eq!(chosen(storage, None), Ok(ServedBy::Fuse));
            assert_eq!(chosen(storage, Some(ServedBy::Bind)), Ok(ServedBy::Bind));
        }
        for live in [&socket, Path::new("/dev"), Path::new("/proc/sys"), Path::new("/sys"), Path::new("/run")] {
            assert_eq!(chosen(live, None), Ok(ServedBy::Bind), "{}", live.display());
        }
        assert_eq!(chosen(Path::new("/proc/sys"), Some(ServedBy::Fuse)), Ok(ServedBy::Fuse));
        let error = chosen(&socket, Some(ServedBy::Fuse)).expect_err("a socket");
        assert!(error.contains("cannot be served through FUSE"), "{error}");
    }

    #[test]
    fn a_source_around_its_own_mount_point_is_bound() {
        let base = tempfile::tempdir().expect("a directory");
        let source = HostSource::open(base.path()).expect("a directory");
        let inside = base.path().join("not/yet/there");
        assert_eq!(choose(&source, None, &inside).expect("chosen"), ServedBy::Bind);
        let root = HostSource::open(Path::new("/")).expect("a directory");
        assert_eq!(choose(&root, None, Path::new("/var/lib/podfs")).expect("chosen"), ServedBy::Bind);
    }
}
