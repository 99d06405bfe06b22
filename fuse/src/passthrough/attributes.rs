//! Attributes: from the source's `statx(2)` to the attributes that the kernel gets.
//!
//! The attributes include the [restrictions](SourceMount::restrictions) of the file's mount, which the kernel cannot apply to
//! single files:
//!
//! 1. On a `nosuid` mount a regular file has neither setuid nor setgid. (A file has no `security.capability` either.)
//! 2. On a `nodev` mount a device has the number 0:0, which no driver has: `open(2)` fails with `ENXIO`.
//! 3. On a `noexec` mount a regular file has no execute permission.

use std::ffi::{CStr, OsStr};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, UNIX_EPOCH};

use rustix::fs::{AtFlags, FileType, Statx, StatxAttributes, StatxFlags, statx};
use rustix::io::Errno;

use super::devices::device_of;
use super::node::Node;
use super::options::{CacheMode, PassthroughOptions};
use super::source_mount::SourceMount;
use crate::mount::table::Restrictions;
use crate::region::FileMark;
use crate::session::NodeId;
use crate::session::abi::{self, Attr, AttrOut, EntryOut, StatxOut, SxTime};

/// The time for which the kernel may cache a name, its absence, and attributes.
#[derive(Clone, Copy, Debug)]
pub struct CacheTimeouts {
    names: Duration,
    absence: Duration,
    attributes: Duration,
    /// The time after a change in which the source may still change a file's block count by itself.
    settling: Duration,
}

/// The validity with [`CacheMode::Auto`].
const MOMENT: Duration = Duration::from_secs(1);
/// In practice, for ever.
const FOREVER: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// Within this time the kernel has written everything to the disk (`vm.dirty_expire_centisecs` is 30 s by default).
const SETTLING: Duration = Duration::from_secs(60);

impl CacheTimeouts {
    /// The timeouts of a volume with these options, on whose source `source` is open.
    pub fn of(options: &PassthroughOptions, source: Option<impl AsFd>) -> Self {
        let names = match options.cache {
            CacheMode::None => Duration::ZERO,
            CacheMode::Auto => MOMENT,
            CacheMode::Always => FOREVER,
        };
        let absence = if options.has_exclusive_source() { FOREVER } else { Duration::ZERO };
        // statfs(2) of a network file system waits for its server, which may not answer when this server starts.
        let counts_at_once =
            |source: &_| (options.has_exclusive_source() || is_on_disk(source)) && counts_blocks_at_once(source);
        let is_settled = names <= MOMENT || source.as_ref().is_some_and(counts_at_once);
        let settling = if is_settled { Duration::ZERO } else { SETTLING };
        Self { names, absence, attributes: names, settling }
    }

    /// Returns the validity for `node`, whose attributes are `found`. If callers may have a writable mapping of the file, its
    /// attributes are not cached, because the server gets no request for a store through a mapping.
    pub fn for_node(self, node: &Node, found: &Statx) -> Self {
        if node.is_mappable() {
            return Self { attributes: Duration::ZERO, ..self };
        }
        if self.is_settling(found) { Self { attributes: self.attributes.min(MOMENT), ..self } } else { self }
    }

    /// Whether the kernel may have cached attributes of `node`.
    pub fn keeps_attributes_of(self, node: &Node) -> bool {
        !self.attributes.is_zero() && !node.is_mappable()
    }

    /// Whether the source may still change the block count in `found` by itself.
    fn is_settling(self, found: &Statx) -> bool {
        if self.settling.is_zero() {
            return false;
        }
        let changed = u64::try_from(found.stx_ctime.tv_sec).ok();
        let changed = changed.and_then(|seconds| UNIX_EPOCH.checked_add(Duration::from_secs(seconds)));
        // A time in the future means that the clock was set back after the change.
        changed.is_some_and(|changed| changed.elapsed().is_ok_and(|age| age < self.settling))
    }

    /// The answer to a LOOKUP of a name that does not exist.
    ///
    /// # Errors
    /// `ENOENT` if the kernel may not cache it.
    pub fn absence(self) -> Result<EntryOut, Errno> {
        if self.absence.is_zero() {
            return Err(Errno::NOENT);
        }
        // Node 0 means that the name does not exist.
        Ok(EntryOut { entry_valid: self.absence.as_secs(), ..Default::default() })
    }

    /// The answer with the node of a name.
    pub fn entry(self, node: NodeId, attr: Attr) -> EntryOut {
        EntryOut {
            nodeid: node,
            generation: 0,
            entry_valid: self.names.as_secs(),
            attr_valid: self.attributes.as_secs(),
            entry_valid_nsec: self.names.subsec_nanos(),
            attr_valid_nsec: self.attributes.subsec_nanos(),
            attr,
        }
    }

    /// The answer to GETATTR and SETATTR.
    pub fn attributes(self, attr: Attr) -> AttrOut {
        let Self { attributes, .. } = self;
        AttrOut { attr_valid: attributes.as_secs(), attr_valid_nsec: attributes.subsec_nanos(), dummy: 0, attr }
    }

    /// The answer to STATX.
    pub fn statx(self, stat: abi::Statx) -> StatxOut {
        let (attr_valid, attr_valid_nsec) = (self.attributes.as_secs(), self.attributes.subsec_nanos());
        StatxOut { attr_valid, attr_valid_nsec, flags: 0, spare: [0; 2], stat }
    }
}

/// Whether the file system updates a file's block count at each write. Other file systems (XFS, btrfs, ZFS) update it when they
/// write to the disk, or reduce it when they free preallocated blocks.
fn counts_blocks_at_once(source: &impl AsFd) -> bool {
    rustix::fs::fstatfs(source).is_ok_and(|status| [libc::EXT4_SUPER_MAGIC, libc::TMPFS_MAGIC].contains(&status.f_type))
}

/// Whether a file is on a block device of the node. File systems without one have devices of major number 0.
pub fn is_on_disk(file: &impl AsFd) -> bool {
    statx(file, c"", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::empty())
        .is_ok_and(|found| found.stx_dev_major != 0)
}

/// Returns the attributes of the file that `file` is open on; an `O_PATH` descriptor is enough.
///
/// # Errors
/// Those of `statx(2)`.
pub fn attributes_of(file: BorrowedFd<'_>) -> Result<Statx, Errno> {
    statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS | StatxFlags::BTIME)
}

/// Returns the attributes of the file that `name` leads to, with the id of its mount. Does not follow a symbolic link.
///
/// # Errors
/// Those of `statx(2)`.
pub fn attributes_of_name(directory: BorrowedFd<'_>, name: &CStr) -> Result<Statx, Errno> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    statx(directory, name, flags, StatxFlags::BASIC_STATS | StatxFlags::BTIME | StatxFlags::MNT_ID)
}

/// The file that a name leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NamedFile {
    /// There is no such name.
    Absent,
    /// The file has this mark.
    Marked(FileMark),
    /// The source did not answer with attributes.
    Unknown,
}

/// Checks that nothing is mounted at `name`. Returns the file that `name` leads to.
///
/// The kernel refuses to remove or rename a mount point only if the mount is in the caller's mount namespace. The server has a
/// namespace of its own, so without this check, its calls would unmount or move mounts of the node.
///
/// # Errors
/// `EBUSY` if `name` is a mount point.
pub fn check_not_mounted(directory: impl AsFd, name: &OsStr) -> Result<NamedFile, Errno> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
    match statx(directory, name, flags, StatxFlags::BTIME) {
        Ok(found) if found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) => Err(Errno::BUSY),
        Ok(found) => Ok(NamedFile::Marked(mark(&found))),
        // The error is that of the call that follows.
        Err(Errno::NOENT) => Ok(NamedFile::Absent),
        Err(_) => Ok(NamedFile::Unknown),
    }
}

/// The mark of the file. The kernel returns the inode number always.
fn mark(found: &Statx) -> FileMark {
    let birth = i128::from(found.stx_btime.tv_sec) * 1_000_000_000 + i128::from(found.stx_btime.tv_nsec);
    FileMark::new(found.stx_ino, (found.stx_mask & StatxFlags::BTIME.bits() != 0).then_some(birth))
}

/// The type of the file.
pub fn kind(found: &Statx) -> FileType {
    FileType::from_raw_mode(found.stx_mode.into())
}

/// Bytes that the file takes on the source.
pub fn bytes_taken(found: &Statx) -> u64 {
    found.stx_blocks.saturating_mul(512)
}

/// Attributes as LOOKUP and GETATTR return them.
pub fn attr(found: &Statx, mount: &SourceMount) -> Attr {
    let seconds = |time: &rustix::fs::StatxTimestamp| time.tv_sec.cast_unsigned();
    Attr {
        ino: mount.ino(device_of(found), found.stx_ino),
        size: found.stx_size,
        blocks: found.stx_blocks,
        atime: seconds(&found.stx_atime),
        mtime: seconds(&found.stx_mtime),
        ctime: seconds(&found.stx_ctime),
        atimensec: found.stx_atime.tv_nsec,
        mtimensec: found.stx_mtime.tv_nsec,
        ctimensec: found.stx_ctime.tv_nsec,
        mode: visible_mode(found, mount).into(),
        nlink: found.stx_nlink,
        uid: found.stx_uid,
        gid: found.stx_gid,
        rdev: visible_device(found, mount, device_number),
        blksize: found.stx_blksize,
        flags: 0,
    }
}

/// Attributes for STATX.
pub fn statx_attr(found: &Statx, mount: &SourceMount) -> abi::Statx {
    let time = |time: &rustix::fs::StatxTimestamp| SxTime { tv_sec: time.tv_sec, tv_nsec: time.tv_nsec, reserved: 0 };
    abi::Statx {
        mask: found.stx_mask & (StatxFlags::BASIC_STATS | StatxFlags::BTIME).bits(),
        blksize: found.stx_blksize,
        nlink: found.stx_nlink,
        uid: found.stx_uid,
        gid: found.stx_gid,
        mode: visible_mode(found, mount),
        ino: mount.ino(device_of(found), found.stx_ino),
        size: found.stx_size,
        blocks: found.stx_blocks,
        atime: time(&found.stx_atime),
        btime: time(&found.stx_btime),
        ctime: time(&found.stx_ctime),
        mtime: time(&found.stx_mtime),
        rdev_major: visible_device(found, mount, |major, _| major),
        rdev_minor: visible_device(found, mount, |_, minor| minor),
        dev_major: found.stx_dev_major,
        dev_minor: found.stx_dev_minor,
        ..Default::default()
    }
}

fn visible_mode(found: &Statx, mount: &SourceMount) -> u16 {
    const SETUID_SETGID: u16 = 0o6000;
    const EXECUTE: u16 = 0o111;
    let Restrictions { nosuid, noexec, .. } = mount.restrictions();
    let hidden = if nosuid { SETUID_SETGID } else { 0 } | if noexec { EXECUTE } else { 0 };
    if kind(found) == FileType::RegularFile { found.stx_mode & !hidden } else { found.stx_mode }
}

fn visible_device(found: &Statx, mount: &SourceMount, number: impl Fn(u32, u32) -> u32) -> u32 {
    if mount.restrictions().nodev { 0 } else { number(found.stx_rdev_major, found.stx_rdev_minor) }
}

/// `new_encode_dev` of the kernel.
fn device_number(major: u32, minor: u32) -> u32 {
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}
