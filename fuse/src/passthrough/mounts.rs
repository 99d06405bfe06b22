//! The mounts of the source: the one it is on, and those below it.
//!
//! Each has an *anchor*: a descriptor of a file on it that file handles are opened with. A mount stays as long as one
//! of its nodes is known, so its id is not used for another meanwhile; and the host cannot unmount it meanwhile except
//! lazily.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, Weak};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, StatxFlags, statx};
use rustix::io::Errno;

use super::handle::FileHandle;
use super::node::Identity;
use crate::mount::private::PASSTHROUGH_SOURCE;
use crate::mount::table::{FS_TYPE, mount_with_id};

/// Bits of a file's number that tell the mounts below the source apart.
const INDEX_SHIFT: u32 = 48;

/// One mount.
#[derive(Debug)]
pub struct Mount {
    id: u64,
    /// 0 for the one the source is on.
    index: u64,
    /// None where the file system has no file handles: nodes keep their descriptors then.
    anchor: Option<OwnedFd>,
}

impl Mount {
    /// The number that a file with the number `ino` on this mount shows: two files of the volume never show the same,
    /// as long as numbers have no more than 48 bits.
    pub fn ino(&self, ino: u64) -> u64 {
        ino ^ (self.index << INDEX_SHIFT)
    }

    /// What file handles of this mount are opened with.
    pub fn anchor(&self) -> Option<BorrowedFd<'_>> {
        self.anchor.as_ref().map(AsFd::as_fd)
    }
}

/// The mounts that have been met.
pub struct Mounts {
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    mounts: HashMap<u64, Weak<Mount>>,
    next_index: u64,
}

impl Mounts {
    /// None yet.
    pub fn new() -> Self {
        Self { known: Mutex::new(Known::default()) }
    }

    /// Which file `file` is open on. `near` is the mount it is most likely on.
    ///
    /// # Errors
    /// `ELOOP` for a passthrough volume below the source: what it shows could lead back here, and the request would
    /// wait for itself.
    pub fn identify(&self, file: BorrowedFd<'_>, near: Option<&Arc<Mount>>) -> Result<(Identity, Arc<Mount>), Errno> {
        let (handle, id) = match FileHandle::of(file) {
            Ok((handle, id)) => (Some(handle), id),
            Err(Errno::OPNOTSUPP | Errno::OVERFLOW) => (None, mount_id(file)?),
            Err(errno) => return Err(errno),
        };
        let mount = match near {
            Some(near) if near.id == id => Arc::clone(near),
            _ => self.enter(file, id, handle.as_ref())?,
        };
        let identity = match handle {
            Some(handle) if mount.anchor.is_some() => Identity::Handle { mount: id, handle },
            _ => {
                let found = statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::INO)?;
                let device = (u64::from(found.stx_dev_major) << 32) | u64::from(found.stx_dev_minor);
                Identity::Number { mount: id, device, ino: found.stx_ino }
            }
        };
        Ok((identity, mount))
    }

    fn enter(&self, file: BorrowedFd<'_>, id: u64, handle: Option<&FileHandle>) -> Result<Arc<Mount>, Errno> {
        if let Some(mount) = self.lock().mounts.get(&id).and_then(Weak::upgrade) {
            return Ok(mount);
        }
        if is_passthrough(id) {
            return Err(Errno::LOOP);
        }
        // Not under the lock: a file system that hangs holds up nobody else.
        let anchor = handle.and_then(|handle| anchor(file, handle));
        let mut known = self.lock();
        known.mounts.retain(|_, mount| mount.strong_count() > 0);
        let index = known.next_index;
        known.next_index += 1;
        let mount = Arc::new(Mount { id, index, anchor });
        known.mounts.insert(id, Arc::downgrade(&mount));
        Ok(mount)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Known> {
        self.known.lock().expect("a thread that panics ends the process")
    }
}

/// A descriptor to open handles with, if that works here.
fn anchor(file: BorrowedFd<'_>, handle: &FileHandle) -> Option<OwnedFd> {
    let kind = FileType::from_raw_mode(statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::TYPE).ok()?.stx_mode.into());
    // Opening anything else may have effects, or wait.
    if !matches!(kind, FileType::Directory | FileType::RegularFile) {
        return None;
    }
    let anchor = reopen(file, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOATIME).ok()?;
    handle.open(anchor.as_fd(), OFlags::PATH).ok()?;
    Some(anchor)
}

/// Opens what `file` is open on once more, with other flags.
pub(super) fn reopen(file: BorrowedFd<'_>, flags: OFlags) -> Result<OwnedFd, Errno> {
    // The link of the kernel's own is to be followed.
    let flags = flags.difference(OFlags::NOFOLLOW) | OFlags::CLOEXEC;
    rustix::fs::open(proc_path(file), flags, Mode::empty())
}

/// A path that leads to what `file` is open on and nowhere else.
pub(super) fn proc_path(file: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

fn mount_id(file: BorrowedFd<'_>) -> Result<u64, Errno> {
    // Without asking the file system: it may be served by this very process.
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    Ok(statx(file, c"", flags, StatxFlags::MNT_ID)?.stx_mnt_id)
}

fn is_passthrough(id: u64) -> bool {
    let mount = mount_with_id(id).ok().flatten();
    mount.is_some_and(|mount| mount.fs_type == FS_TYPE && mount.source == PASSTHROUGH_SOURCE)
}
