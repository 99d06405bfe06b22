//! A mount of the source: the mount that the source directory is on, or a mount below that directory.
//!
//! A mount has an *anchor*: a descriptor of a file on the mount, with which the server opens file handles. The server keeps the
//! anchor as long as the kernel knows a node on the mount. Meanwhile the kernel does not use the mount's id for another mount, and
//! the host can unmount the mount only lazily.
//!
//! The server opens an anchor that no process has any more anew when a request needs it: from the source, or through the directory
//! in which the server found the mount.
//!
//! The visible mount of the volume carries the flags of the mount that the source is on. A mount below the source may
//! deny more (`nosuid`, `nodev`, `noexec`), and the kernel cannot know that of a FUSE file. So the [`Restrictions`] of that
//! mount decide which attributes its files show (`attributes`).

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::{Arc, OnceLock};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, StatxFlags, openat, statx};

use super::descriptor::reopen;
use super::devices::MountDevices;
use super::handle::FileHandle;
use super::hashing::HashKey;
use super::listing::SourceListing;
use super::state::{DeviceCell, MountCell, recordable};
use crate::mount::table::{MountTableEntry, Restrictions};
use crate::region::cells::OwnedCell;

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
    /// Leads to a file of the mount, to reopen an anchor that no process has any more.
    route: Option<MountRoute>,
    restrictions: Restrictions,
    devices: MountDevices,
    /// Whether a request has listed a file of the mount.
    is_listed: AtomicBool,
}

/// How the server finds a file of a mount.
#[derive(Debug)]
pub enum MountRoute {
    /// The source is on the mount.
    Source(OwnedFd),
    /// The mount point is one of the entries of a directory.
    Below {
        /// The mount that the directory is on.
        parent: Arc<SourceMount>,
        /// The directory.
        directory: FileHandle,
    },
    /// The server has to wait until a request looks up a file of the mount.
    Unknown,
}

impl MountRoute {
    /// The route that `cell` records.
    pub fn recorded(cell: &MountCell, known: &HashMap<u64, Arc<SourceMount>, HashKey>) -> MountRoute {
        let parent = known.get(&cell.parent.load(Relaxed)).cloned();
        let length = Some(cell.length.load(Relaxed)).filter(|length| *length > 0);
        let directory = length.and_then(|length| FileHandle::read(length, &cell.handle_kind, &cell.handle));
        parent.zip(directory).map_or(MountRoute::Unknown, |(parent, directory)| MountRoute::Below { parent, directory })
    }

    /// Opens a file of the mount `id`. Returns the descriptor and the file's handle.
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
    /// The inode number that the volume shows for the file `ino` of `device`, which is on this mount. Two files of the volume never
    /// show the same number ([`devices`](super::devices) names the limit).
    pub fn ino(&self, device: u64, ino: u64) -> u64 {
        self.devices.shown(device, ino, self.record.region())
    }

    /// As [`ino`](Self::ino), for a listed file. `None` while files of the mount are known to have one device only.
    pub fn listed_ino(&self, device: Option<u64>, ino: u64) -> u64 {
        device.map_or_else(|| self.devices.shown_of_first(ino), |device| self.ino(device, ino))
    }

    /// Whether files of this mount are known to have several devices.
    pub fn has_several_devices(&self) -> bool {
        self.devices.are_several()
    }

    /// Takes over a device that a dead server left.
    pub fn inherit_device(&self, record: OwnedCell<DeviceCell>) {
        self.devices.inherit(record);
    }

    /// Whether the device of a listed file has to be read from the file. Without handles, files may have other devices than their
    /// directory, as in an overlayfs with `xino=off`: the first file that is listed shows that.
    pub fn has_devices_by_file(&self) -> bool {
        !self.has_handles() && (self.has_several_devices() || !self.is_listed.swap(true, Relaxed))
    }

    /// A mount that no request has reached before. `record` describes it.
    pub fn new(record: OwnedCell<MountCell>, anchor: Option<OwnedFd>, restrictions: Restrictions) -> SourceMount {
        let (id, index) = (record.id.load(Relaxed), record.index.load(Relaxed));
        // The visible mount carries the flags of the first mount, which the source is on.
        let restrictions = if index == 0 { Restrictions::default() } else { restrictions };
        SourceMount {
            record,
            id,
            index,
            anchor: anchor.map(OnceLock::from).unwrap_or_default(),
            route: None,
            restrictions,
            devices: MountDevices::new(index),
            is_listed: AtomicBool::new(false),
        }
    }

    /// A mount that a dead server left. `table` lists the mounts of the source.
    pub fn inherit(
        record: OwnedCell<MountCell>,
        anchor: Option<OwnedFd>,
        route: Option<MountRoute>,
        table: &[MountTableEntry],
    ) -> SourceMount {
        let (id, index) = (record.id.load(Relaxed), record.index.load(Relaxed));
        // A mount that the host has unmounted lazily is not in the table. The server does not ask the mount's file system: if that
        // is unreachable, all volumes of the pod would wait for it.
        let listed = table.iter().find(|mounted| mounted.id == id).map(|mounted| mounted.restrictions);
        let restrictions = if index == 0 { Restrictions::default() } else { listed.unwrap_or(Restrictions::ALL) };
        SourceMount {
            record,
            id,
            index,
            anchor: anchor.map(OnceLock::from).unwrap_or_default(),
            route,
            restrictions,
            devices: MountDevices::new(index),
            is_listed: AtomicBool::new(false),
        }
    }

    /// The id of the mount, as `/proc/self/mountinfo` has it.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The restrictions of the mount beyond those of the volume's visible mount.
    pub fn restrictions(&self) -> Restrictions {
        self.restrictions
    }

    /// Whether the source directory is on this mount: otherwise this is a mount below the source.
    pub fn is_of_source(&self) -> bool {
        self.index == 0
    }

    /// The volume's number for the mount.
    pub fn index(&self) -> u64 {
        self.index
    }

    /// The descriptor with which file handles of this mount are opened.
    pub fn anchor(&self) -> Option<BorrowedFd<'_>> {
        if self.anchor.get().is_none() {
            let (file, handle) = self.route.as_ref()?.file(self.id)?;
            self.set_anchor(file.as_fd(), &handle);
        }
        self.anchor.get().map(AsFd::as_fd)
    }

    /// Whether the server opens the files of the mount by handles.
    pub fn has_handles(&self) -> bool {
        self.anchor.get().is_some() || self.route.is_some()
    }

    /// Opens a missing anchor anew through `file`, which is on the mount.
    pub fn restore_anchor(&self, file: BorrowedFd<'_>, handle: &FileHandle) {
        if self.anchor.get().is_none() && self.route.is_some() {
            self.set_anchor(file, handle);
        }
    }

    /// Opens the anchor anew through `file`, which is on the mount.
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
