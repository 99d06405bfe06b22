//! Walking a tree, by descriptors. The walk visits the entries of a directory in the directory's order, and then the directory.
//!
//! The walk has one directory open at a time. It goes up by `..`, and checks that it reaches the directory from which it came. So
//! neither the stack nor the number of descriptors grows with the depth, and a process that moves directories cannot lead the walk
//! out of the tree.

use std::ffi::{CStr, CString, OsStr};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::vec;

use rustix::fs::{Dir, FileType, Mode, OFlags, ResolveFlags, fstat, openat, openat2};
use rustix::io::Errno;

/// The treatment of mount points inside the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MountPointPolicy {
    /// The walk enters them.
    Enter,
    /// The walk does not enter them: `openat2(2)` fails with `EXDEV`.
    Stop,
}

/// An entry of the tree, below its root.
pub struct WalkEntry<'a> {
    /// The directory of the entry.
    pub parent: BorrowedFd<'a>,
    /// The name of the entry in that directory.
    pub name: &'a CStr,
    /// Whether the entry is a directory. Then the walk has visited everything in it before.
    pub is_directory: bool,
}

/// The work of a walk on the entries of the tree.
pub trait Visitor {
    /// Visits an entry.
    ///
    /// # Errors
    /// An error of the visitor. It ends the walk.
    fn visit(&mut self, found: &WalkEntry<'_>, place: &EntryPlace<'_>) -> io::Result<()>;

    /// Handles a directory that the walk cannot enter, and does not visit.
    ///
    /// # Errors
    /// An error of the visitor. It ends the walk.
    fn blocked(&mut self, place: &EntryPlace<'_>, cause: Errno) -> io::Result<()>;
}

/// The position of an entry in the tree, for messages.
pub struct EntryPlace<'a> {
    stack: &'a [Level],
    name: &'a CStr,
}

impl EntryPlace<'_> {
    /// The path below the root of the walk.
    pub fn path(&self) -> PathBuf {
        let names = self.stack.iter().skip(1).map(|level| level.name.as_c_str()).chain([self.name]);
        names.map(|name| OsStr::from_bytes(name.to_bytes())).collect()
    }
}

/// A directory that the walk has entered and not left.
struct Level {
    /// The name of the directory in the directory above.
    name: CString,
    /// The device and inode numbers of the directory.
    identity: (u64, u64),
    /// The entries that the walk has not visited yet.
    entries: vec::IntoIter<(CString, FileType)>,
}

/// Visits everything below `root`, but not `root` itself.
///
/// # Errors
/// When the root cannot be read, or a process has moved a directory of the walk meanwhile; and the errors of the visitor.
pub fn walk(root: OwnedFd, crossing: MountPointPolicy, visitor: &mut impl Visitor) -> io::Result<()> {
    let mut current = root;
    let mut stack = vec![Level::read(&current, CString::default())?];
    while let Some(level) = stack.last_mut() {
        let Some((name, kind)) = level.entries.next() else {
            let Some(finished) = stack.pop() else { break };
            let Some(above) = stack.last() else { break };
            let parent = openat(&current, c"..", DIRECTORY, Mode::empty())?;
            if identity(&parent)? != above.identity {
                return Err(io::Error::other("a directory was moved while it was walked"));
            }
            current = parent;
            let found = WalkEntry { parent: current.as_fd(), name: &finished.name, is_directory: true };
            visitor.visit(&found, &EntryPlace { stack: &stack, name: &finished.name })?;
            continue;
        };
        if matches!(kind, FileType::Directory | FileType::Unknown) {
            let entered = enter(&current, &name, crossing).and_then(|child| {
                let level = Level::read(&child, name.clone())?;
                Ok((child, level))
            });
            match entered {
                Ok((child, level)) => {
                    current = child;
                    stack.push(level);
                    continue;
                }
                // The entry is no directory, or a process has replaced the directory.
                Err(Errno::NOTDIR | Errno::LOOP) => {}
                Err(Errno::NOENT) => continue,
                Err(errno) => {
                    visitor.blocked(&EntryPlace { stack: &stack, name: &name }, errno)?;
                    continue;
                }
            }
        }
        let found = WalkEntry { parent: current.as_fd(), name: &name, is_directory: false };
        visitor.visit(&found, &EntryPlace { stack: &stack, name: &name })?;
    }
    Ok(())
}

/// The flags for opening a directory.
const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC).union(OFlags::NONBLOCK);

/// Opens a directory for a walk, without following a symbolic link.
///
/// # Errors
/// Those of `openat2(2)`, such as `EXDEV` for a mount point with [`MountPointPolicy::Stop`].
pub fn enter(parent: impl AsFd, name: &CStr, crossing: MountPointPolicy) -> Result<OwnedFd, Errno> {
    let resolve = match crossing {
        MountPointPolicy::Enter => ResolveFlags::NO_SYMLINKS,
        MountPointPolicy::Stop => ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV,
    };
    openat2(parent, name, DIRECTORY, Mode::empty(), resolve)
}

impl Level {
    /// Reads the entries of a directory.
    fn read(directory: &OwnedFd, name: CString) -> Result<Level, Errno> {
        let mut entries = Vec::new();
        for entry in Dir::read_from(directory)? {
            let entry = entry?;
            if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
                entries.push((entry.file_name().to_owned(), entry.file_type()));
            }
        }
        Ok(Level { name, identity: identity(directory)?, entries: entries.into_iter() })
    }
}

/// The device and inode numbers of a directory.
fn identity(directory: &OwnedFd) -> Result<(u64, u64), Errno> {
    let found = fstat(directory)?;
    Ok((found.st_dev, found.st_ino))
}
