//! Walking a tree, by descriptors. The walk visits the entries of a directory in the directory's order, and then the directory.
//!
//! The walk has one directory open at a time. It goes up by `..`, and checks that it reaches the directory from which it came. So
//! neither the stack nor the number of descriptors grows with the depth, and a process that moves directories cannot lead the walk
//! out of the tree.
//!
//! The walk has only some thousand names in memory, however many the tree has. It remembers its position in a directory, and goes on
//! reading there. Some file systems count positions anew when names are removed (tmpfs before Linux 6.6, overlayfs), so that a visitor
//! that removes names has to walk once more ([`delete`](super::delete)).

use std::collections::VecDeque;
use std::ffi::{CStr, CString, OsStr};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

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
    /// Entries that the walk has read and not visited.
    entries: VecDeque<NameInLevel>,
    /// The position behind the last visited entry; `None` before the first.
    position: Option<i64>,
    /// Whether there may be entries behind those in `entries`.
    has_more: bool,
}

struct NameInLevel {
    name: CString,
    kind: FileType,
    /// The position of the next entry.
    next: i64,
}

/// Most entries that the walk reads of a directory at once.
const BATCH: usize = 4096;
/// The number of entries in memory above which the walk drops those of the directories above, and reads them again later.
const MOST: usize = 4 * BATCH;

/// Visits everything below `root`, but not `root` itself.
///
/// # Errors
/// When the root cannot be read, or a process has moved a directory of the walk meanwhile; and the errors of the visitor.
pub fn walk(root: OwnedFd, crossing: MountPointPolicy, visitor: &mut impl Visitor) -> io::Result<()> {
    let mut current = root;
    let mut stack = vec![Level::new(&current, CString::default())?];
    // The number of entries in memory.
    let mut held = 0;
    while let Some(level) = stack.last_mut() {
        if level.entries.is_empty() {
            held += level.read(&current)?;
        }
        let Some(NameInLevel { name, kind, next }) = level.entries.pop_front() else {
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
        level.position = Some(next);
        held -= 1;
        if matches!(kind, FileType::Directory | FileType::Unknown) {
            let entered = enter(&current, &name, crossing).and_then(|child| {
                let mut level = Level::new(&child, name.clone())?;
                let read = level.read(&child)?;
                Ok((child, level, read))
            });
            match entered {
                Ok((child, level, read)) => {
                    current = child;
                    if held > MOST {
                        stack.iter_mut().for_each(Level::drop_entries);
                        held = 0;
                    }
                    held += read;
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
    fn new(directory: &OwnedFd, name: CString) -> Result<Level, Errno> {
        let identity = identity(directory)?;
        Ok(Level { name, identity, entries: VecDeque::new(), position: None, has_more: true })
    }

    /// Reads entries from the position on, if there may be some. Returns their number.
    fn read(&mut self, directory: &OwnedFd) -> Result<usize, Errno> {
        if !self.has_more {
            return Ok(0);
        }
        let mut stream = Dir::read_from(directory)?;
        if let Some(position) = self.position {
            stream.seek(position)?;
        }
        while self.entries.len() < BATCH {
            let Some(entry) = stream.next().transpose()? else {
                self.has_more = false;
                break;
            };
            if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
                let (name, kind, next) = (entry.file_name().to_owned(), entry.file_type(), entry.offset());
                self.entries.push_back(NameInLevel { name, kind, next });
            }
        }
        Ok(self.entries.len())
    }

    /// Forgets the entries that are read and not visited.
    fn drop_entries(&mut self) {
        self.has_more |= !self.entries.is_empty();
        self.entries = VecDeque::new();
    }
}

/// The device and inode numbers of a directory.
fn identity(directory: &OwnedFd) -> Result<(u64, u64), Errno> {
    let found = fstat(directory)?;
    Ok((found.st_dev, found.st_ino))
}
