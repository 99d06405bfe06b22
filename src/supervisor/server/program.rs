//! The server's program, podfs-fuse: found, opened, and executed by its descriptor.
//!
//! The supervisor opens the program when it begins, and executes the descriptor for each server. So an upgrade that replaces
//! the files changes nothing for a supervisor that runs: its next server is of the supervisor's own version.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use podfs_fuse::program::{NAME, StartedBy, version};
use rustix::fs::{Access, Mode, OFlags, access, open};

use crate::supervisor::run::upgrade;

/// Where a package has the program, beside the directory of podfs.
const IN_PACKAGE: &str = "libexec/podfs";

/// The program podfs-fuse of this podfs.
#[derive(Debug)]
pub struct ServerProgram(OwnedFd);

/// Why this podfs can start no server.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// There is no such program.
    #[error(
        "{NAME}, the program that serves volumes, is neither {} nor {}; install it there, from the package or the build that \
         this podfs is from",
        beside.display(), packaged.display()
    )]
    Missing {
        /// The place in a directory of a build.
        beside: PathBuf,
        /// The place in a package.
        packaged: PathBuf,
    },
    /// There is one, and it cannot be executed.
    #[error(
        "{}, the program that serves volumes, cannot be executed: {cause}; install it anew, from the package or the build that \
         this podfs is from",
        path.display()
    )]
    NotExecutable {
        /// Where it is.
        path: PathBuf,
        /// What the kernel said.
        cause: io::Error,
    },
    /// This podfs does not know where it is itself.
    #[error("podfs does not find its own program: {0}; mount /proc")]
    Lost(#[source] io::Error),
}

impl ServerProgram {
    /// The program that the podfs before has left, if this podfs continues as that one; otherwise the program on disk: beside
    /// podfs, or where a package has it.
    ///
    /// # Errors
    /// When there is none that can be executed.
    pub fn find() -> Result<Self, ProgramError> {
        if let Some(left) = upgrade::server_program_left() {
            return Ok(Self(left));
        }
        let podfs = own_path().map_err(ProgramError::Lost)?;
        let directory = podfs.parent().unwrap_or(Path::new("/"));
        Self::below(directory)
    }

    fn below(directory: &Path) -> Result<Self, ProgramError> {
        let beside = directory.join(NAME);
        let packaged = directory.parent().unwrap_or(directory).join(IN_PACKAGE).join(NAME);
        for path in [&beside, &packaged] {
            match open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
                Ok(program) => {
                    let checked = access(path, Access::EXEC_OK).map(|()| Self(program));
                    return checked
                        .map_err(|errno| ProgramError::NotExecutable { path: path.clone(), cause: errno.into() });
                }
                Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) => {}
                Err(errno) => return Err(ProgramError::NotExecutable { path: path.clone(), cause: errno.into() }),
            }
        }
        Err(ProgramError::Missing { beside, packaged })
    }

    /// A path to execute, good in this process and in a child that has copies of its descriptors.
    pub fn executable(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.0.as_raw_fd()).into()
    }
}

impl AsFd for ServerProgram {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// What this podfs passes to podfs-fuse about itself.
pub fn this_podfs() -> StartedBy {
    StartedBy { version: version().to_owned(), path: own_path().unwrap_or_else(|_| "podfs".into()) }
}

/// Where this podfs was started from.
fn own_path() -> io::Result<PathBuf> {
    std::fs::read_link("/proc/self/exe")
}
