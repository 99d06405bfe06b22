//! A part of a volume for a container (`subPath`): podfs opens it, and makes missing directories.
//!
//! A container can change the volume at any moment, and podfs is root on the node. podfs never opens or makes a file outside of
//! the volume:
//! 1. The kernel resolves the whole path in one system call, from the volume's root. It refuses a step that would leave the root
//!    (`RESOLVE_BENEATH`), or that follows a magic link of `/proc` (`RESOLVE_NO_MAGICLINKS`). There is no moment between a check
//!    and its use in which the container could replace a directory by a symbolic link (CVE-2017-1002101, CVE-2021-25741).
//! 2. The result is a descriptor (`O_PATH`). podfs mounts the open file, even if its path leads to another file by then.
//! 3. podfs makes a missing directory inside a directory that it has opened in this way, by its name alone, and opens it without
//!    following a link. It sets the mode through the descriptor, and only of directories that it has made itself.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, RawMode, ResolveFlags, fchmod, fstat, mkdirat, openat, openat2, statat,
};
use rustix::io::Errno;

/// Most calls of `openat2(2)` for one path. The call fails with `EAGAIN` if a rename at the same time makes it unclear whether the
/// path has left the volume. Without a limit, a container that renames all the time could keep podfs in the loop for ever.
const TRIES: u32 = 1000;
/// Most attempts to make the missing directories of a path and to open the path. A container may remove the directories after each
/// attempt.
const ROUNDS: u32 = 16;

/// The action for a path that does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IfMissing {
    /// podfs returns an error. The path may appear later.
    Refuse,
    /// podfs makes the directories, with the mode of the volume's root (SP-02).
    Make,
}

/// Why a part of a volume cannot be used. The texts have only values of the manifest: the pod's user reads them, and must not
/// learn where a symbolic link leads on the node.
#[derive(Debug, thiserror::Error)]
pub enum SubPathError {
    /// No entry has this name.
    #[error("the volume has no {0:?} yet")]
    Missing(String),
    /// A symbolic link leads out of the volume.
    #[error("{0:?} leads out of the volume by a symbolic link; use a link that stays in it")]
    Outside(String),
    /// Symbolic links lead in a circle, or the path has a magic link of `/proc`.
    #[error("{0:?} has a symbolic link that cannot be followed")]
    Loop(String),
    /// A part of the path is a file, and not a directory.
    #[error("{0:?} leads through a file; only a directory has something in it")]
    NotADirectory(String),
    /// The path, or a name in it, is longer than the file system allows.
    #[error("{0:?} is too long for the volume's file system")]
    TooLong(String),
    /// A missing directory cannot be made.
    #[error("podfs cannot make a missing directory: {0}")]
    Make(#[source] io::Error),
    /// The path cannot be opened, for any other reason.
    #[error("it cannot be opened: {0}")]
    Open(#[source] io::Error),
}

/// Opens (`O_PATH`) the file or directory at `path` of a volume. `root` is the open root of the volume. The path is relative.
/// `if_missing` is the action if it does not exist.
///
/// # Errors
/// See [`SubPathError`].
pub fn open(root: BorrowedFd<'_>, path: &str, if_missing: IfMissing) -> Result<OwnedFd, SubPathError> {
    for _ in 0..ROUNDS {
        match resolve(root, path, OFlags::empty()) {
            Err(Errno::NOENT) if if_missing == IfMissing::Make => match make(root, path) {
                // podfs has made the directories, or a container has removed one at the same moment. podfs tries again.
                Ok(()) | Err(Errno::NOENT) => {}
                Err(errno @ (Errno::XDEV | Errno::LOOP | Errno::NOTDIR | Errno::NAMETOOLONG)) => {
                    return Err(explain(path, errno));
                }
                Err(errno) => return Err(SubPathError::Make(errno.into())),
            },
            outcome => return outcome.map_err(|errno| explain(path, errno)),
        }
    }
    Err(SubPathError::Missing(path.to_owned()))
}

/// Makes the missing directories of `path`, with the mode of the volume's root.
fn make(root: BorrowedFd<'_>, path: &str) -> Result<(), Errno> {
    let mode = Mode::from_raw_mode(fstat(root)?.st_mode as RawMode & 0o7777);
    let names: Vec<&str> = path.split('/').filter(|name| !matches!(*name, "" | ".")).collect();
    let (mut parent, missing) = deepest(root, &names)?;
    for name in missing {
        let is_made = match mkdirat(&parent, *name, mode) {
            Ok(()) => true,
            Err(Errno::EXIST) => false,
            Err(errno) => return Err(errno),
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let child = match openat(&parent, *name, flags, Mode::empty()) {
            // The name is a symbolic link to a missing path, or a file. Another process may have made it at this moment.
            Err(Errno::LOOP | Errno::NOTDIR) if !is_made => return Err(link_or_file(&parent, name)),
            child => child?,
        };
        if is_made {
            // mkdir(2) applies the umask, and leaves out the setuid and setgid bits.
            fchmod(&child, mode)?;
        }
        parent = child;
    }
    Ok(())
}

/// The deepest directory of the path that exists, and the missing names below it.
fn deepest<'a>(root: BorrowedFd<'_>, names: &'a [&'a str]) -> Result<(OwnedFd, &'a [&'a str]), Errno> {
    for depth in (0..names.len()).rev() {
        let path = if depth == 0 { ".".to_owned() } else { names[..depth].join("/") };
        match resolve(root, &path, OFlags::DIRECTORY) {
            Err(Errno::NOENT) => {}
            outcome => return Ok((outcome?, &names[depth..])),
        }
    }
    Err(Errno::NOENT)
}

/// The error about a name that is no directory: `ELOOP` for a symbolic link, `ENOTDIR` for a file.
fn link_or_file(parent: &OwnedFd, name: &str) -> Errno {
    let found = statat(parent, name, AtFlags::SYMLINK_NOFOLLOW);
    let is_link = found.is_ok_and(|found| FileType::from_raw_mode(found.st_mode) == FileType::Symlink);
    if is_link { Errno::LOOP } else { Errno::NOTDIR }
}

/// Opens `path` below `root`. Symbolic links may not lead out of `root`.
fn resolve(root: BorrowedFd<'_>, path: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::CLOEXEC | flags;
    let within = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    for _ in 0..TRIES {
        match openat2(root.as_fd(), path, flags, Mode::empty(), within) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            outcome => return outcome,
        }
    }
    Err(Errno::AGAIN)
}

/// The error for the pod's user.
fn explain(path: &str, errno: Errno) -> SubPathError {
    let path = path.to_owned();
    match errno {
        Errno::NOENT => SubPathError::Missing(path),
        Errno::XDEV => SubPathError::Outside(path),
        Errno::LOOP => SubPathError::Loop(path),
        Errno::NOTDIR => SubPathError::NotADirectory(path),
        Errno::NAMETOOLONG => SubPathError::TooLong(path),
        other => SubPathError::Open(other.into()),
    }
}

#[cfg(test)]
mod tests;
