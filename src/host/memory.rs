//! File systems in memory: tmpfs and hugetlbfs, mounted for emptyDirs.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{CWD, fstatfs, fstatvfs};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, FsPickFlags, MountAttrFlags, MoveMountFlags, UnmountFlags, fsconfig_create,
    fsconfig_reconfigure, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, fspick, move_mount, unmount,
};

use super::HostError;

const TMPFS: u32 = 0x0102_1994;
pub(super) const HUGETLBFS: u32 = 0x9584_58f6;

/// Mounts a tmpfs of `bytes` bytes, without swap if the kernel supports that (ED-03).
///
/// # Errors
/// When the kernel refuses.
pub fn mount_tmpfs(at: &Path, bytes: u64) -> Result<(), HostError> {
    attach(make_tmpfs(bytes), at).map_err(|errno| HostError::system("mount a tmpfs on", at, errno))
}

/// Makes a tmpfs as [`mount_tmpfs`] does, and mounts it nowhere. The tmpfs goes with the last descriptor of its root.
///
/// # Errors
/// When the kernel refuses.
pub fn make_tmpfs(bytes: u64) -> Result<OwnedFd, Errno> {
    let settings =
        [("size", bytes.to_string()), ("nr_inodes", most_inodes(bytes).to_string()), ("mode", "1777".to_owned())];
    match create("tmpfs", &settings, &["noswap"]) {
        // Kernels before 6.4, and user namespaces, do not know the flag.
        Err(Errno::INVAL) => create("tmpfs", &settings, &[]),
        created => created,
    }
}

/// Most inodes of a tmpfs of `bytes` bytes. Empty files take no bytes of it, but memory of the kernel.
fn most_inodes(bytes: u64) -> u64 {
    (bytes / 4096).max(1024)
}

/// Changes the size of the tmpfs that `root` is open on, unless it has that size already. `at` is its mount point, for
/// errors.
///
/// # Errors
/// When the files in the tmpfs take more, or the kernel refuses.
pub fn resize_tmpfs(root: impl AsFd, bytes: u64, at: &Path) -> Result<(), HostError> {
    let failed = |errno: Errno| HostError::system("change the size of the tmpfs on", at, errno);
    let found = fstatvfs(&root).map_err(failed)?;
    let (unit, blocks) = (found.f_frsize.max(1), found.f_blocks);
    if bytes.div_ceil(unit) == blocks {
        return Ok(());
    }
    let changed = fspick(root, c"", FsPickFlags::FSPICK_CLOEXEC | FsPickFlags::FSPICK_EMPTY_PATH).and_then(|context| {
        fsconfig_set_string(context.as_fd(), "size", bytes.to_string())?;
        if most_inodes(bytes) > found.f_files {
            fsconfig_set_string(context.as_fd(), "nr_inodes", most_inodes(bytes).to_string())?;
        }
        fsconfig_reconfigure(context.as_fd())
    });
    changed.map_err(|errno| match errno {
        Errno::INVAL => HostError::Refused(format!(
            "its files take {} bytes, more than the new size of {bytes}; it keeps its size of {} bytes until files are deleted",
            (blocks - found.f_bfree.min(blocks)) * unit,
            blocks * unit,
        )),
        errno => failed(errno),
    })
}

/// Mounts a hugetlbfs with pages of this size, and at most `limit` bytes.
///
/// # Errors
/// When the kernel has no pages of this size, or refuses.
pub fn mount_huge_pages(at: &Path, page_size: u64, limit: Option<u64>) -> Result<(), HostError> {
    let mut settings = vec![("pagesize", page_size.to_string()), ("mode", "0777".to_owned())];
    settings.extend(limit.map(|limit| ("size", limit.to_string())));
    let mounted = create("hugetlbfs", &settings, &[]);
    attach(mounted, at).map_err(|errno| match errno {
        Errno::INVAL => HostError::Refused(format!("this node has no huge pages of {page_size} bytes")),
        Errno::NODEV => HostError::Refused("this kernel has no huge pages (hugetlbfs)".to_owned()),
        errno => HostError::system("mount huge pages on", at, errno),
    })
}

/// Whether a directory is on a tmpfs or a hugetlbfs.
pub fn is_memory(directory: impl AsFd) -> bool {
    // Truncated on purpose: the magic numbers have 32 bits, and their type differs between architectures.
    fstatfs(directory).is_ok_and(|found| matches!(found.f_type as u32, TMPFS | HUGETLBFS))
}

/// Unmounts the topmost mount at `path`, lazily when it is busy.
///
/// # Errors
/// When the kernel refuses.
pub fn take_off(path: &Path) -> io::Result<()> {
    let unmounted = match unmount(path, UnmountFlags::NOFOLLOW) {
        Err(Errno::BUSY) => unmount(path, UnmountFlags::NOFOLLOW | UnmountFlags::DETACH),
        unmounted => unmounted,
    };
    Ok(unmounted?)
}

/// Makes a file system, and a mount of it that is attached nowhere.
fn create(file_system: &str, settings: &[(&str, String)], flags: &[&str]) -> Result<OwnedFd, Errno> {
    let context = fsopen(file_system, FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(context.as_fd(), "source", "podfs")?;
    for (key, value) in settings {
        fsconfig_set_string(context.as_fd(), *key, value.as_str())?;
    }
    for flag in flags {
        fsconfig_set_flag(context.as_fd(), *flag)?;
    }
    fsconfig_create(context.as_fd())?;
    fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())
}

/// Attaches the mount at a path.
fn attach(mounted: Result<OwnedFd, Errno>, at: &Path) -> Result<(), Errno> {
    move_mount(mounted?, c"", CWD, at, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ed_03_the_inodes_of_a_tmpfs_are_limited_by_its_size() {
        let made = make_tmpfs(1 << 20).expect("a tmpfs");
        let inodes = || fstatvfs(&made).expect("figures").f_files;
        assert_eq!(inodes(), 1024);
        resize_tmpfs(&made, 64 << 20, Path::new("here")).expect("larger");
        assert_eq!(inodes(), 16384);
        resize_tmpfs(&made, 1 << 20, Path::new("here")).expect("smaller");
        assert_eq!(inodes(), 16384, "the files that are there may need them");
    }
}
