//! The paths of podfs's programs: in the directory of this program, as in a build, or in `../libexec/podfs`, as in a
//! package. Also the path of the podfs that is on disk now, for an upgrade.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, Mode, OFlags, access, open};

/// The program of the supervisors that `podfs node` starts.
pub(crate) const SUPERVISOR: &str = "podfs-supervisor";
/// The symbolic link to the directory that a container of podfs has installed last. Each container installs its
/// programs in a directory of its own, and the link is beside these directories.
pub(crate) const CURRENT: &str = "current";
/// The directory of the programs in a package, relative to the parent of podfs's own directory.
const IN_PACKAGE: &str = "libexec/podfs";

/// Why this podfs cannot start another program of podfs.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// There is no such program.
    #[error(
        "{name}, {purpose}, is neither {} nor {}; install it there, from the package or the build that \
         this podfs is from",
        beside.display(), packaged.display()
    )]
    Missing {
        /// The name of the program.
        name: &'static str,
        /// The purpose of the program.
        purpose: &'static str,
        /// The path in a build: beside this program.
        beside: PathBuf,
        /// The path in a package.
        packaged: PathBuf,
    },
    /// The program exists, and cannot be executed.
    #[error(
        "{}, {purpose}, cannot be executed: {cause}; install it anew, from the package or the build that \
         this podfs is from",
        path.display()
    )]
    NotExecutable {
        /// The purpose of the program.
        purpose: &'static str,
        /// The path of the program.
        path: PathBuf,
        /// The error of the system call.
        #[source]
        cause: io::Error,
    },
    /// This podfs cannot read the path of its own executable.
    #[error("podfs cannot find its own program: {0}; mount /proc")]
    Lost(#[source] io::Error),
}

/// The program that serves volumes, podfs-fuse: its path, and its file, open.
///
/// # Errors
/// When the program is not installed, or cannot be executed.
pub(crate) fn find_server() -> Result<(PathBuf, OwnedFd), ProgramError> {
    find(podfs_fuse::program::NAME, "the program that serves volumes")
}

/// The path of podfs-supervisor.
///
/// # Errors
/// When the program is not installed, or cannot be executed.
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

/// The path of the program of the same name in the directory that a container has installed last, if there is one; otherwise the
/// path itself.
pub(crate) fn last_installed(path: PathBuf) -> PathBuf {
    let name = path.file_name().unwrap_or_default();
    let installed = path.parent().and_then(Path::parent).map(|directories| directories.join(CURRENT).join(name));
    installed.filter(|installed| installed.is_file()).unwrap_or(path)
}

/// The path to execute in an upgrade: the program of this name in the directory that a container has installed last, if
/// there is one; otherwise the path that this program was started from.
///
/// # Errors
/// When there is no file at that path.
pub(in crate::supervisor) fn program_on_disk() -> Result<PathBuf, NoProgram> {
    const DELETED: &[u8] = b" (deleted)";
    let path = own_path()?;
    let bytes = path.as_os_str().as_bytes();
    let path = PathBuf::from(OsStr::from_bytes(bytes.strip_suffix(DELETED).unwrap_or(bytes)));
    let path = last_installed(path);
    if path.is_file() { Ok(path) } else { Err(NoProgram::Gone(path)) }
}
