//! Walking a tree: children first, in the order of the directory, by descriptors.
//!
//! One directory is open at a time. The walk goes back up by `..`, and checks that this is the directory that it came from. So
//! neither the stack nor the number of descriptors grows with the depth, and a process that moves directories cannot lead the
//! walk out of the tree.

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
    /// The directory it is in.
    pub parent: BorrowedFd<'a>,
    /// Its name there.
    pub name: &'a CStr,
    /// Whether it is a directory; then everything in it was visited before.
    pub is_directory: bool,
}

/// Called for each entry.
pub trait Visitor {
    /// An entry.
    ///
    /// # Errors
    /// An error of the visitor; it ends the walk.
    fn visit(&mut self, found: &WalkEntry<'_>, place: &EntryPlace<'_>) -> io::Result<()>;

    /// A directory that cannot be entered, and is not visited.
    ///
    /// # Errors
    /// An error of the visitor; it ends the walk.
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

/// A directory that is being walked.
struct Level {
    /// Its name in the one above.
    name: CString,
    identity: (u64, u64),
    entries: vec::IntoIter<(CString, FileType)>,
}

/// Shows `visitor` everything below `root`, but not `root` itself.
///
/// # Errors
/// When the root cannot be read, when a directory on the way was moved meanwhile, and what the visitor says.
pub fn walk(root: OwnedFd, crossing: MountPointPolicy, visitor: &mut impl Visitor) -> io::Result<()> {
    let mut current = root;
    let mut stack = vec![Level::read(&current, CString::default())?];
    while let Some(level) = stack.last_mut() {
        let Some((name, kind)) = level.entries.next() else {
            let Some(done) = stack.pop() else { break };
            let Some(above) = stack.last() else { break };
            let parent = openat(&current, c"..", DIRECTORY, Mode::empty())?;
            if identity(&parent)? != above.identity {
                return Err(io::Error::other("a directory was moved while it was walked"));
            }
            current = parent;
            let found = WalkEntry { parent: current.as_fd(), name: &done.name, is_directory: true };
            visitor.visit(&found, &EntryPlace { stack: &stack, name: &done.name })?;
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
                // It is something else, or was replaced by something else.
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

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC).union(OFlags::NONBLOCK);

/// Opens a directory for walking, without following a link.
///
/// # Errors
/// Those of `openat2(2)`: `EXDEV` for a mount point with [`MountPointPolicy::Stop`].
pub fn enter(parent: impl AsFd, name: &CStr, crossing: MountPointPolicy) -> Result<OwnedFd, Errno> {
    let resolve = match crossing {
        MountPointPolicy::Enter => ResolveFlags::NO_SYMLINKS,
        MountPointPolicy::Stop => ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV,
    };
    openat2(parent, name, DIRECTORY, Mode::empty(), resolve)
}

impl Level {
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

fn identity(directory: &OwnedFd) -> Result<(u64, u64), Errno> {
    let found = fstat(directory)?;
    Ok((found.st_dev, found.st_ino))
}
