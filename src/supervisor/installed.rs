//! The paths of podfs's programs: beside each other, as in a build, or in `../libexec/podfs`, as in a package. Also the
//! path of the podfs that is on disk now, for an upgrade.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, Mode, OFlags, access, open};

/// The program of the supervisors that `podfs node` starts.
pub(crate) const SUPERVISOR: &str = "podfs-supervisor";
/// The link to the last directory that a container of podfs has installed. It is beside those directories.
pub(crate) const CURRENT: &str = "current";
/// The directory of the programs in a package, relative to the parent of podfs's own directory.
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
    /// The program exists, and cannot be executed.
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
        /// The error of the system call.
        #[source]
        cause: io::Error,
    },
    /// This podfs cannot read the path of its own executable.
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
    find(SUPERVISOR, "the program that manages the volumes of a pod of podfs node").map(|(path, _)| path)
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

/// The path of this process's executable.
pub(crate) fn own_path() -> io::Result<PathBuf> {
    std::fs::read_link("/proc/self/exe")
}

/// Why an upgrade finds no program to execute.
#[derive(Debug, thiserror::Error)]
pub(in crate::supervisor) enum NoProgram {
    #[error(transparent)]
    Unknown(#[from] io::Error),
    #[error("there is no podfs at {} any more", .0.display())]
    Gone(PathBuf),
}

/// The path to execute in an upgrade: in the directory that a container has installed last, or else the path that this
/// program was started from.
///
/// # Errors
/// When there is no file at that path.
pub(in crate::supervisor) fn program_on_disk() -> Result<PathBuf, NoProgram> {
    const DELETED: &[u8] = b" (deleted)";
    let path = std::fs::read_link("/proc/self/exe")?;
    let bytes = path.as_os_str().as_bytes();
    let path = PathBuf::from(OsStr::from_bytes(bytes.strip_suffix(DELETED).unwrap_or(bytes)));
    let name = path.file_name().unwrap_or_default().to_owned();
    let installed = path.parent().and_then(Path::parent).map(|all| all.join(CURRENT).join(&name));
    let path = installed.filter(|installed| installed.is_file()).unwrap_or(path);
    if path.is_file() { Ok(path) } else { Err(NoProgram::Gone(path)) }
}
