//! The mounts of the source: the one it is on, and those below it.
//!
//! Each has an *anchor*: a descriptor of a file on it that file handles are opened with. A mount stays as long as one
//! of its nodes is known, so its id is not used for another meanwhile; and the host cannot unmount it meanwhile except
//! lazily.
//!
//! An anchor that no process has any more is opened anew when it is needed: from the source, or through the directory that the
//! mount was found in.
//!
//! The visible mount of the volume carries the flags of the mount that the source is on. A mount below the source may
//! deny more (`nosuid`, `nodev`, `noexec`), and the kernel cannot know that of a FUSE file. So its [`Restrictions`]
//! decide how the attributes of its files look (`attributes`).

use std::collections::HashMap;
use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, StatVfsMountFlags, Statx, StatxFlags, fstatvfs, openat, statx};
use rustix::io::Errno;

use super::attributes::attributes_of_name;
use super::handle::FileHandle;
use super::hashing::Key;
use super::listing::SourceListing;
use super::node::{Identity, Node};
use super::state::{MountCell, no_memory, recordable};
use crate::mount::private::PASSTHROUGH_SOURCE;
use crate::mount::table::{FS_TYPE, MountTable, MountTableEntry, Restrictions, mount_id};
use crate::region::Region;
use crate::region::cells::OwnedCell;

/// Bits of a file's number that tell the mounts below the source apart.
const INDEX_SHIFT: u32 = 48;

/// One mount.
#[derive(Debug)]
pub struct SourceMount {
    /// Dropped before the anchor that it names is closed.
    record: OwnedCell<MountCell>,
    id: u64,
    /// 0 for the one the source is on.
    index: u64,
    /// None where the file system has no file handles: nodes keep their descriptors then.
    anchor: OnceLock<OwnedFd>,
    /// Where the anchor is found again that no process has any more.
    way: Option<MountRoute>,
    restrictions: Restrictions,
}

/// The way to a mount.
#[derive(Debug)]
pub enum MountRoute {
    /// The source is on it.
    Source(OwnedFd),
    /// It is mounted on one of the entries of a directory.
    Below {
        /// The mount that the directory is on.
        parent: Arc<SourceMount>,
        /// The directory.
        directory: FileHandle,
    },
    /// The next look at a file there leads to it.
    Unknown,
}

impl MountRoute {
    /// The way that is recorded to the mount of `cell`.
    pub fn recorded(cell: &MountCell, known: &HashMap<u64, Arc<SourceMount>, Key>) -> MountRoute {
        let parent = known.get(&cell.parent.load(Relaxed)).cloned();
        let length = Some(cell.length.load(Relaxed)).filter(|length| *length > 0);
        let directory = length.and_then(|length| FileHandle::read(length, &cell.handle_kind, &cell.handle));
        parent.zip(directory).map_or(MountRoute::Unknown, |(parent, directory)| MountRoute::Below { parent, directory })
    }

    /// A file of the mount `id`, and its handle.
    fn file(&self, id: u64) -> Option<(OwnedFd, FileHandle)> {
        let of_mount = |file: OwnedFd| match FileHandle::of(file.as_fd()) {
            Ok((handle, mount)) if mount == id => Some((file, handle)),
            _ => None,
        };
        match self {
            Self::Source(source) => of_mount(source.try_clone().ok()?),
            Self::Below { parent, directory } => {
                let directory = directory.open(parent.anchor()?, OFlags::RDONLY | OFlags::DIRECTORY).ok()?;
                let mut found = None;
                let listed = SourceListing::new(directory).read(0, |directory, entry| {
                    if entry.name != "." && entry.name != ".." {
                        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                        found = openat(directory, entry.name, flags, Mode::empty()).ok().and_then(of_mount);
                    }
                    Ok(found.is_none())
                });
                listed.ok().and(found)
            }
            Self::Unknown => None,
        }
    }
}

impl SourceMount {
    /// The number that a file with the number `ino` on this mount shows: two files of the volume never show the same,
    /// as long as numbers have no more than 48 bits.
    pub fn ino(&self, ino: u64) -> u64 {
        ino ^ (self.index << INDEX_SHIFT)
    }

    /// A mount that a dead server left. `table` are the mounts that the source is among.
    pub fn inherit(
        record: OwnedCell<MountCell>,
        anchor: Option<OwnedFd>,
        way: Option<MountRoute>,
        table: &[MountTableEntry],
    ) -> SourceMount {
        let (id, index) = (record.id.load(Relaxed), record.index.load(Relaxed));
        // A mount that the host has unmounted lazily is not in the table. Its file system is not asked: it may be away,
        // and would keep all volumes of the pod waiting.
        let listed = table.iter().find(|mounted| mounted.id == id).map(|mounted| mounted.restrictions);
        let restrictions = if index == 0 { Restrictions::default() } else { listed.unwrap_or(Restrictions::ALL) };
        SourceMount { record, id, index, anchor: anchor.map(OnceLock::from).unwrap_or_default(), way, restrictions }
    }

    /// Its restrictions beyond those of the volume's visible mount.
    pub fn restrictions(&self) -> Restrictions {
        self.restrictions
    }

    /// The volume's number for it.
    pub fn index(&self) -> u64 {
        self.index
    }

    /// The descriptor with which file handles of this mount are opened.
    pub fn anchor(&self) -> Option<BorrowedFd<'_>> {
        if self.anchor.get().is_none() {
            let (file, handle) = self.way.as_ref()?.file(self.id)?;
            self.set_anchor(file.as_fd(), &handle);
        }
        self.anchor.get().map(AsFd::as_fd)
    }

    /// Whether its files are opened by handles.
    fn has_handles(&self) -> bool {
        self.anchor.get().is_some() || self.way.is_some()
    }

    /// Opens the anchor anew, now that a file of the mount is known.
    fn set_anchor(&self, file: BorrowedFd<'_>, handle: &FileHandle) {
        let Some(anchor) = anchor(file, handle) else { return };
        let number = anchor.as_raw_fd().cast_unsigned();
        // Of two threads, the first one records its descriptor.
        if self.anchor.set(anchor).is_ok() {
            self.record.anchor.store(number, Release);
        }
    }
}

/// The mounts that have been met.
pub struct Mounts {
    region: Arc<Region>,
    table: Arc<MountTable>,
    known: Mutex<HashMap<u64, Weak<SourceMount>>>,
}

impl Mounts {
    /// Those of `known`, which a dead server may have left. `table` has the mounts that the source is among.
    pub fn new<'a>(
        region: Arc<Region>,
        table: Arc<MountTable>,
        known: impl Iterator<Item = &'a Arc<SourceMount>>,
    ) -> Self {
        let known = known.map(|mount| (mount.id, Arc::downgrade(mount))).collect();
        Self { region, table, known: Mutex::new(known) }
    }

    /// Which file `file` is open on. `parent` is the directory that it was found in, if it was found in one.
    ///
    /// # Errors
    /// `ELOOP` for a passthrough volume below the source: what it shows could lead back here, and the request would
    /// wait for itself.
    pub fn identify(&self, file: BorrowedFd<'_>, parent: Option<&Node>) -> Result<(Identity, Arc<SourceMount>), Errno> {
        let (handle, id) = match FileHandle::of(file) {
            Ok((handle, id)) => (Some(handle), id),
            Err(Errno::OPNOTSUPP | Errno::OVERFLOW) => (None, mount_id(file)?),
            Err(errno) => return Err(errno),
        };
        let mount = match parent {
            Some(parent) if parent.mount.id == id => Arc::clone(&parent.mount),
            _ => self.enter(file, id, handle.as_ref(), parent)?,
        };
        let identity = match handle {
            Some(handle) if mount.has_handles() => Identity::Handle { mount: mount.index, handle },
            _ => {
                let found = statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::INO)?;
                let device = (u64::from(found.stx_dev_major) << 32) | u64::from(found.stx_dev_minor);
                Identity::Number { mount: mount.index, device, ino: found.stx_ino }
            }
        };
        Ok((identity, mount))
    }

    /// Which file `name` leads to, with its attributes, if two system calls on the name tell that: if it is on the mount of
    /// `parent`. Otherwise it is to be opened.
    ///
    /// Both calls found the same file if its number and its mount are the same. There is one exception: between the two calls, the
    /// name leads to a new file with the number of one that was just deleted. The handle is that of the deleted file then. The next
    /// call with it answers `ESTALE`, and the kernel looks the name up again.
    ///
    /// # Errors
    /// `ENOENT` when there is no such name.
    pub fn identify_name(
        parent: &Node,
        directory: BorrowedFd<'_>,
        name: &CStr,
    ) -> Result<Option<(Identity, Statx)>, Errno> {
        Self::identify_name_while(parent, directory, name, || {})
    }

    /// As [`Self::identify_name`]; `meanwhile` happens between the two calls.
    fn identify_name_while(
        parent: &Node,
        directory: BorrowedFd<'_>,
        name: &CStr,
        meanwhile: impl FnOnce(),
    ) -> Result<Option<(Identity, Statx)>, Errno> {
        if parent.handle().and_then(FileHandle::ino).is_none() {
            return Ok(None);
        }
        let Some(handle) = Self::handle_of_name(parent, directory, name)? else { return Ok(None) };
        meanwhile();
        let Ok(found) = attributes_of_name(directory, name) else { return Ok(None) };
        let is_same = handle.ino().map(u64::from) == Some(found.stx_ino)
            && found.stx_mask & StatxFlags::MNT_ID.bits() != 0
            && found.stx_mnt_id == parent.mount.id;
        Ok(is_same.then_some((Identity::Handle { mount: parent.mount.index, handle }, found)))
    }

    /// Which file `name` leads to, by one system call on the name: only if it is on the mount of `parent`.
    pub fn identity_of_name(parent: &Node, directory: BorrowedFd<'_>, name: &CStr) -> Option<Identity> {
        parent.handle()?;
        let handle = Self::handle_of_name(parent, directory, name).ok()??;
        Some(Identity::Handle { mount: parent.mount.index, handle })
    }

    /// The handle of the file that `name` leads to, if the file is on the mount of `parent`.
    fn handle_of_name(parent: &Node, directory: BorrowedFd<'_>, name: &CStr) -> Result<Option<FileHandle>, Errno> {
        match FileHandle::of_name(directory, name) {
            Ok((handle, id)) => Ok((id == parent.mount.id).then_some(handle)),
            Err(Errno::NOENT) => Err(Errno::NOENT),
            Err(_) => Ok(None),
        }
    }

    fn enter(
        &self,
        file: BorrowedFd<'_>,
        id: u64,
        handle: Option<&FileHandle>,
        parent: Option<&Node>,
    ) -> Result<Arc<SourceMount>, Errno> {
        let known = self.lock().get(&id).and_then(Weak::upgrade);
        if let Some(mount) = known {
            if let (None, Some(_), Some(handle)) = (mount.anchor.get(), &mount.way, handle) {
                mount.set_anchor(file, handle);
            }
            return Ok(mount);
        }
        let mounted = self.table.mount_with_id(id).ok().flatten();
        if mounted.as_ref().is_some_and(is_passthrough) {
            return Err(Errno::LOOP);
        }
        let restrictions = match &mounted {
            Some(mounted) => mounted.restrictions,
            None => restrictions_of(file)?,
        };
        // Not under the lock: a file system that hangs delays no other request.
        let anchor = handle.and_then(|handle| anchor(file, handle));
        let mut known = self.lock();
        known.retain(|_, mount| mount.strong_count() > 0);
        let next = &self.region.header().counters.next_mount;
        let index = next.load(Relaxed);
        next.store(index.wrapping_add(1), Release);
        let record = OwnedCell::new(&self.region, |cell: &MountCell| {
            cell.id.store(id, Relaxed);
            cell.index.store(index, Relaxed);
            cell.anchor.store(anchor.as_ref().map_or(0, |anchor| anchor.as_raw_fd().cast_unsigned()), Relaxed);
            let directory = parent.and_then(|parent| Some((parent.mount.index, parent.handle()?)));
            cell.length.store(directory.map_or(0, |(_, handle)| handle.length()), Relaxed);
            if let Some((mount, handle)) = directory {
                cell.parent.store(mount, Relaxed);
                handle.write(&cell.handle_kind, &cell.handle);
            }
        });
        let anchor = anchor.map(OnceLock::from).unwrap_or_default();
        // The visible mount carries the flags of the first one, which is the source's.
        let restrictions = if index == 0 { Restrictions::default() } else { restrictions };
        let mount =
            Arc::new(SourceMount { record: record.map_err(no_memory)?, id, index, anchor, way: None, restrictions });
        known.insert(id, Arc::downgrade(&mount));
        Ok(mount)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Weak<SourceMount>>> {
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

fn is_passthrough(mount: &MountTableEntry) -> bool {
    mount.fs_type == FS_TYPE && mount.source == PASSTHROUGH_SOURCE
}

/// The restrictions of a mount that is attached nowhere, or in another mount namespace.
fn restrictions_of(file: BorrowedFd<'_>) -> Result<Restrictions, Errno> {
    let flags = fstatvfs(file)?.f_flag;
    Ok(Restrictions {
        nosuid: flags.contains(StatVfsMountFlags::NOSUID),
        nodev: flags.contains(StatVfsMountFlags::NODEV),
        noexec: flags.contains(StatVfsMountFlags::NOEXEC),
    })
}

#[cfg(test)]
mod tests;
