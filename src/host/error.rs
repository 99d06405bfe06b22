//! Why a source cannot be used, in one sentence each. If the kubelet has a text for an error, podfs has the same text, and adds
//! further facts after it.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use podfs_nfs::ExportAddress;
use rustix::io::Errno;

/// A source that cannot be used now.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// A host path is not of the required type (HP-04).
    #[error("hostPath type check failed: {} is not {expected}{}", path.display(), because(found.as_ref()))]
    WrongType {
        /// The path.
        path: PathBuf,
        /// The expected type, in the kubelet's words.
        expected: &'static str,
        /// Why the path cannot be opened; `None` if it leads to a file of another type.
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
    /// A step failed with an error of the kernel.
    #[error("{what}: {cause}{advice}")]
    Failed {
        /// The step that failed, and its object.
        what: String,
        /// The kernel's error.
        #[source]
        cause: io::Error,
        /// The advice, with a semicolon before it; empty if there is none.
        advice: &'static str,
    },
    /// The kernel's NFS client does not mount an export.
    #[error("{address}: {cause}")]
    KernelNfs {
        /// The export.
        address: ExportAddress,
        /// Why the client does not mount it.
        #[source]
        cause: KernelNfsError,
    },
    /// Any other step with a file or directory failed.
    #[error("cannot {what} {}: {cause}", path.display())]
    System {
        /// The step that failed: a verb.
        what: &'static str,
        /// The file or directory.
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
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OpenFailure {
    /// The path does not exist.
    Missing,
    /// The path is a symbolic link to a path that does not exist.
    Dangling,
    /// Symbolic links lead in a circle.
    Loop,
    /// A part of the path below a directory, out of which no link may lead, is a symbolic link.
    Link(PathBuf),
    /// A part of the path is no directory.
    NotADirectory,
    /// The file system, or its server, is gone or does not answer.
    Dead(Errno),
    /// Any other error.
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
            OpenFailure::Link(within) => write!(
                f,
                "a symbolic link is on the path, and podfs follows none below {}; put a directory in the place of the link",
                within.display()
            ),
            OpenFailure::NotADirectory => f.write_str("a part of the path is not a directory"),
            OpenFailure::Dead(errno) => write!(f, "its file system does not answer ({errno})"),
            OpenFailure::Other(errno) => errno.fmt(f),
        }
    }
}

/// Why the kernel's NFS client does not mount an export.
#[derive(Debug, thiserror::Error)]
pub enum KernelNfsError {
    /// podfs cannot start the mounting process, or cannot send the request to it.
    #[error("podfs cannot run the process that mounts it: {0}")]
    NoProcess(#[source] io::Error),
    /// The mounting process has answered without the mount's descriptor.
    #[error("the process that mounts it has answered without the mount")]
    Lost,
    /// The mount is made, but its file system does not answer.
    #[error("cannot read the attributes of the mount: {0}")]
    Mounted(#[source] io::Error),
    /// The mounting process has answered with this error.
    #[error("{0}")]
    Refused(String),
    /// The server does not answer.
    #[error("the NFS server has not answered for {0} s; see that it runs and can be reached")]
    Silent(u64),
    /// The server, or the daemon that looks for a Kerberos ticket, does not answer.
    #[error(
        "the NFS server, or rpc.gssd of this node, has not answered for {0} s; see that they run, and that server and KDC can \
         be reached"
    )]
    SilentWithKerberos(u64),
    /// The mounting process has ended without an answer.
    #[error("the process that mounts it ended without an answer")]
    NoAnswer(#[source] io::Error),
}

fn because(found: Option<&OpenFailure>) -> String {
    found.map_or(String::new(), |obstacle| format!(": {obstacle}"))
}
