//! The FUSE protocol as the kernel writes it: `include/uapi/linux/fuse.h`, version 7.45 (Linux 6.18). Names are the
//! kernel's, without `fuse_`.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::ids::{HandleId, LockOwner, NodeId};

/// The protocol's major version.
pub const MAJOR: u32 = 7;
/// The newest minor version known here.
pub const MINOR: u32 = 45;

/// Declares structs with the layout that the kernel uses.
macro_rules! wire {
    ($($(#[$meta:meta])* pub struct $name:ident { $($field:ident: $type:ty),* $(,)? })*) => { $(
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
        #[allow(missing_docs, reason = "the fields are the kernel's")]
        pub struct $name { $(pub $field: $type),* }
    )* };
}

wire! {
    /// The header of every request.
    pub struct InHeader {
        len: u32, opcode: u32, unique: u64, nodeid: NodeId, uid: u32, gid: u32, pid: u32, total_extlen: u16, padding: u16,
    }
    /// The header of every answer.
    pub struct OutHeader { len: u32, error: i32, unique: u64 }
    /// The kernel's offer.
    pub struct InitIn { major: u32, minor: u32, max_readahead: u32, flags: u32, flags2: u32, unused: [u32; 11] }
    /// The answer to the offer: the features that the server accepts.
    pub struct InitOut {
        major: u32, minor: u32, max_readahead: u32, flags: u32, max_background: u16, congestion_threshold: u16,
        max_write: u32, time_gran: u32, max_pages: u16, map_alignment: u16, flags2: u32, max_stack_depth: u32,
        request_timeout: u16, unused: [u16; 11],
    }
    /// Attributes of a node.
    pub struct Attr {
        ino: u64, size: u64, blocks: u64, atime: u64, mtime: u64, ctime: u64, atimensec: u32, mtimensec: u32,
        ctimensec: u32, mode: u32, nlink: u32, uid: u32, gid: u32, rdev: u32, blksize: u32, flags: u32,
    }
    /// A name and its node.
    pub struct EntryOut {
        nodeid: NodeId, generation: u64, entry_valid: u64, attr_valid: u64, entry_valid_nsec: u32, attr_valid_nsec: u32,
        attr: Attr,
    }
    /// Attributes, and how long they hold.
    pub struct AttrOut { attr_valid: u64, attr_valid_nsec: u32, dummy: u32, attr: Attr }
    /// A time that may be before 1970.
    pub struct SxTime { tv_sec: i64, tv_nsec: u32, reserved: i32 }
    /// Attributes as `statx(2)` has them.
    pub struct Statx {
        mask: u32, blksize: u32, attributes: u64, nlink: u32, uid: u32, gid: u32, mode: u16, spare0: u16, ino: u64,
        size: u64, blocks: u64, attributes_mask: u64, atime: SxTime, btime: SxTime, ctime: SxTime, mtime: SxTime,
        rdev_major: u32, rdev_minor: u32, dev_major: u32, dev_minor: u32, spare2: [u64; 14],
    }
    pub struct StatxIn { getattr_flags: u32, reserved: u32, fh: HandleId, sx_flags: u32, sx_mask: u32 }
    pub struct StatxOut { attr_valid: u64, attr_valid_nsec: u32, flags: u32, spare: [u64; 2], stat: Statx }
    pub struct ForgetIn { nlookup: u64 }
    pub struct BatchForgetIn { count: u32, dummy: u32 }
    /// One item of BATCH_FORGET.
    pub struct ForgetOne { nodeid: NodeId, nlookup: u64 }
    pub struct GetattrIn { getattr_flags: u32, dummy: u32, fh: HandleId }
    pub struct SetattrIn {
        valid: u32, padding: u32, fh: HandleId, size: u64, lock_owner: LockOwner, atime: u64, mtime: u64, ctime: u64,
        atimensec: u32, mtimensec: u32, ctimensec: u32, mode: u32, unused4: u32, uid: u32, gid: u32, unused5: u32,
    }
    pub struct MknodIn { mode: u32, rdev: u32, umask: u32, padding: u32 }
    pub struct MkdirIn { mode: u32, umask: u32 }
    pub struct RenameIn { newdir: NodeId }
    pub struct Rename2In { newdir: NodeId, flags: u32, padding: u32 }
    pub struct LinkIn { oldnodeid: NodeId }
    pub struct OpenIn { flags: u32, open_flags: u32 }
    pub struct CreateIn { flags: u32, mode: u32, umask: u32, open_flags: u32 }
    /// An open file or directory.
    pub struct OpenOut { fh: HandleId, open_flags: u32, backing_id: i32 }
    pub struct ReleaseIn { fh: HandleId, flags: u32, release_flags: u32, lock_owner: LockOwner }
    pub struct FlushIn { fh: HandleId, unused: u32, padding: u32, lock_owner: LockOwner }
    pub struct ReadIn { fh: HandleId, offset: u64, size: u32, read_flags: u32, lock_owner: LockOwner, flags: u32, padding: u32 }
    pub struct WriteIn { fh: HandleId, offset: u64, size: u32, write_flags: u32, lock_owner: LockOwner, flags: u32, padding: u32 }
    pub struct WriteOut { size: u32, padding: u32 }
    /// The file system as a whole.
    pub struct Kstatfs {
        blocks: u64, bfree: u64, bavail: u64, files: u64, ffree: u64, bsize: u32, namelen: u32, frsize: u32,
        padding: u32, spare: [u32; 6],
    }
    pub struct FsyncIn { fh: HandleId, fsync_flags: u32, padding: u32 }
    pub struct SetxattrIn { size: u32, flags: u32, setxattr_flags: u32, padding: u32 }
    pub struct GetxattrIn { size: u32, padding: u32 }
    pub struct GetxattrOut { size: u32, padding: u32 }
    /// A range of a file and its holder.
    pub struct FileLock { start: u64, end: u64, typ: u32, pid: u32 }
    pub struct LkIn { fh: HandleId, owner: LockOwner, lk: FileLock, lk_flags: u32, padding: u32 }
    pub struct InterruptIn { unique: u64 }
    pub struct FallocateIn { fh: HandleId, offset: u64, length: u64, mode: u32, padding: u32 }
    pub struct LseekIn { fh: HandleId, offset: u64, whence: u32, padding: u32 }
    pub struct LseekOut { offset: u64 }
    pub struct CopyFileRangeIn {
        fh_in: HandleId, off_in: u64, nodeid_out: NodeId, fh_out: HandleId, off_out: u64, len: u64, flags: u64,
    }
    pub struct CopyFileRangeOut { bytes_copied: u64 }
    /// An entry of a directory; its name follows.
    pub struct Dirent { ino: u64, off: u64, namelen: u32, typ: u32 }
    /// Notifies the kernel to drop its cached pages and attributes of a node.
    pub struct NotifyInvalInodeOut { ino: NodeId, off: i64, len: i64 }
    /// The arguments of ACCESS.
    pub struct AccessIn { mask: u32, padding: u32 }
    /// Notifies the kernel to forget nodes that are unused; their ids follow.
    pub struct NotifyPruneOut { count: u32, padding: u32, spare: u64 }
    /// The argument of `FUSE_DEV_IOC_BACKING_OPEN`.
    pub struct BackingMap { fd: i32, flags: u32, padding: u64 }
}

/// Bits of the first 32 and the next 32 flags of the handshake, as one number.
pub mod init {
    #![allow(missing_docs, reason = "the names are the kernel's")]
    pub const ASYNC_READ: u64 = 1 << 0;
    pub const POSIX_LOCKS: u64 = 1 << 1;
    pub const EXPORT_SUPPORT: u64 = 1 << 4;
    pub const BIG_WRITES: u64 = 1 << 5;
    pub const DONT_MASK: u64 = 1 << 6;
    pub const FLOCK_LOCKS: u64 = 1 << 10;
    pub const AUTO_INVAL_DATA: u64 = 1 << 12;
    pub const DO_READDIRPLUS: u64 = 1 << 13;
    pub const READDIRPLUS_AUTO: u64 = 1 << 14;
    pub const ASYNC_DIO: u64 = 1 << 15;
    pub const NO_OPEN_SUPPORT: u64 = 1 << 17;
    pub const PARALLEL_DIROPS: u64 = 1 << 18;
    pub const POSIX_ACL: u64 = 1 << 20;
    pub const MAX_PAGES: u64 = 1 << 22;
    pub const CACHE_SYMLINKS: u64 = 1 << 23;
    pub const NO_OPENDIR_SUPPORT: u64 = 1 << 24;
    pub const EXPLICIT_INVAL_DATA: u64 = 1 << 25;
    pub const HANDLE_KILLPRIV_V2: u64 = 1 << 28;
    pub const SETXATTR_EXT: u64 = 1 << 29;
    pub const INIT_EXT: u64 = 1 << 30;
    pub const PASSTHROUGH: u64 = 1 << 37;
    pub const HAS_RESEND: u64 = 1 << 39;
    pub const ALLOW_IDMAP: u64 = 1 << 40;
    pub const OVER_IO_URING: u64 = 1 << 41;
}

/// Answers to OPEN, OPENDIR and CREATE.
pub mod fopen {
    #![allow(missing_docs, reason = "the names are the kernel's")]
    pub const DIRECT_IO: u32 = 1 << 0;
    pub const KEEP_CACHE: u32 = 1 << 1;
    pub const CACHE_DIR: u32 = 1 << 3;
    pub const NOFLUSH: u32 = 1 << 5;
    pub const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
    pub const PASSTHROUGH: u32 = 1 << 7;
}

/// The attributes that SETATTR changes.
pub mod fattr {
    #![allow(missing_docs, reason = "the names are the kernel's")]
    pub const MODE: u32 = 1 << 0;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    pub const FH: u32 = 1 << 6;
    pub const ATIME_NOW: u32 = 1 << 7;
    pub const MTIME_NOW: u32 = 1 << 8;
    pub const KILL_SUIDGID: u32 = 1 << 11;
}

/// A command of io_uring: the kernel may put requests into an entry.
pub const URING_REGISTER: u32 = 1;
/// A command of io_uring: an entry has the answer to its request, and room for another request.
pub const URING_COMMIT_AND_FETCH: u32 = 2;
/// The code of a notification: the kernel drops its cached content of a node.
pub const NOTIFY_INVAL_INODE: i32 = 2;
/// The code of a notification: the kernel sends again all requests that were read and not answered (Linux 6.9).
pub const NOTIFY_RESEND: i32 = 7;
/// The code of a notification: the kernel forgets these nodes if they are unused (Linux 6.18).
pub const NOTIFY_PRUNE: i32 = 9;
/// The mark of a request that the kernel sends again, in its number.
pub const UNIQUE_RESEND: u64 = 1 << 63;
/// GETATTR and STATX come with a file handle.
pub const GETATTR_FH: u32 = 1 << 0;
/// A lock is `flock(2)`'s, not `fcntl(2)`'s.
pub const LK_FLOCK: u32 = 1 << 0;
/// A write comes from the page cache, maybe long after the call that made it.
pub const WRITE_CACHE: u32 = 1 << 0;
/// A write takes setuid and setgid off the file.
pub const WRITE_KILL_SUIDGID: u32 = 1 << 2;
/// An ACL takes setgid off the file.
pub const SETXATTR_ACL_KILL_SGID: u32 = 1 << 0;
/// FSYNC is `fdatasync(2)`.
pub const FSYNC_FDATASYNC: u32 = 1 << 0;
/// Longest value of an extended attribute, and longest list of their names (`xattr(7)`).
pub const XATTR_SIZE_MAX: u32 = 65536;
