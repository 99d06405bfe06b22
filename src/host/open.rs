//! Opening a source. Everything later, checks included, goes through the descriptor, so a process that replaces the path
//! afterwards changes nothing.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use podfs_fuse::mount::private::MountPointType;
use rustix::fs::{FileType, Mode, OFlags, fstat, fstatfs, open};

use super::HostError;
use super::error::OpenFailure;

/// A file or directory of the host, opened for its identity only (`O_PATH`).
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
        let descriptor = opened.map_err(|errno| OpenFailure::of(path, errno))?;
        // The kernel may answer stat(2) from its cache; statfs(2) shows whether the file system still answers.
        fstatfs(&descriptor).map_err(|errno| OpenFailure::of(path, errno))?;
        HostSource::of(descriptor).map_err(|errno| OpenFailure::of(path, errno))
    }

    /// The volume that a driver has mounted for podfs at a path of its own.
    ///
    /// # Errors
    /// When it is not there, or its file system does not answer.
    pub fn of_driver(path: &Path) -> Result<HostSource, HostError> {
        HostSource::open(path).map_err(|obstacle| HostError::Open {
            what: "driver's mount",
            path: path.to_owned(),
            obstacle,
        })
    }

    /// A mount that is attached nowhere.
    ///
    /// # Errors
    /// When its file system does not answer.
    pub fn of_clone(mount: OwnedFd) -> Result<HostSource, HostError> {
        HostSource::of(mount).map_err(|errno| HostError::failed("cannot read the attributes of the mount", errno))
    }

    /// The source that is open already.
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

    /// The same, open once more.
    ///
    /// # Errors
    /// When this process has too many open files.
    pub fn try_clone(&self) -> Result<HostSource, HostError> {
        let descriptor = self.descriptor.try_clone();
        let descriptor = descriptor.map_err(|cause| HostError::failed("cannot keep the source open", cause))?;
        Ok(HostSource { descriptor, kind: self.kind })
    }

    /// Its type.
    pub fn kind(&self) -> FileKind {
        self.kind
    }

    /// The type of mount point that it needs.
    pub fn shape(&self) -> MountPointType {
        match self.kind {
            FileKind::Directory => MountPointType::Directory,
            _ => MountPointType::File,
        }
    }

    /// Its path without symbolic links, as the kernel gives it in `/proc/self/fd`.
    pub(super) fn real_path(&self) -> io::Result<PathBuf> {
        std::fs::read_link(format!("/proc/self/fd/{}", self.descriptor.as_raw_fd()))
    }
}

impl AsFd for HostSource {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}
