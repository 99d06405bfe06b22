//! Why a source cannot be used, one sentence each. Texts are the kubelet's where it has one; further facts of podfs follow them.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use podfs_nfs::ExportAddress;
use rustix::io::Errno;

/// A source that cannot be used now.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// A host path is not of the required type (HP-04).
    #[error("hostPath type check failed: {} is not {expected}{}", path.display(), because(*found))]
    WrongType {
        /// The path.
        path: PathBuf,
        /// The expected type, in the kubelet's word.
        expected: &'static str,
        /// The reason, if the path cannot be opened.
        found: Option<OpenFailure>,
    },
    /// A source that cannot be opened.
    #[error("{what} {} cannot be used: {obstacle}", path.display())]
    Open {
        /// The kind of source.
        what: &'static str,
        /// The path.
        path: PathBuf,
        /// The obstacle.
        obstacle: OpenFailure,
    },
    /// A missing source cannot be made.
    #[error("cannot make the {what} {}: {cause}", path.display())]
    Make {
        /// `directory` or `file`.
        what: &'static str,
        /// The path.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        cause: io::Error,
    },
    /// A rule is broken, and the sentence says which.
    #[error("{0}")]
    Refused(String),
    /// An error of the kernel, in a sentence of its own.
    #[error("{what}: {cause}{advice}")]
    Failed {
        /// The step that failed, and its object.
        what: String,
        /// The kernel's error.
        #[source]
        cause: io::Error,
        /// The advice, behind a semicolon; or nothing.
        advice: &'static str,
    },
    /// The kernel's NFS client does not mount an export.
    #[error("{address}: {cause}")]
    KernelNfs {
        /// The export.
        address: ExportAddress,
        /// Why not.
        #[source]
        cause: KernelNfsError,
    },
    /// Anything else.
    #[error("cannot {what} {}: {cause}", path.display())]
    System {
        /// The step that failed.
        what: &'static str,
        /// With what.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        cause: io::Error,
    },
}

impl HostError {
    pub(crate) fn system(what: &'static str, path: &Path, cause: impl Into<io::Error>) -> HostError {
        HostError::System { what, path: path.to_owned(), cause: cause.into() }
    }

    pub(super) fn failed(what: impl Into<String>, cause: impl Into<io::Error>) -> HostError {
        HostError::Failed { what: what.into(), cause: cause.into(), advice: "" }
    }
}

/// Why a path cannot be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenFailure {
    /// There is nothing.
    Missing,
    /// A symbolic link to nothing.
    Dangling,
    /// Symbolic links in a circle.
    Loop,
    /// A file where a directory would be needed.
    NotADirectory,
    /// The file system is gone, or its server.
    Dead(Errno),
    /// Anything else.
    Other(Errno),
}

impl OpenFailure {
    /// Classifies the kernel's error about opening `path`.
    pub(super) fn of(path: &Path, errno: Errno) -> OpenFailure {
        match errno {
            Errno::NOENT if std::fs::symlink_metadata(path).is_ok() => OpenFailure::Dangling,
            Errno::NOENT => OpenFailure::Missing,
            Errno::LOOP => OpenFailure::Loop,
            Errno::NOTDIR => OpenFailure::NotADirectory,
            Errno::STALE | Errno::NOTCONN | Errno::CONNABORTED | Errno::IO | Errno::HOSTDOWN | Errno::TIMEDOUT => {
                OpenFailure::Dead(errno)
            }
            _ => OpenFailure::Other(errno),
        }
    }
}

impl fmt::Display for OpenFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OpenFailure::Missing => f.write_str("it does not exist"),
            OpenFailure::Dangling => {
                f.write_str("it is a symbolic link that leads to nothing; repair or remove the link")
            }
            OpenFailure::Loop => f.write_str("its symbolic links lead in a circle; repair or remove them"),
            OpenFailure::NotADirectory => f.write_str("a part of the path is not a directory"),
            OpenFailure::Dead(errno) => write!(f, "its file system does not answer ({errno})"),
            OpenFailure::Other(errno) => errno.fmt(f),
        }
    }
}

/// Why the kernel's NFS client does not mount an export.
#[derive(Debug, thiserror::Error)]
pub enum KernelNfsError {
    /// The process that mounts cannot be started, or given its work.
    #[error("podfs cannot run the process that mounts it: {0}")]
    NoProcess(#[source] io::Error),
    /// The answer came without the mount.
    #[error("the process that mounts it has answered without the mount")]
    Lost,
    /// The mount is made, and its file system does not answer.
    #[error("cannot read the attributes of the mount: {0}")]
    Mounted(#[source] io::Error),
    /// The sentence of the process that mounts.
    #[error("{0}")]
    Refused(String),
    /// The server is silent.
    #[error("the NFS server has not answered for {0} s; see that it runs and can be reached")]
    Silent(u64),
    /// The server, or the daemon that looks for a Kerberos ticket, does not answer.
    #[error(
        "the NFS server, or rpc.gssd of this node, has not answered for {0} s; see that they run, and that server and KDC can \
         be reached"
    )]
    SilentWithKerberos(u64),
    /// The process that mounts has ended.
    #[error("the process that mounts it ended without an answer")]
    NoAnswer(#[source] io::Error),
}

fn because(found: Option<OpenFailure>) -> String {
    found.map_or(String::new(), |obstacle| format!(": {obstacle}"))
}
