//! The mounts of the source: the one it is on, and those below it.
//!
//! Each has an *anchor*: a descriptor of a file on it that file handles are opened with. A mount stays as long as one
//! of its nodes is known, so its id is not used for another meanwhile; and the host cannot unmount it meanwhile except
//! lazily.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::{Arc, Mutex, Weak};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, StatxFlags, statx};
use rustix::io::Errno;

use super::handle::FileHandle;
use super::node::Identity;
use super::state::{MountCell, no_memory, recordable};
use crate::mount::private::PASSTHROUGH_SOURCE;
use crate::mount::table::{FS_TYPE, mount_with_id};
use crate::region::Region;
use crate::region::cells::Record;

/// Bits of a file's number that tell the mounts below the source apart.
const INDEX_SHIFT: u32 = 48;

/// One mount.
#[derive(Debug)]
pub struct Mount {
    /// Dropped before the anchor that it names is closed.
    _record: Record<MountCell>,
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

    /// One that a dead server left.
    pub fn inherit(record: Record<MountCell>, anchor: Option<OwnedFd>) -> Mount {
        let (id, index) = (record.id.load(Relaxed), record.index.load(Relaxed));
        Mount { _record: record, id, index, anchor }
    }

    /// The kernel's number for it.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The volume's number for it.
    pub fn index(&self) -> u64 {
        self.index
    }

    /// What file handles of this mount are opened with.
    pub fn anchor(&self) -> Option<BorrowedFd<'_>> {
        self.anchor.as_ref().map(AsFd::as_fd)
    }
}

/// The mounts that have been met.
pub struct Mounts {
    region: Arc<Region>,
    known: Mutex<HashMap<u64, Weak<Mount>>>,
}

impl Mounts {
    /// Those of `known`, which a dead server may have left.
    pub fn new<'a>(region: Arc<Region>, known: impl Iterator<Item = &'a Arc<Mount>>) -> Self {
        let known = known.map(|mount| (mount.id, Arc::downgrade(mount))).collect();
        Self { region, known: Mutex::new(known) }
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
        if let Some(mount) = self.lock().get(&id).and_then(Weak::upgrade) {
            return Ok(mount);
        }
        if is_passthrough(id) {
            return Err(Errno::LOOP);
        }
        // Not under the lock: a file system that hangs holds up nobody else.
        let anchor = handle.and_then(|handle| anchor(file, handle));
        let mut known = self.lock();
        known.retain(|_, mount| mount.strong_count() > 0);
        let next = &self.region.header().counters.next_mount;
        let index = next.load(Relaxed);
        next.store(index.wrapping_add(1), Release);
        let record = Record::new(&self.region, |cell: &MountCell| {
            cell.id.store(id, Relaxed);
            cell.index.store(index, Relaxed);
            cell.anchor.store(anchor.as_ref().map_or(0, |anchor| anchor.as_raw_fd().cast_unsigned()), Relaxed);
        });
        let mount = Arc::new(Mount { _record: record.map_err(no_memory)?, id, index, anchor });
        known.insert(id, Arc::downgrade(&mount));
        Ok(mount)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Weak<Mount>>> {
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
    Some(recordable(anchor))
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
