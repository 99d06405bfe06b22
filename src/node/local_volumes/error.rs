//! Why an entry is not offered, and why it is not erased. Each text is the end of a sentence that begins with the entry's path.

use std::io;
use std::path::PathBuf;

use rustix::io::Errno;

use crate::host::HostError;

/// Why the scan of a directory does not take an entry.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum EntryProblem {
    #[error("has a name that no PersistentVolume can have; rename it")]
    Name,
    #[error("cannot be inspected: {0}")]
    Look(#[source] Errno),
    #[error("is a symbolic link, which could lead elsewhere later; mount or bind it there instead")]
    Link,
    #[error("is not a mount point, so its volume would have no size and no end; mount a file system there")]
    NoMount,
    #[error("is a mount of type {0}, which has no storage of its own")]
    NoStorage(String),
    #[error("is mounted read-only")]
    ReadOnly,
    #[error("is neither a mounted directory nor a block device")]
    Neither,
}

impl From<io::Error> for EntryProblem {
    fn from(error: io::Error) -> EntryProblem {
        EntryProblem::Look(Errno::from_io_error(&error).unwrap_or(Errno::IO))
    }
}

/// Why an entry cannot be opened, or is not fit to be offered.
#[derive(Debug, thiserror::Error)]
pub(super) enum InspectionError {
    #[error("is not a directory any more")]
    NoDirectory,
    #[error("cannot be opened: {0}")]
    OpenMount(#[source] Errno),
    #[error("cannot be opened: {0}")]
    OpenDevice(#[source] HostError),
    #[error("is a symbolic link")]
    Link,
    #[error("is not a mount point")]
    NoMount,
    #[error("is in use: it is mounted at {}, too; unmount it there", .0.display())]
    MountedElsewhere(PathBuf),
    #[error("is mounted read-only")]
    MountedReadOnly,
    #[error("is in use by the node: mounted, swap, or a part of another device")]
    InUse,
    #[error("is read-only")]
    ReadOnly,
    #[error("cannot be offered: {0}")]
    Content(#[source] HostError),
    #[error("may belong to something else: {0}; erase it with wipefs or blkdiscard to offer it")]
    ForeignContent(String),
    #[error("has no size")]
    NoSize,
    #[error("does not answer: {0}")]
    NoAnswer(#[source] Errno),
    /// The inspection has not ended in time, and continues; the provisioner does not wait for it.
    #[error("does not answer")]
    Late,
    #[error("cannot be used: {0}")]
    Unusable(#[from] io::Error),
    #[error("cannot be identified without the id of the boot: {0}")]
    NoBootId(#[source] io::Error),
    /// The thread of the inspection ended without a result.
    #[error("cannot be inspected")]
    Lost,
}

impl From<Errno> for InspectionError {
    fn from(errno: Errno) -> InspectionError {
        InspectionError::Unusable(errno.into())
    }
}

/// Why an erasure did not come to its end.
#[derive(Debug, thiserror::Error)]
pub(super) enum ErasureError {
    #[error(transparent)]
    Open(#[from] InspectionError),
    #[error("cannot be cleaned: {0}")]
    Failed(#[source] io::Error),
    #[error("is not erased any further: its PersistentVolume has changed")]
    Stopped,
    #[error("is not clean: podfs cannot delete {0}")]
    Left(String),
    #[error("is not cleaned: podfs cannot write {}: {cause}", .file.display())]
    Record {
        file: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error(
        "may be another disk or file system than PersistentVolume {0} was made for, so podfs erases nothing; if its data is not \
         needed, erase it and delete the PersistentVolume, and podfs offers it again"
    )]
    OtherEntry(String),
    #[error("cannot be cleaned without the mount table: {0}")]
    NoMountTable(#[source] io::Error),
    #[error("is in use: a pod has it at {}", .0.display())]
    InPod(PathBuf),
    #[error("is in use: {} is there", .0.display())]
    OnNode(PathBuf),
}
