//! The mounts of a volume.
//!
//! `fsopen("fuse")` and `fsmount` make a *private* mount: read-write, detached, reachable only by its descriptor. podfs clones the
//! private mount, makes the clone read-only, and moves the clone to the volume's path: the *visible* mount. Both have the same
//! superblock. Root in a container gets `EROFS` from the kernel; only the process with the private descriptor can change the tree.
//!
//! | module | owns |
//! |---|---|
//! | [`bind`] | bind mounts, for sources that FUSE cannot serve |
//! | [`enclosed`] | sources cut off from the host's other mounts |
//! | [`private`] | opening `/dev/fuse`, the private mount, its clone |
//! | [`point`] | mount points, and how a mount comes to one |
//! | [`visible`] | the mounts that containers see, and how they go |
//! | [`directories`] | directories that podfs makes and removes later |
//! | `root` | the root directory of a new mount namespace |
//! | [`table`] | reading `/proc/thread-self/mountinfo` |

use std::io;
use std::path::{Path, PathBuf};

pub mod bind;
pub mod directories;
pub mod enclosed;
pub mod point;
pub mod private;
pub(crate) mod root;
pub mod table;
pub mod visible;

/// Why podfs cannot mount or unmount.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// There is no `/dev/fuse`, or this kernel has no FUSE or no mount API.
    #[error("{what}: {cause}; podfs needs /dev/fuse and Linux 5.15 or newer (modprobe fuse)")]
    Unsupported {
        /// The step that failed.
        what: String,
        /// The kernel's error.
        #[source]
        cause: io::Error,
    },
    /// `/dev/fuse` is something else.
    #[error(
        "/dev/fuse is {found}, and not the FUSE device, the character device 10:229; give the node's device to this container, or remove \
         the file and run mknod /dev/fuse c 10 229"
    )]
    NotFuse {
        /// The type of the file.
        found: String,
    },
    /// The process may not mount.
    #[error("{what}: {cause}; run podfs as root with CAP_SYS_ADMIN")]
    Privilege {
        /// The step that failed.
        what: String,
        /// The kernel's error.
        #[source]
        cause: io::Error,
    },
    /// The mount point is in use.
    #[error("{} {problem}", .path.display())]
    Occupied {
        /// The mount point.
        path: PathBuf,
        /// The object at the path, and the advice.
        problem: &'static str,
    },
    /// Any other error.
    #[error("{what}: {cause}")]
    Failed {
        /// The step that failed.
        what: String,
        /// The kernel's error.
        #[source]
        cause: io::Error,
    },
}

impl MountError {
    /// Converts the kernel's error of the step `what`.
    pub(crate) fn new(what: impl Into<String>, cause: impl Into<io::Error>) -> Self {
        let (what, cause) = (what.into(), cause.into());
        match cause.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => Self::Privilege { what, cause },
            Some(libc::ENOSYS | libc::ENODEV | libc::ENXIO) => Self::Unsupported { what, cause },
            _ => Self::Failed { what, cause },
        }
    }

    /// Whether the kernel's error is `EINVAL`.
    pub(crate) fn is_invalid(&self) -> bool {
        matches!(self, Self::Failed { cause, .. } if cause.raw_os_error() == Some(libc::EINVAL))
    }

    pub(crate) fn at(what: &str, path: &Path, cause: impl Into<io::Error>) -> Self {
        Self::new(format!("cannot {what} {}", path.display()), cause)
    }
}
