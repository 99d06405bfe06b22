//! Opening a source. podfs does everything later, checks included, through the descriptor. So a process that replaces the file at
//! the path afterwards changes nothing.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use podfs_fuse::mount::private::MountPointType;
use rustix::fs::{FileType, Mode, OFlags, ResolveFlags, fstat, fstatfs, open, openat2};
use rustix::io::Errno;

use super::HostError;
use super::error::OpenFailure;

/// A file or directory of the node, opened with `O_PATH`: the descriptor identifies it, and cannot read or write it.
#[derive(Debug)]
pub struct HostSource {
    descriptor: OwnedFd,
    kind: FileKind,
}

/// The type of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// A directory.
    Directory,
    /// A regular file.
    File,
    /// A unix socket.
    Socket,
    /// A named pipe.
    Fifo,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
}

impl HostSource {
    /// Opens the file or directory at `path`, and follows symbolic links (HP-05).
    pub(super) fn open(path: &Path) -> Result<HostSource, OpenFailure> {
        let opened = open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
        HostSource::answering(opened.map_err(|errno| OpenFailure::of(path, errno))?, path)
    }

    /// Opens the file or directory at `path`, which is at or below the directory `within`, and follows no symbolic link below
    /// that directory. So no process that can write there leads podfs out of it.
    pub(super) fn open_within(within: &Path, path: &Path) -> Result<HostSource, OpenFailure> {
        let below = path.strip_prefix(within).map_err(|_| OpenFailure::Other(Errno::XDEV))?;
        let below = if below.as_os_str().is_empty() { Path::new(".") } else { below };
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let directory = open(within, flags | OFlags::DIRECTORY, Mode::empty());
        let directory = directory.map_err(|errno| OpenFailure::of(within, errno))?;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let opened = openat2(&directory, below, flags, Mode::empty(), resolve).map_err(|errno| match errno {
            Errno::LOOP => OpenFailure::Link(within.to_owned()),
            errno => OpenFailure::of(path, errno),
        });
        HostSource::answering(opened?, path)
    }

    /// The source that is open at `path`, if its file system answers.
    fn answering(descriptor: OwnedFd, path: &Path) -> Result<HostSource, OpenFailure> {
        // The kernel may answer stat(2) from its cache; statfs(2) shows whether the file system still answers.
        fstatfs(&descriptor).map_err(|errno| OpenFailure::of(path, errno))?;
        HostSource::of(descriptor).map_err(|errno| OpenFailure::of(path, errno))
    }

    /// The volume that a driver has mounted for podfs at `path`.
    ///
    /// # Errors
    /// When the path does not exist, or its file system does not answer.
    pub fn of_driver(path: &Path) -> Result<HostSource, HostError> {
        HostSource::open(path).map_err(|obstacle| HostError::Open {
            what: "driver's mount",
            path: path.to_owned(),
            obstacle,
        })
    }

    /// The root of a mount that is attached nowhere.
    ///
    /// # Errors
    /// When the file system does not answer.
    pub fn of_clone(mount: OwnedFd) -> Result<HostSource, HostError> {
        HostSource::of(mount).map_err(|errno| HostError::failed("cannot read the attributes of the mount", errno))
    }

    /// The source on which `descriptor` is open.
    pub(super) fn of(descriptor: OwnedFd) -> rustix::io::Result<HostSource> {
        let kind = match FileType::from_raw_mode(fstat(&descriptor)?.st_mode) {
            FileType::Directory => FileKind::Directory,
            FileType::Socket => FileKind::Socket,
            FileType::Fifo => FileKind::Fifo,
            FileType::CharacterDevice => FileKind::CharDevice,
            FileType::BlockDevice => FileKind::BlockDevice,
            _ => FileKind::File,
        };
        Ok(HostSource { descriptor, kind })
    }

    /// The same source, with another descriptor.
    ///
    /// # Errors
    /// When this process has too many open files.
    pub fn try_clone(&self) -> Result<HostSource, HostError> {
        let descriptor = self.descriptor.try_clone();
        let descriptor = descriptor.map_err(|cause| HostError::failed("cannot keep the source open", cause))?;
        Ok(HostSource { descriptor, kind: self.kind })
    }

    /// The type of the source.
    pub fn kind(&self) -> FileKind {
        self.kind
    }

    /// The type of mount point for the source.
    pub fn shape(&self) -> MountPointType {
        match self.kind {
            FileKind::Directory => MountPointType::Directory,
            _ => MountPointType::File,
        }
    }

    /// The path of the source without symbolic links, according to `/proc/self/fd`.
    pub(super) fn real_path(&self) -> io::Result<PathBuf> {
        std::fs::read_link(format!("/proc/self/fd/{}", self.descriptor.as_raw_fd()))
    }
}

impl AsFd for HostSource {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}
