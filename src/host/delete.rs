//! Deleting a tree. podfs removes symbolic links without following them, and does not touch what is mounted inside the tree
//! (ED-08).

use std::ffi::CStr;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use rustix::fs::{AtFlags, Dir, unlinkat};
use rustix::io::Errno;

use super::walk::{EntryPlace, MountPointPolicy, Visitor, WalkEntry, enter, walk};

/// How many of the entries that podfs could not delete are named.
const NAMED: usize = 5;

/// The entries that podfs could not delete. As text: `2 entries: a/b is a mount point; c: Operation not permitted`.
#[derive(Debug, Default)]
pub struct UndeletedEntries {
    count: usize,
    named: Vec<String>,
}

impl UndeletedEntries {
    /// Whether podfs has deleted all entries.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    fn add(&mut self, path: PathBuf, cause: Errno) {
        self.count += 1;
        if self.named.len() < NAMED {
            let path = path.display();
            self.named.push(match cause {
                Errno::XDEV | Errno::BUSY => format!("{path} is a mount point"),
                cause => format!("{path}: {cause}"),
            });
        }
    }
}

impl fmt::Display for UndeletedEntries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let noun = if self.count == 1 { "entry" } else { "entries" };
        write!(f, "{} {noun}: {}", self.count, self.named.join("; "))?;
        if self.count > self.named.len() { f.write_str("; …") } else { Ok(()) }
    }
}

/// Deletes the directory `name` of `parent` with everything in it. An entry that podfs cannot delete stays, with the directories
/// above it.
///
/// # Errors
/// When the directory cannot be read, or another process moves its directories meanwhile. A missing directory is no error.
pub fn delete(parent: BorrowedFd<'_>, name: &CStr) -> io::Result<UndeletedEntries> {
    let mut deletion = DeletionWalk::default();
    match enter(parent, name, MountPointPolicy::Stop) {
        Ok(root) => deletion.repeat(root, &|| true)?,
        Err(Errno::NOENT) => return Ok(deletion.undeleted),
        Err(Errno::XDEV) => {
            deletion.undeleted.add(PathBuf::from(name.to_string_lossy().as_ref()), Errno::XDEV);
            return Ok(deletion.undeleted);
        }
        // A container has replaced the directory by a file or a symbolic link.
        Err(Errno::NOTDIR | Errno::LOOP) => {
            unlinkat(parent, name, AtFlags::empty())?;
            return Ok(deletion.undeleted);
        }
        Err(errno) => return Err(errno.into()),
    }
    match unlinkat(parent.as_fd(), name, AtFlags::REMOVEDIR) {
        Err(Errno::NOTEMPTY | Errno::EXIST) if !deletion.undeleted.is_empty() => Ok(deletion.undeleted),
        Err(errno) => Err(errno.into()),
        Ok(()) => Ok(deletion.undeleted),
    }
}

/// Deletes everything in a directory. The directory itself stays. Asks `go_on` before each entry, and ends if the answer is no.
///
/// # Errors
/// As [`delete`]; `Interrupted` if `go_on` ended the deletion.
pub fn empty(directory: OwnedFd, go_on: &dyn Fn() -> bool) -> io::Result<UndeletedEntries> {
    let mut deletion = DeletionWalk::default();
    deletion.repeat(directory, go_on)?;
    Ok(deletion.undeleted)
}

/// The walk that deletes a tree.
#[derive(Default)]
struct DeletionWalk {
    undeleted: UndeletedEntries,
    /// The number of entries that this walk has removed.
    removed: usize,
}

/// The walk that deletes a tree, and can end early.
struct StoppableDeletion<'a> {
    deletion: &'a mut DeletionWalk,
    go_on: &'a dyn Fn() -> bool,
}

impl DeletionWalk {
    /// Walks until everything is removed, or nothing more can be. A walk that removes names may miss others, at most every second one.
    fn repeat(&mut self, root: OwnedFd, go_on: &dyn Fn() -> bool) -> io::Result<()> {
        // Not for ever: another process may make files meanwhile.
        const WALKS: usize = 32;
        for _ in 0..WALKS {
            *self = Self::default();
            walk(root.try_clone()?, MountPointPolicy::Stop, &mut StoppableDeletion { deletion: self, go_on })?;
            let is_complete = self.undeleted.is_empty() && is_empty(&root)?;
            if is_complete || self.removed == 0 {
                break;
            }
        }
        Ok(())
    }
}

fn is_empty(directory: &OwnedFd) -> Result<bool, Errno> {
    for entry in Dir::read_from(directory)? {
        if !matches!(entry?.file_name().to_bytes(), b"." | b"..") {
            return Ok(false);
        }
    }
    Ok(true)
}

impl Visitor for StoppableDeletion<'_> {
    fn visit(&mut self, found: &WalkEntry<'_>, place: &EntryPlace<'_>) -> io::Result<()> {
        if (self.go_on)() { self.deletion.visit(found, place) } else { Err(io::ErrorKind::Interrupted.into()) }
    }

    fn blocked(&mut self, place: &EntryPlace<'_>, cause: Errno) -> io::Result<()> {
        self.deletion.blocked(place, cause)
    }
}

impl Visitor for DeletionWalk {
    fn visit(&mut self, found: &WalkEntry<'_>, place: &EntryPlace<'_>) -> io::Result<()> {
        let flags = if found.is_directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        match unlinkat(found.parent, found.name, flags) {
            Ok(()) => self.removed += 1,
            Err(Errno::NOENT) => {}
            // The entries in this directory that podfs could not delete are counted already.
            Err(Errno::NOTEMPTY | Errno::EXIST) if !self.undeleted.is_empty() => {}
            Err(errno) => self.undeleted.add(place.path(), errno),
        }
        Ok(())
    }

    fn blocked(&mut self, place: &EntryPlace<'_>, cause: Errno) -> io::Result<()> {
        self.undeleted.add(place.path(), cause);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::symlink;
    use std::path::Path;

    use podfs_fuse::mount::bind::bind;
    use podfs_fuse::mount::directories::Directories;
    use podfs_fuse::mount::point::{MountPoint, OldMountPolicy};
    use podfs_fuse::mount::private::ContainerAccess;

    use super::*;

    fn delete_in(base: &Path) -> UndeletedEntries {
        delete(File::open(base).expect("a directory").as_fd(), c"tree").expect("deleted")
    }

    #[test]
    fn a_tree_is_deleted_with_everything_and_links_are_not_followed() {
        let base = tempfile::tempdir().expect("a directory");
        let (tree, outside) = (base.path().join("tree"), base.path().join("outside"));
        fs::create_dir_all(tree.join("a/b/c")).expect("directories");
        fs::create_dir(&outside).expect("a directory");
        fs::write(outside.join("keep"), "").expect("a file");
        fs::write(tree.join("a/file"), "").expect("a file");
        symlink(&outside, tree.join("a/b/link")).expect("a link");
        symlink("nowhere", tree.join("dangling")).expect("a link");
        assert!(delete_in(base.path()).is_empty());
        assert!(!tree.exists() && outside.join("keep").exists());
        assert!(delete_in(base.path()).is_empty(), "nothing is there any more");
        symlink(&outside, &tree).expect("a link");
        assert!(delete_in(base.path()).is_empty());
        assert!(!tree.is_symlink() && outside.join("keep").exists());
    }

    #[test]
    fn a_directory_with_more_names_than_the_walk_keeps_is_deleted() {
        for base in [tempfile::tempdir(), tempfile::tempdir_in("/dev/shm")] {
            let base = base.expect("a directory");
            let tree = base.path().join("tree");
            for directory in 0..3 {
                let inner = tree.join(format!("{directory:0100}"));
                fs::create_dir_all(&inner).expect("directories");
                let first = inner.join("first");
                File::create(&first).expect("a file");
                (0..9000).for_each(|number| fs::hard_link(&first, inner.join(number.to_string())).expect("a name"));
                for number in 0..9000 {
                    fs::create_dir(tree.join(format!("{directory}-{number}"))).expect("a directory");
                }
            }
            assert!(delete_in(base.path()).is_empty());
            assert!(!tree.exists());
        }
    }

    #[test]
    fn a_deep_tree_takes_neither_stack_nor_descriptors() {
        let base = tempfile::tempdir().expect("a directory");
        let mut at = File::open(base.path()).expect("a directory");
        let mut name = c"tree";
        for _ in 0..5_000 {
            rustix::fs::mkdirat(&at, name, rustix::fs::Mode::RWXU).expect("a directory");
            at = File::from(enter(&at, name, MountPointPolicy::Stop).expect("entered"));
            name = c"d";
        }
        assert!(delete_in(base.path()).is_empty());
    }

    #[test]
    fn ed_08_mounts_inside_are_left_and_reported() {
        let base = tempfile::tempdir().expect("a directory");
        let (tree, outside) = (base.path().join("tree"), base.path().join("outside"));
        fs::create_dir_all(tree.join("a/mnt")).expect("directories");
        fs::write(tree.join("a/gone"), "").expect("a file");
        fs::create_dir(&outside).expect("a directory");
        fs::write(outside.join("keep"), "").expect("a file");
        let mut directories = Directories::default();
        let point =
            MountPoint::prepare(&tree.join("a/mnt"), OldMountPolicy::RemoveDead, &mut directories).expect("a point");
        let source = File::open(&outside).expect("a directory");
        let mounted =
            point.attach_bind(&bind(source.as_fd(), ContainerAccess::ReadWrite).expect("a clone")).expect("mounted");
        let left = delete_in(base.path());
        assert_eq!(left.to_string(), "1 entry: a/mnt is a mount point");
        assert!(outside.join("keep").exists() && !tree.join("a/gone").exists());
        mounted.unmount().expect("unmounted");
        assert!(delete_in(base.path()).is_empty());
        assert!(!tree.exists() && outside.join("keep").exists());
    }
}
