//! Encloses sources for servers: cuts them off from the host's other mounts.
//!
//! A process with a descriptor of a directory reaches the directories above it by `..`, and from there every mount of its mount
//! namespace. So a server gets a clone of its source, with a clone of every mount below it, in a mount namespace without other
//! mounts:
//!
//! 1. The clone is a slave of the host's mounts. Later mounts of the host below the source appear in it, and unmounts of the host
//!    take effect in it.
//! 2. Only a clone in a mount namespace gets mount events; a detached clone does not.
//! 3. The root of the namespace is an empty read-only tmpfs with the clone in it. `..` ends there.
//! 4. An open mount table of the namespace keeps the namespace alive, even without processes in it. So the supervisor, the
//!    server and its successors keep the namespace by their descriptor of its mount table.
//!
//! A source on a mount that is attached nowhere, such as the tmpfs of `podfs mount`, is cut off already.
//!
//! A private mount gets no mount events. A clone of it would not show later mounts of the host below the source, so podfs does not
//! enclose such a source.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::thread;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, StatxFlags, openat, statx};
use rustix::mount::MountAttrFlags;
use rustix::thread::{UnshareFlags, unshare_unsafe};
use tracing::info;

use super::bind::bind;
use super::private::{ContainerAccess, MountPointType};
use super::root::{MountInRoot, become_root, file_system};
use super::table::{MountTable, mount_id, mount_with_id};

/// The name of the clone in its namespace.
const NAME: &std::ffi::CStr = c"source";

/// A source, and the mount table that has the mounts below it.
#[derive(Debug)]
pub struct SourceWithMounts {
    /// The source, or its clone.
    pub source: OwnedFd,
    /// The mount table of its namespace.
    pub table: MountTable,
}

impl SourceWithMounts {
    /// Encloses a source of this node. If it cannot, it logs that, and returns the source itself.
    ///
    /// # Errors
    /// When there are no more descriptors, or there is no `/proc`.
    pub fn of(source: BorrowedFd<'_>, volume: &str) -> io::Result<Self> {
        let reason = match enclose(source) {
            Ok(Some(enclosed)) => return Ok(enclosed),
            Ok(None) => {
                "the mount of its source is private; `mount --make-rshared /` makes the host's mounts shared".to_owned()
            }
            Err(error) => error.to_string(),
        };
        info!(volume, "volume {volume:?}: podfs does not cut its server off from the host's other mounts: {reason}");
        Self::open(source)
    }

    /// The source itself, without a clone: a detached source, or one that cannot be enclosed.
    ///
    /// # Errors
    /// Those of [`Self::of`].
    pub fn open(source: BorrowedFd<'_>) -> io::Result<Self> {
        Ok(Self { source: source.try_clone_to_owned()?, table: MountTable::open()? })
    }
}

/// Encloses a source; `None` if its mount gets no mount events.
fn enclose(source: BorrowedFd<'_>) -> io::Result<Option<SourceWithMounts>> {
    let Some(mounted) = mount_with_id(mount_id(source)?)? else {
        return match is_alone(source) {
            true => SourceWithMounts::open(source).map(Some),
            false => Err(io::Error::other("the mount of its source is not in the mount table")),
        };
    };
    if mounted.is_private {
        return Ok(None);
    }
    // The kernel gets the type of the root from the mount, without a request to the file system.
    let found = statx(source, c"", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE)?;
    let shape = match FileType::from_raw_mode(found.stx_mode.into()) {
        FileType::Directory => MountPointType::Directory,
        _ => MountPointType::File,
    };
    let clone = bind(source, ContainerAccess::ReadWrite).map_err(io::Error::other)?;
    let enclosing = || attach_in_own_namespace(&clone, shape);
    let started = thread::scope(|scope| {
        let thread = thread::Builder::new().spawn_scoped(scope, enclosing)?;
        thread.join().map_err(|_panic| io::Error::other("a thread ended early"))
    });
    let table = started??;
    // The descriptor is of the root of the clone, in any namespace.
    Ok(Some(SourceWithMounts { source: clone, table }))
}

/// Whether the source is the root of a mount that is attached nowhere: nothing is above it.
fn is_alone(source: BorrowedFd<'_>) -> bool {
    let same = |name: &std::ffi::CStr| {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let found = statx(source, name, flags, StatxFlags::INO | StatxFlags::MNT_ID).ok()?;
        // The roots of all subvolumes of btrfs have the same inode number.
        let place = (found.stx_mnt_id, (found.stx_dev_major, found.stx_dev_minor), found.stx_ino);
        (found.stx_mask & StatxFlags::MNT_ID.bits() != 0).then_some(place)
    };
    same(c"..").is_some_and(|above| same(c"") == Some(above))
}

/// Attaches the clone in a new mount namespace, and opens the mount table there. The calling thread stays in that namespace, so it
/// must end afterwards.
fn attach_in_own_namespace(clone: &OwnedFd, shape: MountPointType) -> io::Result<MountTable> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let own_files = openat(CWD, c"/proc/thread-self", flags, Mode::empty())?;
    let root = file_system("tmpfs", ("mode", "0555"), MountAttrFlags::empty())?;
    // SAFETY: this affects only the mount namespace and working directory of this thread.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }?;
    become_root(&root, Some(MountInRoot { mount: clone, name: NAME, shape }))?;
    let table = openat(&own_files, c"mountinfo", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    Ok(MountTable::from(table))
}
