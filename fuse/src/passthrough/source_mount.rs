//! A mount of the source: the one it is on, or one below it.
//!
//! It has an *anchor*: a descriptor of a file on it that file handles are opened with. A mount stays as long as one
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
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::{Arc, OnceLock};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, StatxFlags, openat, statx};

use super::descriptor::reopen;
use super::handle::FileHandle;
use super::hashing::HashKey;
use super::listing::SourceListing;
use super::state::{MountCell, recordable};
use crate::mount::table::{MountTableEntry, Restrictions};
use crate::region::cells::OwnedCell;

/// Bits of a file's number that tell the mounts below the source apart.
const INDEX_SHIFT: u32 = 48;

/// A mount of the source: the mount that the source directory is on, or a mount below it.
#[derive(Debug)]
pub struct SourceMount {
    /// Dropped before the anchor that it names is closed.
    record: OwnedCell<MountCell>,
    id: u64,
    /// 0 for the mount that the source directory is on.
    index: u64,
    /// Empty if the file system has no file handles: then nodes keep their descriptors. Also empty in a successor until it
    /// reopens an anchor that no process has any more.
    anchor: OnceLock<OwnedFd>,
    /// The way to reopen an anchor that no process has any more.
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
    pub fn recorded(cell: &MountCell, known: &HashMap<u64, Arc<SourceMount>, HashKey>) -> MountRoute {
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

    /// A mount that was not met before, as `record` describes it.
    pub fn new(record: OwnedCell<MountCell>, anchor: Option<OwnedFd>, restrictions: Restrictions) -> SourceMount {
        let (id, index) = (record.id.load(Relaxed), record.index.load(Relaxed));
        // The visible mount carries the flags of the first one, which is the source's.
        let restrictions = if index == 0 { Restrictions::default() } else { restrictions };
        SourceMount {
            record,
            id,
            index,
            anchor: anchor.map(OnceLock::from).unwrap_or_default(),
            way: None,
            restrictions,
        }
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

    /// Its id, as `/proc/self/mountinfo` has it.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Its restrictions beyond those of the volume's visible mount.
    pub fn restrictions(&self) -> Restrictions {
        self.restrictions
    }

    /// Whether the source directory is on it, and it is not a mount below.
    pub fn is_of_source(&self) -> bool {
        self.index == 0
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
    pub fn has_handles(&self) -> bool {
        self.anchor.get().is_some() || self.way.is_some()
    }

    /// As [`anchor`](Self::anchor) opens it anew, now that `file` of the mount is known.
    pub fn restore_anchor(&self, file: BorrowedFd<'_>, handle: &FileHandle) {
        if self.anchor.get().is_none() && self.way.is_some() {
            self.set_anchor(file, handle);
        }
    }

    /// Opens the anchor anew, now that a file of the mount is known.
    fn set_anchor(&self, file: BorrowedFd<'_>, handle: &FileHandle) {
        let Some(anchor) = anchor(file, handle) else { return };
        let number = anchor.as_raw_fd().cast_unsigned();
        // If two threads open the anchor, the first one records its descriptor.
        if self.anchor.set(anchor).is_ok() {
            self.record.anchor.store(number, Release);
        }
    }
}

/// Returns a descriptor that can open file handles of the mount; `None` if the file system cannot do that.
pub(super) fn anchor(file: BorrowedFd<'_>, handle: &FileHandle) -> Option<OwnedFd> {
    let kind = FileType::from_raw_mode(statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::TYPE).ok()?.stx_mode.into());
    // Opening a file of another type may have effects, or block.
    if !matches!(kind, FileType::Directory | FileType::RegularFile) {
        return None;
    }
    let anchor = reopen(file, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOATIME).ok()?;
    handle.open(anchor.as_fd(), OFlags::PATH).ok()?;
    Some(recordable(anchor))
}
