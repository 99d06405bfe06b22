//! Where the programs of podfs are: beside each other, as in a build, or in `../libexec/podfs`, as in a package.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, Mode, OFlags, access, open};

use super::NAME;

/// Where a package has the programs, beside the directory of podfs.
const IN_PACKAGE: &str = "libexec/podfs";

/// Why this podfs cannot start another program of its own.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// There is no such program.
    #[error(
        "{name}, {purpose}, is neither {} nor {}; install it there, from the package or the build that \
         this podfs is from",
        beside.display(), packaged.display()
    )]
    Missing {
        /// Its name.
        name: &'static str,
        /// What it is for.
        purpose: &'static str,
        /// The place in a directory of a build.
        beside: PathBuf,
        /// The place in a package.
        packaged: PathBuf,
    },
    /// There is one, and it cannot be executed.
    #[error(
        "{}, {purpose}, cannot be executed: {cause}; install it anew, from the package or the build that \
         this podfs is from",
        path.display()
    )]
    NotExecutable {
        /// What it is for.
        purpose: &'static str,
        /// Where it is.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        cause: io::Error,
    },
    /// This podfs does not know where it is itself.
    #[error("podfs cannot find its own program: {0}; mount /proc")]
    Lost(#[source] io::Error),
}

/// The program that serves volumes: its path, and the program, open.
///
/// # Errors
/// When there is none that can be executed.
pub(crate) fn find_server() -> Result<(PathBuf, OwnedFd), ProgramError> {
    find(podfs_fuse::program::NAME, "the program that serves volumes")
}

/// The path of podfs-supervisor.
///
/// # Errors
/// When there is none that can be executed.
pub(crate) fn supervisor_program() -> Result<PathBuf, ProgramError> {
    find(NAME, "the program that manages the volumes of a pod of podfs node").map(|(path, _)| path)
}

fn find(name: &'static str, purpose: &'static str) -> Result<(PathBuf, OwnedFd), ProgramError> {
    let podfs = own_path().map_err(ProgramError::Lost)?;
    let directory = podfs.parent().unwrap_or(Path::new("/"));
    let beside = directory.join(name);
    let packaged = directory.parent().unwrap_or(directory).join(IN_PACKAGE).join(name);
    for path in [&beside, &packaged] {
        let failed =
            |errno: rustix::io::Errno| ProgramError::NotExecutable { purpose, path: path.clone(), cause: errno.into() };
        match open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
            Ok(program) => {
                return access(path, Access::EXEC_OK).map(|()| (path.clone(), program)).map_err(failed);
            }
            Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) => {}
            Err(errno) => return Err(failed(errno)),
        }
    }
    Err(ProgramError::Missing { name, purpose, beside, packaged })
}

/// Where this program was started from.
pub(crate) fn own_path() -> io::Result<PathBuf> {
    std::fs::read_link("/proc/self/exe")
}
