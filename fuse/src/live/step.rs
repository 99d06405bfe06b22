//! A change of the tree of live parts: the system call or the message by which the supervisor makes it.

use serde::{Deserialize, Serialize};

/// A change of the tree. Paths are relative to its root, and begin with the name of a slot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LiveStep {
    /// `mkdirat(2)`.
    MakeDirectory {
        /// The directory.
        path: String,
    },
    /// `mknodat(2)` of a regular file, which has its bytes from the start.
    MakeFile {
        /// The file.
        path: String,
    },
    /// The server shows other bytes and attributes of all these paths at once. The supervisor sends a message for it, because no
    /// system call does this.
    Swap {
        /// Files and directories.
        paths: Vec<String>,
    },
    /// `utimensat(2)` of a file that is open for writing, with a modification time only: it raises `IN_MODIFY`, and the close of
    /// the file raises `IN_CLOSE_WRITE`.
    Modify {
        /// The file.
        path: String,
    },
    /// `fchmodat(2)`, which raises `IN_ATTRIB`.
    Touch {
        /// The file or directory.
        path: String,
    },
    /// `unlinkat(2)`.
    RemoveFile {
        /// The file.
        path: String,
    },
    /// `unlinkat(2)` with `AT_REMOVEDIR`.
    RemoveDirectory {
        /// The directory, which is empty.
        path: String,
    },
    /// The server shows every file from the new image, so that it can drop the previous image. The supervisor sends a message
    /// for it, because no system call does this.
    Settle,
}

impl LiveStep {
    /// Whether the supervisor makes the step by a message to the server, not by a system call.
    pub fn is_message(&self) -> bool {
        matches!(self, Self::Swap { .. } | Self::Settle)
    }

    /// The directory whose entries the step changes.
    pub fn changed_directory(&self) -> Option<&str> {
        match self {
            Self::MakeDirectory { path }
            | Self::MakeFile { path }
            | Self::RemoveFile { path }
            | Self::RemoveDirectory { path } => Some(split(path).0),
            Self::Swap { .. } | Self::Modify { .. } | Self::Touch { .. } | Self::Settle => None,
        }
    }
}

/// The directory of a path, and the name in it.
pub(crate) fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap_or(("", path))
}
